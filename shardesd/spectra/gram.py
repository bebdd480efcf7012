"""The Gram matrix of the shorter side, accumulated over blocks so that a matrix is never converted whole.

For W of M × N with n = min(M, N): G = WᵀW where N ≤ M, else WWᵀ; its n eigenvalues are the squared singular values
of W. In float64, from weights stored in 32 bits or fewer, each is right to about n·ε·λmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardesd.records import Matrix
from shardesd.spectra.blas import syrk

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16_000_000
"""Size of one converted block: long enough for BLAS to run at full speed, short beside the Gram of a large layer."""


def gram_cpu(matrix: Matrix, dtype: np.dtype[Any], exponent: int = 0) -> np.ndarray:
    """The lower triangle of G, (n, n), of the matrix times 2**-exponent. What lies above it is undefined."""
    n = min(matrix.shape)
    gram = np.empty((n, n), dtype)
    beta = 0.0
    for axis, block in _blocks(matrix, dtype):
        if exponent:
            np.ldexp(block, -exponent, out=block)
        syrk(block.T if axis == 0 else block, gram, beta)
        beta = 1.0
    return gram


def gram_cuda(matrix: Matrix, dtype: torch.dtype, device: str, exponent: int = 0) -> torch.Tensor:
    """G of (n, n) on `device`. The bytes travel as they are stored and are widened there, block by block."""
    import torch

    W_MN = matrix.tensor().to(device)
    if W_MN.shape[0] < W_MN.shape[1]:
        W_MN = W_MN.mT
    n = W_MN.shape[1]
    gram = torch.zeros((n, n), dtype=dtype, device=device)
    for start, stop in _spans(W_MN.shape[0], n * gram.element_size(), 32 * BLOCK_BYTES):
        block = W_MN[start:stop].to(dtype)
        if exponent:  # in two factors: one alone may be beyond float64
            half = exponent // 2
            block = block * math.ldexp(1.0, -half) * math.ldexp(1.0, half - exponent)
        gram.addmm_(block.mT, block)
    return gram


def largest_exponent(matrix: Matrix) -> int | None:
    """e such that 2**(e−1) ≤ max|W| < 2**e; None for an all-zero matrix. NaN and ±Inf raise ValueError."""
    largest = 0.0
    for _, block in _blocks(matrix, np.dtype(np.float64)):
        largest = max(largest, float(np.abs(block, out=block).max()))
        if not np.isfinite(largest) or np.isnan(block).any():
            raise ValueError("NaN or Inf")
    return int(np.frexp(largest)[1]) if largest else None


def _blocks(matrix: Matrix, dtype: np.dtype[Any]) -> Iterator[tuple[Literal[0, 1], np.ndarray]]:
    M, N = matrix.shape
    axis: Literal[0, 1] = 0 if N <= M else 1
    for start, stop in _spans(max(M, N), min(M, N) * dtype.itemsize, BLOCK_BYTES):
        yield axis, matrix.block(axis, start, stop, dtype)


def _spans(length: int, bytes_each: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Equal spans, since one short block at the end would waste a pass over the Gram."""
    count = max(1, -(-length * bytes_each // block_bytes))
    step = -(-length // count)
    for start in range(0, length, step):
        yield start, min(start + step, length)
