"""What a GPU counts of the elements of which it makes a Gram, by its own code on the CPU, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gpu_on_cpu import staged
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardesd import metrics, spectra
from shardesd.checkpoint import StoredMatrix
from shardesd.records import Matrix
from shardesd.spectra import Part, Tallied, tally

RNG = np.random.default_rng(0)
NEARLY_ZERO = 1e-8
WORDS = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16"}


def bf16(W: np.ndarray) -> np.ndarray:
    return (W.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values(raw: np.ndarray) -> np.ndarray:
    wide = (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw
    return wide.astype(np.float64)


def check(parts: Sequence[Part], raw: np.ndarray) -> None:
    found, x = metrics.merge(metrics.Moments(*part) for part in parts), values(raw)
    assert found is not None
    assert (found.size, found.zeros) == (x.size, (np.abs(x) <= NEARLY_ZERO).sum())
    with np.errstate(all="ignore"):
        expected = (x.mean(), x.var(), x.min(), x.max())
    assert (found.mean, found.var, found.low, found.high) == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)


def solved(
    raws: Sequence[np.ndarray], told: dict[int, Sequence[Part]], tallied: Any = lambda at: True, **how: Any
) -> list[Any]:
    def opened(at: int) -> Any:
        matrix: Matrix = StoredMatrix(raws[at], WORDS[raws[at].dtype.name])
        if tallied(at):
            matrix = Tallied(matrix, NEARLY_ZERO, lambda parts: told.__setitem__(at, parts))
        return lambda: nullcontext([matrix])

    n = min(raws[0].shape)
    return spectra.compute_many([opened(at) for at in range(len(raws))], n=n, device="cpu", **how)


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("upload_bytes", [1 << 12, 1 << 16, 1 << 22])
def test_equals_numpy(monkeypatch: pytest.MonkeyPatch, upload_bytes: int, precision: str) -> None:
    """Tall and wide, packed and in uploads of their own, of all types in one batch."""
    staged(monkeypatch, upload_bytes)
    shapes = [(50, 20), (20, 50), (20, 20), (300, 20), (20, 300), (50, 20), (50, 20), (2000, 20), (20, 2000)]
    raws: list[np.ndarray] = []
    for shape in shapes:
        W = RNG.standard_normal(shape) * 0.02 + 3
        W[RNG.random(shape) < 0.1] = 1e-9
        raws += [W.astype(np.float32), W.astype(np.float16), bf16(W), W]
    told: dict[int, Sequence[Part]] = {}
    results = solved(raws, told, precision=precision)
    assert all(isinstance(result, spectra.solve.Spectrum) for result in results)
    assert sorted(told) == list(range(len(raws)))
    for at, raw in enumerate(raws):
        check(told[at], raw)
        sigma = np.linalg.svd(values(raw), compute_uv=False)[::-1]
        tolerance = 1e-12 if precision == "float64" else 1e-5
        assert np.abs(results[at].eigs - sigma**2).max() <= tolerance * sigma[-1] ** 2


def test_only_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch)
    raws = [RNG.standard_normal((30, 10)).astype(np.float32) for _ in range(9)]
    told: dict[int, Sequence[Part]] = {}
    solved(raws, told, tallied=lambda at: at % 3 == 1)
    assert sorted(told) == [1, 4, 7]
    for at, parts in told.items():
        check(parts, raws[at])


def test_what_has_no_spectrum_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, Inf, zeros; and a Gram that is made twice, as it overflows or underflows, counts once."""
    staged(monkeypatch, 1 << 12)
    raws = [RNG.standard_normal((400, 8)) for _ in range(7)]
    raws[0][3, 3] = np.nan
    raws[1][5, 1] = np.inf
    raws[2][5, 1], raws[2][6, 1] = np.inf, -np.inf
    raws[3][:] = 0
    raws[4] *= 1e200
    raws[5] *= 1e-170
    told: dict[int, Sequence[Part]] = {}
    results = solved(raws, told)
    assert [isinstance(result, Exception) for result in results] == [True] * 4 + [True, True, False]
    for at in (0, 1, 2, 3, 6):
        check(told[at], raws[at])
    for at in (4, 5):
        found = metrics.merge(metrics.Moments(*part) for part in told[at])
        assert found is not None
        assert (found.low, found.high) == (raws[at].min(), raws[at].max())


def test_one_that_breaks_off_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch, 1 << 12)

    class Broken(StoredMatrix):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            if start:
                raise OSError("the file ends here")
            return super().rows(start, stop)

    told: list[object] = []
    matrix = Tallied(Broken(RNG.standard_normal((400, 8)), "F64"), NEARLY_ZERO, told.append)
    (result,) = spectra.compute_many([lambda: nullcontext([matrix])], n=8, device="cpu")
    assert "the file ends here" in str(result)
    assert told == []


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(-1e100, 1e100)))
def test_any_numbers(x: np.ndarray) -> None:
    as_tensor = torch.from_numpy(x)
    for row, found in zip(x, tally._count(as_tensor, as_tensor, NEARLY_ZERO).tolist(), strict=True):
        mean, var, low, high, zeros = found
        spread = np.abs(row).max()
        assert (low, high, zeros) == (row.min(), row.max(), (np.abs(row) <= NEARLY_ZERO).sum())
        assert mean == pytest.approx(row.mean(), rel=1e-12, abs=1e-12 * spread)
        assert var == pytest.approx(row.var(), rel=1e-9, abs=1e-12 * spread**2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [NEARLY_ZERO, 1e-3, 0.1, 1.0, 3e-8])
def test_a_bound_is_rounded_down_to_a_type(dtype: torch.dtype, bound: float) -> None:
    """All numbers of 16 bits, and those of more around the bound."""
    if dtype.itemsize == 2:
        every = torch.arange(0x7C00 if dtype == torch.float16 else 0x7F80, dtype=torch.int16).view(dtype)
    else:
        every = torch.tensor(bound, dtype=torch.float64) * (1 + torch.linspace(-1e-6, 1e-6, 10_001)).double()
        every = torch.cat([every, torch.tensor([bound], dtype=torch.float64)]).to(dtype)
    assert torch.equal(every <= tally._at_most(bound, dtype), every.double() <= bound)


def test_it_is_the_matrix() -> None:
    W = RNG.standard_normal((6, 4)).astype(np.float32)
    matrix = Tallied(StoredMatrix(W, "F32"), NEARLY_ZERO, lambda parts: None)
    axes: tuple[Literal[0, 1], ...] = (0, 1)
    assert (matrix.shape, matrix.itemsize) == ((6, 4), 4)
    for axis in axes:
        part = W[1:3] if axis == 0 else W[:, 1:3]
        assert np.array_equal(matrix.block(axis, 1, 3, np.dtype(np.float64)), part)
    assert np.array_equal(matrix.begin(2, 5, np.empty(1000, np.uint8))().numpy(), W[2:5])
