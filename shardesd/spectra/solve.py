"""Which way a matrix's λ are obtained, and the guard against each way's weakness.

``gram``: eigenvalues of the float64 Gram, several times cheaper than an SVD and as exact relative to λmax.
``svd``: singular values squared. ``auto`` takes the Gram, and the SVD where the Gram's eigenvalues don't converge, or
where its rounding (n·ε·λmax) would drown the λ that must be told from zero (`resolve`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardesd.errors import MatrixError, bare
from shardesd.records import Matrix, Routine, Spectrum
from shardesd.spectra import driver
from shardesd.spectra.eigen import device_bytes as eigen_bytes
from shardesd.spectra.eigen import eigvalsh, eigvalsh_cpu, eigvalsh_many
from shardesd.spectra.gram import BLOCK_BYTES, gram_cpu, gram_cuda, grams_cuda, largest_exponent, triangle
from shardesd.spectra.policy import Precision, choose_precision, trouble
from shardesd.spectra.staging import UPLOAD_BYTES
from shardesd.spectra.tally import Tallies
from shardesd.spectra.upload import PACKED_BYTES, Open
from shardesd.spectra.worker import loaded_torch

if TYPE_CHECKING:
    import torch

# λ of the whole Gram beyond these lose digits to overflow or underflow; then the matrix is scaled by a power of two.
_TRACE_RANGE = {"float64": (1e-200, 1e290), "float32": (1e-20, 1e30)}

_FALLBACKS: tuple[Routine, ...] = ("svd", "eigvalsh")  # the last resort first

_UNDERFLOW = "every λ underflows float64: its elements are below 1e-162"
_DIVERGED = "the eigenvalues of the Gram matrix did not converge (try --solver svd)"


def compute(
    slices: Sequence[Matrix],
    *,
    scale: float = 1.0,
    solver: str = "auto",
    precision: str = "auto",
    device: str = "cpu",
    resolve: float = 0.0,
) -> Spectrum:
    """The λ of one matrix, or of the slices of a convolution pooled into one ESD, each times `scale`.

    `resolve` is the least λ that must be told from zero. Of several slices the routine is `svd` where one of them
    needed it, else `eigvalsh` where one did: none is said to be the batched solver's that isn't. Raises `MatrixError`
    for NaN, Inf, an all-zero matrix, or λ beyond float64.
    """
    started = time.perf_counter()
    width = choose_precision(precision, device)
    found = [_one(matrix, solver, width, device, resolve / scale) for matrix in slices]
    with np.errstate(over="ignore"):
        eigs_K = np.sort(np.concatenate([eigs for eigs, _, _ in found])) * scale
    if not eigs_K[-1] > 0 and any(_exponent(matrix) is not None for matrix in slices):
        raise MatrixError(_UNDERFLOW)
    routines = [routine for _, routine, _ in found]
    return _spectrum(
        eigs_K,
        next((routine for routine in _FALLBACKS if routine in routines), routines[0]),
        width,
        device,
        time.perf_counter() - started,
        recomputed=any(again for _, _, again in found),
    )


def compute_many(
    opened: Sequence[Open],
    *,
    n: int,
    solver: str = "auto",
    precision: str = "auto",
    device: str,
    resolve: float = 0.0,
) -> list[Spectrum | Exception]:
    """The λ of several matrices whose shorter side is `n`, solved together on a GPU; an exception where one can't be.

    Each of `opened` gives one matrix, which is read when its Gram is due and let go of after it. Raises what means
    trouble for all of them: no memory, or a lost device.
    """
    import torch

    started = time.perf_counter()
    width = choose_precision(precision, device)
    grams = torch.empty((len(opened), n, n), dtype=getattr(torch, width), device=device)
    errors: dict[int, Exception] = {}
    exponents = [0] * len(opened)

    def failed(at: int, error: Exception) -> None:
        if trouble(error) != "task":
            raise error
        errors[at] = bare(error)
        grams[at] = 0

    tallies = Tallies()
    grams_cuda(opened, grams, failed, tallies)
    # Looked at only now, so that the device never waits for the host between two matrices.
    traces_B = grams.diagonal(dim1=1, dim2=2).sum(-1, dtype=torch.float64)
    driver.until_done(grams.device)
    traces = traces_B.tolist()
    tallies.tell()
    for at, trace in enumerate(traces):
        if at not in errors and not _in_range(trace, width):
            try:
                with opened[at]() as (matrix,):
                    exponents[at] = _refill(matrix, grams[at])
            except Exception as error:
                failed(at, error)
    eigs_BN, routine, again = eigvalsh_many(grams)
    share = (time.perf_counter() - started) / len(opened)
    # In few steps for all of them: each of numpy's lets go of the interpreter's lock, which other threads wait for.
    eigs_BN = _scaled(np.maximum(eigs_BN, 0.0), 2 * np.array(exponents)[:, None])
    diverged_B = np.isnan(eigs_BN).any(axis=1).tolist()
    drowned_B = drowned(eigs_BN, solver, width, resolve).tolist()
    results: list[Spectrum | Exception] = []
    for at, (open_, eigs) in enumerate(zip(opened, eigs_BN, strict=True)):
        try:
            if at in errors:
                raise errors[at]
            if exponents[at] and not eigs[-1] > 0:
                raise MatrixError(_UNDERFLOW)
            if diverged_B[at] and solver == "gram":
                raise MatrixError(_DIVERGED)
            if diverged_B[at] or drowned_B[at]:
                with open_() as slices:
                    results.append(replace(compute(slices, solver="svd", device="cpu"), recomputed=at in again))
            else:
                by = "eigvalsh" if at in again else routine
                results.append(_spectrum(eigs, by, width, device, share, recomputed=at in again))
        except Exception as error:
            if trouble(error) != "task":
                raise
            results.append(bare(error))
    return results


def compute_product(left_Mr: np.ndarray, right_rN: np.ndarray) -> Spectrum:
    """The r λ of left @ right that can be other than 0, from the QR of the factors; the product is never formed.

    With left = Q₁R₁ and rightᵀ = Q₂R₂ the singular values of the product are those of R₁R₂ᵀ, which is r × r. Raises
    `MatrixError` as `compute` does.
    """
    started = time.perf_counter()
    for factor in (left_Mr, right_rN):
        if not np.isfinite(factor).all():
            raise MatrixError("NaN or Inf among the elements of its factors")
    R1, R2 = (np.asarray(np.linalg.qr(factor, mode="r")) for factor in (left_Mr, right_rN.T))
    core = R1 @ R2.T
    eigs = np.linalg.svd(core, compute_uv=False)[::-1] ** 2
    return _spectrum(eigs, "svd", "float64", "cpu", time.perf_counter() - started)


@lru_cache(maxsize=1024)
def work_bytes(M: int, N: int, *, solver: str = "auto", precision: str = "auto") -> int:
    """Host memory that `compute` takes at its peak for one M × N matrix on a CPU, beside the stored elements."""
    width = 4 if precision == "float32" else 8
    n = min(M, N)
    if solver == "svd" and not _is_long(M, N):
        return 3 * M * N * width
    # A block, and its float32 stage or its copy; the Gram, and LAPACK's copy of it. Or, of an SVD that may have to
    # stand in for it, the triangle of W's QR decomposition in float64, and LAPACK's copy.
    return 2 * min(BLOCK_BYTES, M * N * width) + 2 * n * n * (8 if solver == "svd" else width)


def device_bytes(M: int, N: int, itemsize: int, *, solver: str = "auto") -> int:
    """Memory of a GPU that one M × N matrix takes there at its peak, besides `passing_bytes`."""
    if solver == "svd":
        return 3 * M * N * 8
    stored = M * N * itemsize
    gathered = stored if M < N and stored > PACKED_BYTES else 0  # from its blocks, all of which are needed at once
    return eigen_bytes(min(M, N)) + gathered


def passing_bytes(M: int, N: int, *, solver: str = "auto") -> int:
    """Memory of a GPU for the elements of one on their way to the Gram, as stored and in float64."""
    return 0 if solver == "svd" else M * N * (2 * 4 + 3 * 8)


PASSING_BYTES = 2 * UPLOAD_BYTES + 3 * 8 * UPLOAD_BYTES // 2
"""Of it, the most that all matrices that are solved together take: of an upload's elements, which have 16 bits."""


def _one(
    matrix: Matrix, solver: str, precision: Precision, device: str, resolve: float
) -> tuple[np.ndarray, Routine, bool]:
    """λ, what computed them, and whether a batched solver's were denied before."""
    if solver == "svd":
        return _svd(matrix, precision, device), "svd", False
    n = min(matrix.shape)
    if device == "cpu":
        filled = _gram_cpu(matrix, precision)
        if filled is None:
            return np.zeros(n), "eigvalsh", False
        gram_NN, exponent = filled
        (eigs,), routine, again = eigvalsh_cpu(gram_NN)
        del gram_NN, filled
    else:
        import torch

        gram = torch.empty((n, n), dtype=getattr(torch, precision), device=device)
        exponent = _fill(matrix, gram, precision)
        (eigs,), routine, again = eigvalsh(gram)
        del gram
    eigs = _scaled(np.maximum(eigs, 0.0), 2 * exponent)
    if np.isnan(eigs).any() and solver == "gram":
        raise MatrixError(_DIVERGED)
    if np.isnan(eigs).any() or drowned(eigs, solver, precision, resolve):
        return _svd(matrix, "float64", "cpu"), "svd", bool(again)
    return eigs, "eigvalsh" if again else routine, bool(again)


def _gram_cpu(matrix: Matrix, precision: Precision) -> tuple[np.ndarray, int] | None:
    """The Gram of W·2**-exponent, with exponent 0 unless the Gram would over- or underflow; None where W is zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        gram = gram_cpu(matrix, np.dtype(precision))
        if _in_range(float(np.trace(gram, dtype=np.float64)), precision):
            return gram, 0
        exponent = _exponent(matrix)
        return None if exponent is None else (gram_cpu(matrix, np.dtype(precision), exponent), exponent)


def _fill(matrix: Matrix, gram: torch.Tensor, precision: Precision) -> int:
    """Fills `gram`, on a GPU, with the Gram of W·2**-exponent; gives the exponent. An all-zero W gives zeros."""
    import torch

    tallies = Tallies()
    gram_cuda(matrix, gram, tallies=tallies)
    tallies.tell()
    if _in_range(float(gram.diagonal().sum(dtype=torch.float64)), precision):
        return 0
    return _refill(matrix, gram)


def _refill(matrix: Matrix, gram: torch.Tensor) -> int:
    """As `_fill`, for a Gram that over- or underflowed."""
    exponent = _exponent(matrix)
    if exponent is None:
        gram.zero_()
        return 0
    gram_cuda(matrix, gram, exponent)
    return exponent


def _in_range(trace: float, precision: Precision) -> bool:
    low, high = _TRACE_RANGE[precision]
    return low < trace < high


def _exponent(matrix: Matrix) -> int | None:
    try:
        return largest_exponent(matrix)
    except ValueError:
        raise MatrixError(f"NaN or Inf among its {matrix.shape[0]}×{matrix.shape[1]} elements") from None


def drowned(eigs_BN: np.ndarray, solver: str, precision: Precision, resolve: float) -> np.ndarray:
    """Of each row, whether λ that `resolve` tells from zero are hidden by the Gram's rounding, which an SVD doesn't
    have."""
    if solver != "auto" or precision != "float64" or not resolve > 0:
        return np.zeros(eigs_BN.shape[:-1], bool)
    rounding_B = eigs_BN.shape[-1] * np.finfo(np.float64).eps * eigs_BN[..., -1]
    hidden_B: np.ndarray = (rounding_B > resolve) & (eigs_BN[..., 0] < rounding_B)
    return hidden_B


def _svd(matrix: Matrix, precision: Precision, device: str) -> np.ndarray:
    exponent = _exponent(matrix)
    if exponent is None:
        return np.zeros(min(matrix.shape))
    torch = loaded_torch()
    if device == "cpu" and _is_long(*matrix.shape):
        given = triangle(matrix, exponent)
    else:
        given = matrix.block(0, 0, matrix.shape[0], np.dtype(np.float64))
        np.ldexp(given, -exponent, out=given)
    there = torch.from_numpy(given).to(device, getattr(torch, precision))
    del given  # where that was a copy
    try:
        sigma = torch.linalg.svdvals(there)
    except torch.linalg.LinAlgError:
        raise MatrixError("its singular values did not converge") from None
    return _scaled(sigma.to("cpu", torch.float64).flip(0).numpy() ** 2, 2 * exponent)


def _is_long(M: int, N: int) -> bool:
    """Whether an SVD on a CPU takes the triangle of the QR decomposition, which is made from blocks, instead of all of
    the matrix: that would take more memory than its Gram, in whose stead it may come."""
    return 4 * max(M, N) > 5 * min(M, N)


def _scaled(eigs: np.ndarray, exponent: int | np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        scaled: np.ndarray = np.ldexp(eigs, exponent)
    return scaled


def _spectrum(
    eigs: np.ndarray, routine: Routine, precision: Precision, device: str, seconds: float, *, recomputed: bool = False
) -> Spectrum:
    largest = float(eigs[-1])
    if not largest > 0:
        raise MatrixError("all zeros: every λ is 0")
    if not math.isfinite(largest):
        raise MatrixError("the largest λ is beyond float64")
    return Spectrum(
        eigs=eigs,
        solver="svd" if routine == "svd" else "gram",
        precision=precision,
        device=device,
        seconds=seconds,
        routine=routine,
        recomputed=recomputed,
    )
