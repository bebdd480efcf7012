"""The Gram matrix of the shorter side, accumulated over blocks so that a matrix is never converted whole.

For W of M × N with n = min(M, N): G = WᵀW where N ≤ M, else WWᵀ; its n eigenvalues are the squared singular values
of W. In float64, from weights stored in 32 bits or fewer, each is right to about n·ε·λmax.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardesd.records import Matrix
from shardesd.spectra.blas import syrk

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16_000_000
"""Size of one converted block: long enough for BLAS to run at full speed, short beside the Gram of a large layer."""

_local = threading.local()


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


def gram_cuda(matrix: Matrix, gram: torch.Tensor, exponent: int = 0) -> None:
    """G of the matrix times 2**-exponent, into `gram` (n, n) on its device, in its precision.

    The bytes travel as they are stored, through pinned memory, while the block before them is worked on; they are
    widened on the device. A float32 Gram is summed up in float64, so that only the products of one block are rounded.
    """
    import torch

    M, N = matrix.shape
    staging: _Staging = _local.__dict__.setdefault("staging", _Staging())
    total = gram if gram.dtype == torch.float64 else torch.empty(gram.shape, dtype=torch.float64, device=gram.device)
    total.zero_()
    if N <= M:
        blocks = staging.upload(matrix, gram.device)
    else:
        W_MN = torch.cat(list(staging.upload(matrix, gram.device)))
        blocks = (W_MN[:, start:stop].mT for start, stop in _spans(N, M * gram.element_size(), 8 * BLOCK_BYTES))
    for block in blocks:
        wide = block.to(gram.dtype)
        if exponent:  # in two factors: one alone may be beyond float64
            half = exponent // 2
            wide = wide * math.ldexp(1.0, -half) * math.ldexp(1.0, half - exponent)
        if total is gram:
            gram.addmm_(wide.mT, wide)
        else:
            total.add_(wide.mT @ wide)
    if total is not gram:
        gram.copy_(total)


def largest_exponent(matrix: Matrix) -> int | None:
    """e such that 2**(e−1) ≤ max|W| < 2**e; None for an all-zero matrix. NaN and ±Inf raise ValueError."""
    largest = 0.0
    for _, block in _blocks(matrix, np.dtype(np.float64)):
        largest = max(largest, float(np.abs(block, out=block).max()))
        if not np.isfinite(largest) or np.isnan(block).any():
            raise ValueError("NaN or Inf")
    return int(np.frexp(largest)[1]) if largest else None


class _Staging:
    """Two pinned buffers of one thread: one is read into while the other's bytes travel to the device."""

    def __init__(self) -> None:
        import torch

        self._buffers = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def upload(self, matrix: Matrix, device: torch.device) -> Iterator[torch.Tensor]:
        """Blocks of rows on the device, as they are stored."""
        import torch

        M, N = matrix.shape
        for number, (start, stop) in enumerate(_spans(M, N * matrix.itemsize, BLOCK_BYTES)):
            half = number % 2
            sent = self._sent[half]
            if sent is not None:
                sent.synchronize()
            rows = matrix.rows(start, stop, self._buffers[half].numpy())
            on_device = rows.to(device, non_blocking=True)
            with torch.cuda.device(device):
                self._sent[half] = torch.cuda.current_stream().record_event()
            yield on_device


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
