"""The Python API: repos, live modules and state dicts give the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from checkpoints import one_file, random_weights, sharded

import shardesd
from shardesd.engine import Device, Engine
from shardesd.events import RowDone, ScanFinished, ScanStarted, ShardDone
from shardesd.records import ROW_COLUMNS, Row


def state_dict(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def same(a: pl.DataFrame, b: pl.DataFrame) -> None:
    for ours, theirs in zip(a.to_dicts(), b.to_dicts(), strict=True):
        for column in ("model_id", "seconds"):
            del ours[column], theirs[column]
        for column, value in ours.items():
            assert value == (pytest.approx(theirs[column], rel=1e-12) if isinstance(value, float) else theirs[column])


def test_a_scan_without_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    monkeypatch.chdir(tmp_path)
    result = shardesd.scan(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert result.layers.columns == list(ROW_COLUMNS)
    assert result.layers.height == 6
    assert result.layers["longname"].to_list() == sorted(result.layers["longname"])
    assert set(result.spectra) == set(result.layers["longname"])
    W_MN = random_weights()["model.layers.1.mlp.down_proj.weight"].astype(np.float64)
    expected = np.linalg.svd(W_MN, compute_uv=False)[::-1] ** 2
    np.testing.assert_allclose(result.spectra["model.layers.1.mlp.down_proj"], expected, rtol=1e-10)
    assert result.summary["num_layers"] == 6
    assert result.summary["alpha_mean"] == pytest.approx(result.layers["alpha"].mean())


def test_a_state_dict_and_a_module_give_the_rows_of_the_file(tmp_path: Path) -> None:
    tensors = random_weights()
    from_file = shardesd.scan(one_file(tmp_path / "model", tensors)).layers
    same(shardesd.scan(state_dict(tensors)).layers, from_file)
    module = torch.nn.Module()
    for name, array in tensors.items():
        parent = module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.register_parameter(leaf, torch.nn.Parameter(torch.from_numpy(array)))
    same(shardesd.scan(module).layers, from_file)


def test_half_precision_weights_are_analysed_as_they_are_stored() -> None:
    tensors = state_dict(random_weights())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        ours = shardesd.scan(stored).spectra["model.layers.0.self_attn.q_proj"]
        W_MN = stored["model.layers.0.self_attn.q_proj.weight"].double().numpy()
        expected = np.linalg.svd(W_MN, compute_uv=False)[::-1] ** 2
        assert np.abs(ours - expected).max() <= 1e-12 * expected[-1]


def test_an_embedding_of_a_module_is_known_by_its_class() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(40, 16)
            self.first = torch.nn.Linear(16, 32)
            self.tail = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.LayerNorm(8))

    layers = shardesd.scan(Net()).layers
    assert layers["longname"].to_list() == ["first", "tail.0"]
    assert layers["params"].to_list() == [16 * 32 + 32, 8 * 4 * 9 + 8]
    assert layers["num_evals"].to_list() == [16, 36]
    assert layers["model_id"].unique().to_list() == ["Net"]


def test_stream_gives_rows_as_they_come(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model", random_weights(layers=4))
    rows = shardesd.stream(folder, exclude=["*down_proj"])
    first = next(rows)
    assert isinstance(first, Row)
    assert len([first, *rows]) == 8
    early = shardesd.stream(folder)
    next(early)
    early.close()


def test_events_tell_the_whole_story(tmp_path: Path) -> None:
    events: list[object] = []
    folder = sharded(tmp_path / "model", random_weights(layers=4))
    result = shardesd.scan(folder, on_event=events.append)
    started = events[0]
    assert isinstance(started, ScanStarted)
    assert (started.matrices, started.exact, started.shards) == (12, True, 3)
    assert started.total_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    rows = [event.row for event in events if isinstance(event, RowDone)]
    assert sum(row.status == "ok" for row in rows) == 12
    assert sum(row.status == "skipped" for row in rows) == 6
    assert sorted(event.number for event in events if isinstance(event, ShardDone)) == [1, 2, 3]
    finished = events[-1]
    assert isinstance(finished, ScanFinished)
    assert (finished.analysed, finished.failed) == (12, 0)
    assert sum(finished.skipped.values()) == sum(result.skipped.values()) == 6


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(shardesd.ShardesdError, match=r"'fix_finger' is unknown .*fix_fingers"):
        shardesd.scan({}, fix_finger="DKS")


def test_a_commented_example_of_the_readme_holds(tmp_path: Path) -> None:
    result = shardesd.scan(one_file(tmp_path / "m", random_weights()), out=tmp_path / "results", format="parquet")
    assert pl.read_parquet(tmp_path / "results" / "models" / "m.parquet").height == result.layers.height


def test_names_that_no_file_can_hold_are_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(30, 20) for name in ("m.\ud800.weight", "m.a.weight", "m.ü.weight", "m.z.weight")}
    in_memory = shardesd.scan(weights, cache=False, device="cpu")
    on_disk = shardesd.scan(weights, cache=False, device="cpu", out=tmp_path)
    names = in_memory.layers["longname"].to_list()
    assert "m.\\ud800" in names
    assert names == on_disk.layers["longname"].to_list()
    assert sorted(in_memory.spectra) == sorted(on_disk.spectra) == sorted(names)


class Noting(Engine):
    """Notes the order in which tasks come."""

    def map(self, tasks: Any, **how: Any) -> Any:
        self.came = list(tasks)
        return super().map(iter(self.came), **how)


def test_the_largest_matrices_of_a_shard_are_first(tmp_path: Path) -> None:
    """Wherever they lie in it, so that what takes longest is not begun last."""
    rng = np.random.default_rng(0)
    sizes = {"a": (90, 16), "b": (16, 90), "c": (64, 80), "d": (70, 500), "e": (16, 16), "f": (64, 64)}
    tensors = {f"{name}.weight": rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    engine = Noting((Device("cpu"),), budget=10**9)
    shardesd.scan(one_file(tmp_path / "model", tensors | {"g": np.ones(900, np.float32)}), engine=engine)
    assert [task.key.item.longname for task in engine.came] == ["d", "c", "f", "a", "b", "e"]
