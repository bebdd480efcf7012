"""``--stats`` where a GPU makes the Grams: it counts what it is sent, and the host only what it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from checkpoints import minilm_weights, one_file, random_weights, sharded
from gpu_on_cpu import pretend
from hub_server import HubServer, use_hub
from safetensors.torch import save_file
from test_statistics import check, tensors

import shardesd
from shardesd import spectra, statistics
from shardesd.demo import minilm

ELEMENTS = {name: value.size for name, value in tensors().items()}
NOT_WHOLE = {"h.0.attn.c_attn.weight", "mlp.experts.up_proj", "mlp.experts.down_proj", "conv.weight"}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements that the host has counted, at each time."""
    sizes: list[int] = []
    count = statistics.count

    def noted(raw: np.ndarray, dtype: str) -> Any:
        sizes.append(raw.size)
        return count(raw, dtype)

    monkeypatch.setattr(statistics, "count", noted)
    return sizes


def stats(*given: Any, **options: Any) -> pl.DataFrame:
    result = shardesd.scan(*given, stats=True, evals_thresh=0, **options)
    assert not result.layers["reason"].str.contains("Error").any()
    assert result.stats is not None
    return result.stats


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("cache", [False, True])
def test_every_kind_of_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int], shards: int, cache: bool
) -> None:
    found = tensors()
    folder = sharded(tmp_path / "m", found, shards)
    pretend(monkeypatch, 1 << 12)
    options = {"cache": cache, "cache_dir": tmp_path / "cache"}
    check(stats(folder, **options), found)
    whole = sum(
        x.size for name, x in found.items() if x.ndim == 2 and name not in NOT_WHOLE and name.endswith("weight")
    )
    assert sum(counted) <= sum(ELEMENTS.values()) - whole + ELEMENTS["model.embed_tokens.weight"]
    if cache:  # λ that are kept need no GPU: the host counts all
        counted.clear()
        result = shardesd.scan(folder, stats=True, evals_thresh=0, **options)
        assert result.stats is not None
        check(result.stats, found)
        assert sum(counted) == sum(ELEMENTS.values())


def test_minilm(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    staging = pretend(monkeypatch)
    check(stats(minilm(), cache=False), minilm_weights())
    small = ("position_embeddings", "token_type_embeddings", "position_ids")
    sent = sum(x.size for name, x in minilm_weights().items() if x.ndim == 2 and not any(s in name for s in small))
    assert staging.sent == 4 * sent
    assert sum(counted) == sum(x.size for x in minilm_weights().values()) - sent


@pytest.mark.parametrize("trouble", ["", "CUDA error: out of memory", "CUDA error: an illegal memory access"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_counts_an_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int], dtype: torch.dtype, trouble: str
) -> None:
    pretend(monkeypatch, 1 << 12)
    monkeypatch.setattr(statistics, "_LEAST_ON_GPU", 100)
    if trouble:

        def fails(matrix: spectra.Tallied, device: str) -> None:
            raise RuntimeError(trouble)

        monkeypatch.setattr(spectra, "count_cuda", fails)
    rng = np.random.default_rng(0)
    found = random_weights() | {"model.embed_tokens.weight": rng.standard_normal((900, 24)) + 7}
    found["model.embed_tokens.weight"][5, 3:9] = [0, 1e-9, 1e-8, 2e-8, -1e-8, 0]
    stored = {name: torch.from_numpy(value).to(dtype) for name, value in found.items()}
    (tmp_path / "m").mkdir()
    save_file(stored, tmp_path / "m" / "model.safetensors")
    found = {name: value.double().numpy() for name, value in stored.items()}
    check(stats(tmp_path / "m", cache=False), found)
    sizes = {name: value.size for name, value in found.items()}
    by_host = {name for name, value in found.items() if value.ndim != 2}
    if "memory access" in trouble:  # the GPU is given up
        by_host = set(found)
    elif trouble:
        by_host.add("model.embed_tokens.weight")
    assert sum(counted) == sum(sizes[name] for name in by_host)


def test_one_that_a_gpu_has_no_memory_for_is_counted_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    solve = spectra.compute_many

    def full(opened: Any, *, n: int, **how: Any) -> Any:
        if n == 24:
            raise RuntimeError("CUDA error: out of memory")
        return solve(opened, n=n, **how)

    monkeypatch.setattr(spectra, "compute_many", full)
    found = random_weights()
    found["extra.weight"] = np.random.default_rng(1).standard_normal((24, 60)).astype(np.float32)
    check(stats(one_file(tmp_path / "m", found), cache=False), found)


def test_a_matrix_without_a_spectrum_has_its_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    found = random_weights()
    found["zeros.weight"] = np.zeros((12, 9), np.float32)
    result = shardesd.scan(one_file(tmp_path / "m", found), stats=True, cache=False)
    assert "zeros" in result.failed["longname"].to_list()
    assert result.stats is not None
    (row,) = result.stats.filter(pl.col("tensor") == "zeros.weight").iter_rows(named=True)
    assert (row["mean"], row["std"], row["sparsity"]) == (0, 0, 1)


def test_what_comes_over_the_network_is_counted_once_whether_its_spectra_are_kept_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tensors()
    found["alone.weight"] = np.random.default_rng(2).standard_normal((53, 37)).astype(np.float32)  # no group has its n
    with HubServer() as server:
        use_hub(monkeypatch, server, tmp_path / "hub-cache")
        server.add("org/name", sharded(tmp_path / "m", found, 3))
        pretend(monkeypatch, 1 << 12)
        for _ in range(2):
            check(stats("org/name", fetch="ranges", cache_dir=tmp_path / "cache"), found)
