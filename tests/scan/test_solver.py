"""Groups that a GPU solves together: what is kept leaves the group, what fails costs its own row only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import one_file, random_weights
from gpu_on_cpu import pretend
from polars.testing import assert_frame_equal

import shardesd
from shardesd import matrices, metrics, spectra
from shardesd.checkpoint import StoredShard, open_checkpoint
from shardesd.errors import ShardChanged
from shardesd.keep import Keep, Recall
from shardesd.options import ScanOptions
from shardesd.records import NO_MEMORY, MatrixRef, Spectrum, TensorRef
from shardesd.solver import Solved, Solver
from shardesd.source import open_source
from shardesd.spectra import gram


@pytest.mark.parametrize("active", [True, False])
def test_a_group_is_solved_once_and_then_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: bool) -> None:
    tensors = {name: W for name, W in random_weights(layers=6).items() if "self_attn" in name}
    tensors["model.layers.3.self_attn.q_proj.weight"][0, 0] = np.nan
    checkpoint = open_checkpoint(open_source(one_file(tmp_path / "model", tensors)))
    ref = checkpoint.shards[0]
    shard = checkpoint.open(ref, tmp_path / "model" / ref.name)
    options = ScanOptions()
    context = matrices.Context(options=options)
    items = [item for tensor in shard.tensors for item in matrices.plan(tensor, context)]
    pairs = [(item, shard) for item in items if isinstance(item, MatrixRef)]
    groups: list[int] = []

    def together(opened: list[Any], **how: Any) -> list[Spectrum | Exception]:
        groups.append(len(opened))
        results: list[Spectrum | Exception] = []
        how.pop("n")
        for open_ in opened:
            try:
                with open_() as parts:
                    results.append(spectra.compute(parts, **how | {"device": "cpu"}))
            except Exception as error:
                results.append(error)
        return results

    monkeypatch.setattr(spectra, "compute_many", together)
    recall = Recall(Keep(tmp_path / "kept", 10**6) if active else None, options)
    with ThreadPoolExecutor(2) as pool:
        solver = Solver(options, recall, 10**9, pool)

        def solved() -> list[tuple[Solved | Exception, float]]:
            found = solver.solve_many(pairs, "cuda:0")
            return [(one() if callable(one) else one, seconds) for one, seconds in found]

        first, again = solved(), solved()
    assert groups == ([12, 1] if active else [12, 12])
    for (item, _), (one, _), (two, _) in zip(pairs, first, again, strict=True):
        if "layers.3.self_attn.q" in item.longname:
            assert isinstance(one, Exception)
            assert isinstance(two, Exception)
            continue
        assert not isinstance(one, Exception)
        assert not isinstance(two, Exception)
        assert np.array_equal(one[0].eigs, two[0].eigs)
        assert (one[1], one[2], two[2]) == (two[1], False, active)
        W = tensors[f"{item.longname}.weight"].astype(np.float64)
        assert np.allclose(one[0].eigs, np.linalg.svd(W, compute_uv=False)[::-1] ** 2, rtol=0, atol=1e-10)
    shard.close()


def test_the_thread_that_feeds_a_gpu_fits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=6))
    expected = shardesd.scan(folder, device="cpu", cache=False).layers
    pretend(monkeypatch)
    threads: set[str] = set()

    def noted(measure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return measure(*given, **more)

        return run

    for name in ("measure", "measure_many"):
        monkeypatch.setattr(metrics, name, noted(getattr(metrics, name)))
    found = shardesd.scan(folder, cache=False).layers
    assert threads == {"shardesd-fits"}
    # What takes a GPU's place here is torch, which may not be what solves on this CPU.
    assert_frame_equal(found.drop("device", "seconds"), expected.drop("device", "seconds"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardesd-fits")]


def test_what_a_fit_raises_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=6))
    pretend(monkeypatch)
    measure = metrics.measure
    bad: list[int] = []

    def no_memory_for_all(*given: Any, **more: Any) -> list[dict[str, Any]]:
        raise MemoryError

    def fails(*given: Any, **more: Any) -> dict[str, Any]:
        bad.append(1)
        if len(bad) == 3:
            raise MemoryError
        return measure(*given, **more)

    monkeypatch.setattr(metrics, "measure_many", no_memory_for_all)
    monkeypatch.setattr(metrics, "measure", fails)
    layers = shardesd.scan(folder, cache=False).layers
    failed = layers.filter(layers["status"] == "failed")
    assert len(failed) == 1
    assert failed["reason"][0].startswith(NO_MEMORY)
    assert len(layers) == len(bad)


def test_a_group_whose_scan_has_ended_meanwhile_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch its part of a group may be solved after the scan was closed."""
    folder = one_file(tmp_path / "model", random_weights(layers=2))
    pretend(monkeypatch)
    checkpoint = open_checkpoint(open_source(folder))
    ref = checkpoint.shards[0]
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    solver = Solver(ScanOptions(), Recall(None, ScanOptions()), 10**9, pool)
    with checkpoint.open(ref, folder / ref.name) as shard:
        context = matrices.Context(options=ScanOptions())
        items = [item for tensor in shard.tensors for item in matrices.plan(tensor, context)]
        pairs = [(item, shard) for item in items if isinstance(item, MatrixRef) and min(item.M, item.N) == 24]
        found = solver.solve_many(pairs, "cuda:0")
    assert len(found) == len(pairs) > 2
    assert all(callable(one) and one()[0].eigs.size == 24 for one, _ in found)


def test_what_is_solved_when_a_scan_is_closed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=80))
    pretend(monkeypatch)
    measure_many, compute_many = metrics.measure_many, spectra.compute_many
    solved: list[int] = []

    def slow(eigs_BN: Any, **more: Any) -> list[dict[str, Any]]:
        time.sleep(0.003 * len(eigs_BN))
        return measure_many(eigs_BN, **more)

    def counted(opened: Any, **how: Any) -> Any:
        solved.append(len(opened))
        return compute_many(opened, **how)

    monkeypatch.setattr(metrics, "measure_many", slow)
    monkeypatch.setattr(spectra, "compute_many", counted)
    rows = shardesd.stream(folder, cache_dir=tmp_path / "kept")
    for _ in range(3):
        next(rows)
    rows.close()
    before = sum(solved)
    assert before > 3
    result = shardesd.scan(folder, cache_dir=tmp_path / "kept")
    assert sum(solved) == len(result.layers), "some were solved twice"


def test_a_file_that_changes_while_a_gpu_is_fed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{i}.q{n}.weight": rng.standard_normal((n, n)).astype(np.float32) for n in (24, 30) for i in (1, 2, 3)
    }
    folder = one_file(tmp_path / "model", tensors)
    pretend(monkeypatch)
    compute_many = spectra.compute_many

    def cut(opened: Any, **how: Any) -> Any:
        path = folder / "model.safetensors"
        os.truncate(path, path.stat().st_size - 100)
        return compute_many(opened, **how)

    monkeypatch.setattr(spectra, "compute_many", cut)
    with pytest.raises(ShardChanged, match="changed from"):
        shardesd.scan(folder, cache=False)


def test_what_one_tensor_raises_when_it_is_digested_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=6))
    pretend(monkeypatch)
    read = StoredShard.read

    def odd(self: StoredShard, tensor: TensorRef, into: Any = None) -> Any:
        if "layers.3" in tensor.name and "q_proj" in tensor.name:
            raise ValueError("odd")
        return read(self, tensor, into)

    monkeypatch.setattr(StoredShard, "read", odd)
    result = shardesd.scan(folder, cache_dir=tmp_path / "kept")
    assert result.failed["reason"].to_list() == ["ValueError: odd"]
    assert len(result.layers) > 12


@pytest.mark.parametrize("large", [False, True])
def test_what_a_gpu_refuses_for_one_matrix_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Or those of its pack; large ones come in blocks, of which the first few are refused."""
    pretend(monkeypatch, 1 << 12)
    rng = np.random.default_rng(0)
    shape = (900, 24) if large else (16, 16)
    tensors = {f"layers.{i}.q.weight": rng.standard_normal(shape).astype(np.float32) for i in range(20)}
    folder = one_file(tmp_path / "model", tensors)
    expected = shardesd.scan(folder, device="cpu", cache=False, max_aspect=0).layers
    refused: list[int] = []
    name = "_add_lower" if large else "_multiply"
    work = getattr(gram, name)

    def refuses(*given: Any) -> None:
        refused.append(1)
        if len(refused) in (2, 3):
            raise RuntimeError("CUDA error: invalid configuration argument")
        work(*given)

    monkeypatch.setattr(gram, name, refuses)
    result = shardesd.scan(folder, cache=False, max_aspect=0)
    reasons = result.failed["reason"].to_list()
    assert len(refused) > 3
    assert 0 < len(reasons) < 12 < len(result.layers)
    assert all("invalid configuration" in reason for reason in reasons)
    good = result.layers.filter(result.layers["status"] == "ok")
    assert_frame_equal(
        good.drop("device", "seconds"),
        expected.filter(expected["longname"].is_in(good["longname"].to_list())).drop("device", "seconds"),
    )
