"""The spectra file, against the safetensors library."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from shardesd.errors import ResultsError
from shardesd.records import Row
from shardesd.results import ModelStore
from shardesd.results.stored import StoredSpectra, write_spectra

Eigs = Callable[..., np.ndarray]


def test_the_library_reads_what_was_written(tmp_path: Path, eigs: Eigs) -> None:
    arrays = {"z.10": eigs("a", 7), "a.λ": eigs("b", 1), "none": np.empty(0), 'quote"d': eigs("c", 1000)}
    path = tmp_path / "s.safetensors"
    write_spectra(
        path, {n: a.size for n, a in arrays.items()}, arrays.__getitem__, {"model_id": "org/é", "commit": "0"}
    )
    found = load_file(path)
    assert {name: a.tobytes() for name, a in found.items()} == {name: a.tobytes() for name, a in arrays.items()}
    assert {a.dtype for a in found.values()} == {np.dtype("float64")}
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"model_id": "org/é", "commit": "0"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0

    spectra = StoredSpectra(path)
    assert list(spectra) == list(arrays)  # in the order that was given
    assert len(spectra) == 4
    assert all(np.array_equal(spectra[name], array) for name, array in arrays.items())
    assert "gone" not in spectra
    with pytest.raises(KeyError):
        spectra["gone"]


def test_no_spectra_at_all(tmp_path: Path) -> None:
    write_spectra(tmp_path / "s.safetensors", {}, dict[str, np.ndarray]().__getitem__, {"model_id": "m"})
    assert dict(StoredSpectra(tmp_path / "s.safetensors")) == {}


def test_the_name_that_the_format_reserves(tmp_path: Path, eigs: Eigs) -> None:
    write_spectra(tmp_path / "s.safetensors", {"__metadata__": 6, "x": 6}, eigs, {"model_id": "m"})
    assert list(load_file(tmp_path / "s.safetensors")) == ["x"]


def test_a_length_that_was_not_announced(tmp_path: Path, eigs: Eigs) -> None:
    with pytest.raises(ResultsError, match=r"x has λ of shape \(6,\) where 5 were announced"):
        write_spectra(tmp_path / "s.safetensors", {"x": 5}, eigs, {})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"\x10" + b"\0" * 30)
    with pytest.raises(ResultsError, match=r"can't read the spectra .*scan the model again"):
        list(StoredSpectra(path))


def test_memory_holds_one_spectrum_at_a_time(tmp_path: Path, row: Callable[..., Row]) -> None:
    """2,000 rows of 2,000 λ are 32 MB; the peak must be far under that, and twice the λ must not double it."""

    def peak(K: int) -> int:
        store = ModelStore(tmp_path / str(K), "org/name", None)
        one = row("x")
        tracemalloc.start()
        store.begin({"options": {}}, overwrite=False)
        for i in range(500):
            store.append(Row(model_id=one.model_id, longname=f"layers.{i}"), np.full(K, float(i)))
        store.finish(lambda name: int(name[7:]), {})
        spectra = store.result().spectra
        assert [spectra[f"layers.{i}"][-1] for i in (0, 499)] == [0.0, 499.0]
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert store.spectra_path.stat().st_size > 8 * 500 * K
        return used

    small, large = peak(4000), peak(8000)  # 16 MB and 32 MB of λ
    assert large < 5e6
    assert large - small < 5e5
