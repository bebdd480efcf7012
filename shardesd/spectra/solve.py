"""Which way a matrix's λ are obtained, and the guard against each way's weakness.

``gram``: eigenvalues of the float64 Gram, several times cheaper than an SVD and as exact relative to λmax.
``svd``: singular values squared. ``auto`` takes the Gram, and the SVD where the Gram's eigenvalues don't converge, or
where its rounding (n·ε·λmax) would drown the λ that must be told from zero (`resolve`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardesd.errors import MatrixError
from shardesd.records import Matrix, Spectrum
from shardesd.spectra.gram import BLOCK_BYTES, gram_cpu, gram_cuda, largest_exponent

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "float64"]

# λ of the whole Gram beyond these lose digits to overflow or underflow; then the matrix is scaled by a power of two.
_TRACE_RANGE = {"float64": (1e-200, 1e290), "float32": (1e-20, 1e30)}


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

    `resolve` is the least λ that must be told from zero. Raises `MatrixError` for NaN, Inf, an all-zero matrix, or λ
    beyond float64.
    """
    started = time.perf_counter()
    width: Precision = "float32" if precision == "float32" else "float64"
    used: Literal["gram", "svd"] = "gram"
    parts = []
    for matrix in slices:
        eigs, how = _one(matrix, solver, width, device, resolve / scale)
        parts.append(eigs)
        if how == "svd":
            used = "svd"
    eigs_K = np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]
    with np.errstate(over="ignore"):
        eigs_K = eigs_K * scale
    if not eigs_K[-1] > 0:
        raise MatrixError("all zeros: every λ is 0")
    if not np.isfinite(eigs_K[-1]):
        raise MatrixError("the largest λ is beyond float64")
    return Spectrum(eigs=eigs_K, solver=used, precision=width, device=device, seconds=time.perf_counter() - started)


def work_bytes(M: int, N: int, *, solver: str = "auto", precision: str = "auto") -> int:
    """Host memory that `compute` takes at its peak for one M × N matrix, beside the stored elements."""
    width = 4 if precision == "float32" else 8
    n = min(M, N)
    if solver == "svd":
        return 3 * M * N * width
    # A block and its float32 stage or its transpose; the Gram, and LAPACK's copy of it.
    return 2 * min(BLOCK_BYTES, M * N * width) + 2 * n * n * width


def prepare_worker(threads: int) -> None:
    """Called once in each thread that will call `compute`: how many threads one solve may use there."""
    import torch

    torch.set_num_threads(threads)


@contextmanager
def blas_threads(threads: int) -> Iterator[None]:
    """While it is entered, BLAS uses `threads` threads a call (a process-wide setting)."""
    from scipy.linalg import cython_blas  # noqa: F401 (only what is loaded already can be limited)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads, user_api="blas"):
        yield


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or this machine, had no memory for a solve."""
    import torch

    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))


def _one(
    matrix: Matrix, solver: str, precision: Precision, device: str, resolve: float
) -> tuple[np.ndarray, Literal["gram", "svd"]]:
    import torch

    if solver == "svd":
        return _svd(matrix, precision, device), "svd"
    gram, exponent = _finite_gram(matrix, precision, device)
    if gram is None:
        return np.zeros(min(matrix.shape)), "gram"
    try:
        eigs = torch.linalg.eigvalsh(gram).to("cpu", torch.float64).numpy()
    except _no_convergence():
        if solver == "gram":
            raise MatrixError("the eigenvalues of the Gram matrix did not converge (try --solver svd)") from None
        return _svd(matrix, "float64", "cpu"), "svd"
    del gram
    eigs = _scaled(np.maximum(eigs, 0.0), 2 * exponent)
    rounding = len(eigs) * np.finfo(precision).eps * eigs[-1]
    if solver == "auto" and precision == "float64" and rounding > resolve > 0 and eigs[0] < rounding:
        return _svd(matrix, precision, device), "svd"
    return eigs, "gram"


def _finite_gram(matrix: Matrix, precision: Precision, device: str) -> tuple[torch.Tensor | None, int]:
    """The Gram of W·2**-exponent, with exponent 0 unless the Gram would over- or underflow; None where W is zero."""
    import torch

    def build(exponent: int) -> torch.Tensor:
        if device == "cpu":
            with np.errstate(over="ignore", invalid="ignore"):
                return torch.from_numpy(gram_cpu(matrix, np.dtype(precision), exponent))
        return gram_cuda(matrix, getattr(torch, precision), device, exponent)

    gram = build(0)
    trace = float(gram.diagonal().sum(dtype=torch.float64))
    low, high = _TRACE_RANGE[precision]
    if low < trace < high:
        return gram, 0
    try:
        exponent = largest_exponent(matrix)
    except ValueError:
        raise MatrixError(f"NaN or Inf among its {matrix.shape[0]}×{matrix.shape[1]} elements") from None
    return (None, 0) if exponent is None else (build(exponent), exponent)


def _svd(matrix: Matrix, precision: Precision, device: str) -> np.ndarray:
    import torch

    try:
        exponent = largest_exponent(matrix)
    except ValueError:
        raise MatrixError(f"NaN or Inf among its {matrix.shape[0]}×{matrix.shape[1]} elements") from None
    if exponent is None:
        return np.zeros(min(matrix.shape))
    W_MN = matrix.block(0, 0, matrix.shape[0], np.dtype(np.float64))
    np.ldexp(W_MN, -exponent, out=W_MN)
    try:
        sigma = (
            torch.linalg.svdvals(torch.from_numpy(W_MN).to(device, getattr(torch, precision)))
            .to("cpu", torch.float64)
            .flip(0)
            .numpy()
        )
    except _no_convergence():
        raise MatrixError("its singular values did not converge") from None
    return _scaled(sigma * sigma, 2 * exponent)


def _no_convergence() -> type[Exception]:
    import torch

    error: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
    return error


def _scaled(eigs: np.ndarray, exponent: int) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        scaled: np.ndarray = np.ldexp(eigs, exponent)
    return scaled
