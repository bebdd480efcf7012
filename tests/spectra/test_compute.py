"""λ against numpy's float64 SVD, for matrices that are easy, heavy-tailed, rank-deficient and badly scaled."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gpu_on_cpu import staged
from hypothesis import given, settings
from hypothesis import strategies as st

from shardesd import spectra
from shardesd.checkpoint import StoredMatrix
from shardesd.errors import MatrixError
from shardesd.records import Spectrum
from shardesd.spectra import gram, lapack


class Array:
    """A `records.Matrix` over an ordinary array."""

    def __init__(self, W_MN: np.ndarray) -> None:
        self.W_MN = W_MN
        self.shape = W_MN.shape

    def block(self, axis: int, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        part = self.W_MN[start:stop] if axis == 0 else self.W_MN[:, start:stop]
        return np.array(part, dtype=dtype, order="C")

    @property
    def itemsize(self) -> int:
        return self.W_MN.itemsize

    def rows(self, start: int, stop: int, buffer: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.W_MN[start:stop]))


def reference(W_MN: np.ndarray) -> np.ndarray:
    return np.linalg.svd(W_MN.astype(np.float64), compute_uv=False)[::-1] ** 2


def check(W_MN: np.ndarray, **options: object) -> Spectrum:
    spectrum = spectra.compute([Array(W_MN)], **options)
    expected = reference(W_MN)
    assert spectrum.eigs.shape == (min(W_MN.shape),)
    assert spectrum.eigs.dtype == np.float64
    assert np.all(np.diff(spectrum.eigs) >= 0)
    assert spectrum.eigs[0] >= 0
    assert np.abs(spectrum.eigs - expected).max() <= 1e-12 * expected[-1]
    return spectrum


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    M, N = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["gaussian", "heavy", "low_rank", "graded_rows", "graded_columns", "repeated"]))
    W_MN = rng.standard_normal((M, N))
    if kind == "heavy":
        W_MN = rng.standard_t(1.5, (M, N))
    elif kind == "low_rank":
        rank = draw(st.integers(1, min(M, N)))
        W_MN = rng.standard_normal((M, rank)) @ rng.standard_normal((rank, N))
    elif kind == "graded_rows":
        W_MN *= np.logspace(0, -draw(st.integers(1, 14)), M)[:, None]
    elif kind == "graded_columns":
        W_MN *= np.logspace(0, draw(st.integers(1, 14)), N)
    elif kind == "repeated":
        W_MN[:] = W_MN[0]
    dtype = draw(st.sampled_from([np.float64, np.float32, np.float16]))
    scale = 10.0 ** draw(st.integers(*{np.float64: (-140, 136), np.float32: (-18, 18), np.float16: (-1, 1)}[dtype]))
    with np.errstate(over="ignore"):
        W_MN = (W_MN * scale).astype(dtype)
    W_MN[~np.isfinite(W_MN)] = 1
    W_MN[0, 0] = W_MN[0, 0] or 1
    return W_MN


@settings(max_examples=300, deadline=None)
@given(matrices(), st.sampled_from(["auto", "gram", "svd"]))
def test_every_eigenvalue_is_within_1e12_of_the_largest(W_MN: np.ndarray, solver: str) -> None:
    check(W_MN, solver=solver, resolve=1e-5)


@pytest.mark.parametrize("shape", [(700, 300), (300, 700), (500, 500)])
def test_blocks_do_not_change_the_result(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    W_MN = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    whole = check(W_MN).eigs
    monkeypatch.setattr(gram, "BLOCK_BYTES", 100_000)
    parts = check(W_MN).eigs
    assert np.abs(whole - parts).max() <= 1e-13 * whole[-1]


def test_the_svd_takes_over_where_the_grams_rounding_would_hide_small_eigenvalues() -> None:
    rng = np.random.default_rng(2)
    U, V = (np.linalg.qr(rng.standard_normal((64, 64)))[0] for _ in range(2))
    W_MN = U * np.logspace(6, -2, 64) @ V  # λ from 1e-4 to 1e12: the Gram is right to about 1e-2
    spectrum = spectra.compute([Array(W_MN)], resolve=1e-5)
    assert spectrum.solver == "svd"
    assert np.count_nonzero(spectrum.eigs > 1e-5) == 64
    assert spectra.compute([Array(W_MN)], resolve=0.0).solver == "gram"


def test_a_zero_of_a_large_rank_deficient_matrix_is_not_counted() -> None:
    rng = np.random.default_rng(3)
    W_MN = 1e7 * rng.standard_normal((200, 20)) @ rng.standard_normal((20, 200))
    spectrum = check(W_MN, resolve=1e-5)
    assert np.count_nonzero(spectrum.eigs > 1e-5) == np.count_nonzero(reference(W_MN) > 1e-5)


def test_slices_are_pooled_and_scaled() -> None:
    rng = np.random.default_rng(4)
    parts = [rng.standard_normal((6, 4)) for _ in range(9)]
    spectrum = spectra.compute([Array(part) for part in parts], scale=0.5)
    expected = np.sort(np.concatenate([reference(part) for part in parts])) * 0.5
    np.testing.assert_allclose(spectrum.eigs, expected, rtol=1e-10)


@pytest.mark.parametrize("shape", [(500, 40), (40, 500), (51, 40), (45, 40), (40, 40), (3, 1), (1, 3)])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_an_svd_of_a_long_matrix_takes_it_block_by_block(
    shape: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its Gram does, in whose stead it may come without having been asked for so much memory."""
    monkeypatch.setattr(gram, "BLOCK_BYTES", 5000)
    W_MN = np.random.default_rng(0).standard_normal(shape) * np.logspace(0, -9, shape[1])
    asked: list[int] = []

    class Spied(Array):
        def block(self, axis: int, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
            part = super().block(axis, start, stop, dtype)
            asked.append(part.nbytes)
            return part

    eigs = spectra.compute([Spied(W_MN)], solver="svd", precision=precision).eigs
    expected = reference(W_MN)
    assert np.abs(eigs - expected).max() <= (1e-13 if precision == "float64" else 1e-5) * expected[-1]
    long = 4 * max(shape) > 5 * min(shape)
    assert max(asked) <= (5000 if long else W_MN.nbytes)


@pytest.mark.parametrize("scale", [1e-155, 1e-150, 1e150, 1e153])
@pytest.mark.parametrize("solver", ["gram", "svd"])
def test_float64_weights_at_the_edges_of_their_range(scale: float, solver: str) -> None:
    W_MN = np.random.default_rng(5).standard_normal((30, 20))
    eigs = spectra.compute([Array(W_MN * scale)], solver=solver).eigs
    np.testing.assert_allclose(eigs / scale / scale, reference(W_MN), rtol=1e-11)


def test_eigenvalues_beyond_float64_are_refused() -> None:
    with pytest.raises(MatrixError, match="beyond float64"):
        spectra.compute([Array(np.full((3, 3), 1e200))])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("solver", ["auto", "svd"])
def test_nan_and_inf_are_refused(bad: float, solver: str) -> None:
    W_MN = np.ones((5, 4), np.float32)
    W_MN[3, 2] = bad
    with pytest.raises(MatrixError, match="NaN or Inf"):
        spectra.compute([Array(W_MN)], solver=solver)


@pytest.mark.parametrize("solver", ["auto", "svd"])
def test_an_all_zero_matrix_is_refused(solver: str) -> None:
    with pytest.raises(MatrixError, match="all zeros"):
        spectra.compute([Array(np.zeros((5, 4), np.float32))], solver=solver)


@pytest.mark.parametrize("by", ["torch", "scipy"])
def test_no_convergence_falls_back_to_the_svd(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    def diverge(gram: torch.Tensor) -> torch.Tensor:
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigvalsh", diverge)
    monkeypatch.setattr(lapack, "eigvalsh", lambda gram: None)
    monkeypatch.setattr(lapack, "_on_amd", lambda: by == "scipy")
    W_MN = np.random.default_rng(6).standard_normal((12, 7))
    assert check(W_MN, solver="auto").solver == "svd"
    with pytest.raises(MatrixError, match="did not converge"):
        spectra.compute([Array(W_MN)], solver="gram")


def test_float32_is_used_when_it_is_asked_for() -> None:
    W_MN = np.random.default_rng(7).standard_normal((80, 50)).astype(np.float32)
    spectrum = spectra.compute([Array(W_MN)], precision="float32")
    assert spectrum.precision == "float32"
    error = np.abs(spectrum.eigs - reference(W_MN)).max() / spectrum.eigs[-1]
    assert 1e-12 < error < 1e-5
    large = spectra.compute([Array(W_MN * np.float32(1e25))], precision="float32").eigs
    np.testing.assert_allclose(large[-1] / 1e50, spectrum.eigs[-1], rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 64), (700, 300), (300, 700), (1, 5)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_gpu_gives_the_same_eigenvalues(shape: tuple[int, int], dtype: type) -> None:
    W_MN = np.random.default_rng(8).standard_t(2, shape).astype(dtype)
    assert check(W_MN, device="cuda:0").device == "cuda:0"
    check(W_MN, device="cuda:0", solver="svd")


@pytest.mark.parametrize("solver", ["auto", "svd"])
def test_weights_too_small_for_their_squares_are_not_called_zeros(solver: str) -> None:
    tiny = Array(np.full((4, 4), 1e-300))
    with pytest.raises(MatrixError, match="underflows float64"):
        spectra.compute([tiny], solver=solver)
    with pytest.raises(MatrixError, match="all zeros"):
        spectra.compute([Array(np.zeros((4, 4)))], solver=solver)
    assert spectra.compute([tiny, Array(np.eye(4))], solver=solver).eigs[-1] == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("size", [1e-70, 1e60])
def test_elements_beyond_float32_are_scaled_before_they_are_rounded(
    size: float, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = size * np.random.default_rng(0).standard_normal((70, 9))
    matrix = StoredMatrix(W, "F64")
    if together:
        staged(monkeypatch)
        opened = [lambda: nullcontext([matrix])] * 2
        (found, _) = spectra.compute_many(opened, n=9, precision="float32", device="cpu")
    else:
        found = spectra.compute([matrix], precision="float32", device="cpu")
    assert isinstance(found, Spectrum)
    expected = reference(W)
    assert np.abs(found.eigs - expected).max() <= 1e-5 * expected[-1]
