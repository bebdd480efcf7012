"""``--stats`` equals numpy on every tensor, whatever way a tensor is read; and ``--view layers``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from checkpoints import cli, minilm_weights, one_file, random_weights, sharded
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

import shardesd
from shardesd import metrics
from shardesd.demo import minilm
from shardesd.records import ShardRef, Skip, StatsRow, TensorRef
from shardesd.results.statistics import STATS_SCHEMA
from shardesd.show import layers_view
from shardesd.statistics import Statistics, count


def check(stats: pl.DataFrame, tensors: dict[str, np.ndarray]) -> None:
    assert sorted(stats["tensor"]) == sorted(tensors)
    for row in stats.iter_rows(named=True):
        x = tensors[row["tensor"]].astype(np.float64)
        expected = {"mean": x.mean(), "std": x.std(), "var": x.var(), "min": x.min(), "max": x.max()}
        expected["sparsity"] = (abs(x) <= 1e-8).mean()
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-12), (row["tensor"], name)
        assert row["numel"] == x.size
        if row["matrices"] == 1 and x.ndim == 2:
            sigma = np.linalg.svd(x, compute_uv=False)
            energy = np.cumsum(sigma**2)
            assert row["design_rank"] == min(x.shape)
            assert row["actual_rank"] == (sigma > 1e-6 * sigma[0]).sum()
            assert row["rank_ratio"] == row["actual_rank"] / row["design_rank"]
            assert row["svd_90_percent_rank"] == np.argmax(energy >= 0.9 * energy[-1]) + 1
            assert row["svd_90_percent_ratio"] == row["svd_90_percent_rank"] / row["design_rank"]


def test_minilm(tmp_path: Path) -> None:
    result = shardesd.scan(minilm(), stats=True)
    assert result.stats is not None
    check(result.stats, minilm_weights())
    assert result.stats["matrices"].drop_nulls().sum() == 37
    assert shardesd.scan(minilm(), include="nothing").stats is None


def test_columns() -> None:
    assert list(STATS_SCHEMA) == list(StatsRow.__dataclass_fields__)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((24, 24)).astype(np.float32)
    W[:, 12:] = W[:, :12]
    W[0] = 0
    return {
        **random_weights(),
        "h.0.attn.c_attn.weight": rng.standard_normal((16, 48)).astype(np.float32),
        "mlp.experts.up_proj": rng.standard_normal((3, 8, 6)).astype(np.float32) + 1000,
        "mlp.experts.down_proj": rng.standard_normal((3, 2, 40)).astype(np.float32),
        "half.weight": W.astype(np.float16),
        "double.weight": W.astype(np.float64) * 1e-30,
        "conv.weight": rng.standard_normal((8, 6, 3, 3)).astype(np.float32),
        "position_ids": np.arange(7)[None],
        "flags": np.array([True, False, True]),
        "scale": np.array(3.5, np.float32),
    }


@pytest.mark.parametrize("count", [1, 3])
def test_every_kind_of_tensor(tmp_path: Path, count: int) -> None:
    found = tensors()
    folder = sharded(tmp_path / "m", found, count)
    result = shardesd.scan(folder, stats=True, evals_thresh=0)
    assert result.stats is not None
    check(result.stats, found)
    rows = {row["tensor"]: row for row in result.stats.iter_rows(named=True)}
    assert rows["half.weight"]["actual_rank"] == 12
    assert (rows["mlp.experts.up_proj"]["matrices"], rows["mlp.experts.up_proj"]["design_rank"]) == (3, 18)
    assert rows["mlp.experts.down_proj"]["matrices"] is None
    assert rows["conv.weight"]["design_rank"] == 6 * 9
    assert rows["position_ids"]["mean"] == 3
    assert rows["model.norm.weight"]["design_rank"] is None
    live = shardesd.scan({name: torch.from_numpy(value) for name, value in found.items()}, stats=True, evals_thresh=0)
    assert live.stats is not None
    assert live.stats.drop("model_id").equals(result.stats.drop("model_id"))


def test_bfloat16() -> None:
    W = torch.randn(40, 30).to(torch.bfloat16)
    result = shardesd.scan({"a.weight": W}, stats=True)
    assert result.stats is not None
    check(result.stats, {"a.weight": W.double().numpy()})


def test_blocks_of_a_matrix_that_does_not_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    found = {"wide.weight": rng.standard_normal((700, 3000)), "tall.weight": rng.standard_normal((3000, 700))}
    result = shardesd.scan(one_file(tmp_path / "m", found), stats=True, max_memory=60_000_000)
    assert set(result.layers["status"]) == {"ok"}
    assert result.stats is not None
    check(result.stats, found)


def test_what_cannot_be_counted_is_null(tmp_path: Path) -> None:
    found = {"nan.weight": np.full((8, 8), np.nan, np.float32), "a.qweight": np.ones((8, 8), np.int32)}
    result = shardesd.scan(one_file(tmp_path / "m", found), stats=True)
    assert result.stats is not None
    for row in result.stats.iter_rows(named=True):
        assert row["mean"] is row["std"] is row["min"] is row["design_rank"] is None


@pytest.mark.parametrize("delta", [False, True])
def test_what_an_adapter_changes_is_counted_merged(tmp_path: Path, delta: bool) -> None:
    rng = np.random.default_rng(0)
    fused, other = rng.standard_normal((48, 16)), rng.standard_normal((16, 16))
    names = [f"gpt_neox.layers.0.attention.{part}.weight" for part in ("query_key_value", "dense")]
    base = one_file(
        tmp_path / "base", dict(zip(names, (fused.astype(np.float32), other.astype(np.float32)), strict=True))
    )
    (base / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "num_attention_heads": 4}))
    A, B = rng.standard_normal((2, 16)).astype(np.float32), rng.standard_normal((48, 2)).astype(np.float32)
    module = f"base_model.model.{names[0].removesuffix('.weight')}"
    adapter = one_file(
        tmp_path / "adapter",
        {f"{module}.lora_A.weight": A, f"{module}.lora_B.weight": B},
        "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query_key_value"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    result = shardesd.scan(adapter, base=base, stats=True, delta=delta, evals_thresh=0)
    change = 2 * B.astype(np.float64) @ A
    merged = {names[0]: change} if delta else {names[0]: fused + change, names[1]: other}
    assert result.stats is not None
    for row in result.stats.iter_rows(named=True):
        x = merged[row["tensor"]]
        assert (row["mean"], row["std"]) == (pytest.approx(x.mean(), rel=1e-5), pytest.approx(x.std(), rel=1e-5))
    by_head = merged[names[0]].reshape(4, 3, 4, 16)
    for i, part in enumerate("qkv"):
        eigs = result.spectra[f"{names[0].removesuffix('.weight')}_{part}"]
        sigma = np.linalg.svd(by_head[:, i].reshape(16, 16), compute_uv=False)[::-1]
        np.testing.assert_allclose(eigs, sigma**2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["csv", "parquet", "jsonl"])
def test_files_and_formats(tmp_path: Path, format: str) -> None:
    folder, out = one_file(tmp_path / "m", random_weights()), tmp_path / "out"
    first = shardesd.scan(folder, stats=True, out=out, format="csv")
    again = shardesd.scan(folder, stats=True, out=out, format=format)
    assert first.stats is not None
    assert again.stats is not None
    assert again.stats.equals(first.stats)
    assert [file.name for file in (out / "stats").iterdir()] == [f"m.{format}"]
    assert out / "stats" / f"m.{format}" in again.files
    with pytest.raises(shardesd.ShardesdError, match="stats=True, now False"):
        shardesd.scan(folder, out=out, format=format)
    shardesd.scan(folder, out=out, format=format, overwrite=True)
    assert list((out / "stats").iterdir()) == []


def test_a_resumed_scan_has_all_statistics(tmp_path: Path) -> None:
    folder, out = one_file(tmp_path / "m", random_weights()), tmp_path / "out"
    import threading

    stop = threading.Event()

    def listen(event: Any) -> None:
        if type(event).__name__ == "RowDone" and event.row.status == "ok":
            stop.set()

    shardesd.scan(folder, out=out, stats=True, on_event=listen, stop=stop)
    result = shardesd.scan(folder, out=out, stats=True)
    assert result.stats is not None
    check(result.stats, random_weights())
    assert result.stats["matrices"].drop_nulls().sum() == 6


def test_what_fails_aside_ends_the_scan_with_an_error_and_is_counted_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = one_file(tmp_path / "m", random_weights()), tmp_path / "out"

    def full(self: Statistics, *given: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Statistics, "read", full)
        with pytest.raises(
            shardesd.ShardesdError, match=r"statistics of .* and 3 more in model.* no memory.* run again"
        ):
            shardesd.scan(folder, out=out, stats=True, cache=False)
    assert not (out / "stats").exists()
    result = shardesd.scan(folder, out=out, stats=True, cache=False)
    assert result.stats is not None
    check(result.stats, random_weights())


def test_time_is_linear_in_what_is_read_alone() -> None:
    """By the work, not by the clock: how often a part is looked at."""
    statistics = Statistics()
    shard = SimpleNamespace(ref=ShardRef(name="s"), on_server=False, in_blocks=lambda tensor: True)
    looked = 0

    class Part(TensorRef):
        __slots__ = ()

        @property
        def nbytes(self) -> int:
            nonlocal looked
            looked += 1
            return 32

    tasks: list[Any] = []
    for at in range(3000):
        part = Part(
            name=f"layers.{at}.norm.weight", dtype="F32", shape=(8,), shard="s", start=32 * at, end=32 * at + 32
        )
        statistics.expect(part, [Skip(longname=part.name, reason="1-D", tensor=part)], ())
        tasks += statistics.tasks(shard, rest=False)  # type: ignore[arg-type]
    tasks += statistics.tasks(shard, rest=True)  # type: ignore[arg-type]
    assert [len(task.key.item.tensors) for task in tasks] == [3000]
    assert looked < 20 * 3000


@given(arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6)), st.integers(1, 50), st.floats(-1e9, 1e9))
def test_moments_merge_without_loss(x: np.ndarray, step: int, shift: float) -> None:
    x = x + shift
    scratch = metrics.Scratch(step)
    total = metrics.merge(scratch.moments(x[i : i + step]) for i in range(0, len(x), step))
    assert total is not None
    scale = max(1.0, float(abs(x).max()))
    assert total.mean == pytest.approx(x.mean(), abs=1e-12 * scale)
    assert total.var == pytest.approx(x.var(), rel=1e-6, abs=1e-14 * scale * scale)
    assert (total.low, total.high, total.zeros) == (x.min(), x.max(), (abs(x) <= 1e-8).sum())


ODD = [0.0, -0.0, 1e-8, -1e-8, 1.01e-8, -1.01e-8, 1e-45, -1e-45, 3.0, -3.0, 3e38, -3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@given(st.lists(st.sampled_from(ODD), min_size=1, max_size=5), st.sampled_from(["both", "positive", "negative"]))
def test_extremes_and_zeros_of_odd_numbers(dtype: Any, values: list[float], signs: str) -> None:
    with np.errstate(over="ignore"):
        x = np.array(values).astype(dtype)
    x = x if signs == "both" else np.copysign(x, 1 if signs == "positive" else -1).astype(dtype)
    found = count(x, {2: "F16", 4: "F32", 8: "F64"}[x.itemsize])
    assert found is not None
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        np.testing.assert_array_equal([found.low, found.high], [wide.min(), wide.max()])
        np.testing.assert_allclose([found.mean, found.var], [wide.mean(), wide.var()], rtol=1e-9)
    assert found.zeros == (abs(wide) <= 1e-8).sum()


@pytest.mark.parametrize("mean", [0, 1e-3, 1, 31, 32, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_mean_costs_digits(mean: float, dtype: Any) -> None:
    """Below and above where the sums' way would cancel; and a last chunk that is short."""
    x = (np.random.default_rng(0).standard_normal(300_007) + mean).astype(dtype)
    total = count(x, "F32" if dtype == np.float32 else "F64")
    assert total is not None
    wide = x.astype(np.float64)
    assert total.var == pytest.approx(wide.var(), rel=1e-9)
    assert total.mean == pytest.approx(wide.mean(), rel=1e-11, abs=1e-14)
    assert (total.low, total.high, total.size) == (wide.min(), wide.max(), x.size)


def test_a_large_mean_costs_no_digits() -> None:
    x = np.random.default_rng(0).standard_normal(1_000_000) * 1e-3 + 1e4
    total = count(x, "F64")
    assert total is not None
    assert total.std == pytest.approx(x.std(), rel=1e-9)


def shown(renderable: Any, width: int = 110) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    console.file.close()
    return console.export_text()


def test_the_view_by_layers(tmp_path: Path) -> None:
    weights = random_weights(layers=11)
    weights["decoder.layers.0.fc.weight"] = np.ones((4, 4), np.float32)
    result = shardesd.scan(one_file(tmp_path / "m", weights), stats=True)
    for text in (shown(layers_view(result.layers)), shown(layers_view(result.layers, result.stats))):
        titles = [line.split("  ")[0] for line in text.splitlines() if line.startswith(("layer", "outside"))]
        layers = [f"layer {i} of model.layers" for i in range(11)]
        assert titles[:12] == ["layer 0 of decoder.layers", *layers]
    assert "outside the layers  2 tensors, 2,328 elements" in text
    assert "model.layers.10.mlp.down_proj.weight" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_the_command_line(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "m", random_weights())
    result = cli("scan", folder, "--out", tmp_path / "out", "--stats", "--view", "layers")
    assert result.exit_code == 0
    assert "layer 1  4 tensors" in result.stdout
    assert (tmp_path / "out" / "stats" / "m.csv").exists()
    wrong = cli("scan", folder, "--view", "heads")
    assert wrong.exit_code == 1
    assert "--view 'heads' is invalid" in wrong.stderr
    assert json.loads((tmp_path / "out" / "runs" / "m.json").read_text())["options"]["stats"] is True
