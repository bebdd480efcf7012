"""The Gram matrix of the shorter side, accumulated over blocks so that a matrix is never converted whole.

For W of M × N with n = min(M, N): G = WᵀW where N ≤ M, else WWᵀ; its n eigenvalues are the squared singular values
of W. In float64, from weights stored in 32 bits or fewer, each is right to about n·ε·λmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardesd.records import Matrix
from shardesd.spectra import cublas
from shardesd.spectra.blas import empty_gram, syrk
from shardesd.spectra.fortran import call
from shardesd.spectra.pack import Failed, Member, aligned
from shardesd.spectra.staging import UPLOAD_BYTES
from shardesd.spectra.tally import Tallied, Tallies
from shardesd.spectra.upload import Open, Sent, spans, uploads

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16_000_000
"""Size of one converted block: long enough for BLAS to run at full speed, short beside the Gram of a large layer."""

_REFLECTIONS = 32
"""Householder's, that are applied together while a triangle is made."""

_COLUMNS = 1024
"""Of a Gram that are multiplied at once on a GPU: fewer of the upper triangle's products, in products still large."""


def gram_cpu(matrix: Matrix, dtype: np.dtype[Any], exponent: int = 0) -> np.ndarray:
    """The lower triangle of G, (n, n) as `empty_gram` lays it out, of the matrix times 2**-exponent.

    What lies above it is undefined.
    """
    n = min(matrix.shape)
    gram = empty_gram(n, dtype)
    beta = 0.0
    for axis, block in _blocks(matrix, np.dtype(np.float64) if exponent else dtype):  # float32 may not hold them yet
        if exponent:
            block = np.ldexp(block, -exponent, out=block).astype(dtype, copy=False)
        syrk(block.T if axis == 0 else block, gram, beta)
        beta = 1.0
    return gram


def gram_cuda(matrix: Matrix, gram: torch.Tensor, exponent: int = 0, tallies: Tallies | None = None) -> None:
    """G of the matrix times 2**-exponent, into `gram` (n, n) on its device, in its precision: its lower triangle.

    What its elements are like goes into `tallies`.

    The bytes travel as they are stored, through pinned memory, while the block before them is worked on; they are
    widened on the device. A float32 Gram is summed up in float64, so that only the products of one block are rounded.
    """
    total = _Sum(matrix, gram, exponent, tallies)
    for block in _blocks_on(gram.device, matrix):
        total.add(block)


def grams_cuda(
    opened: Sequence[Open], grams: torch.Tensor, on_error: Callable[[int, Exception], None], tallies: Tallies
) -> None:
    """As `gram_cuda` of each matrix of `opened`, into `grams` (B, n, n).

    What reading one, or working on it, raises goes to `on_error`, once at least. Small ones travel and are multiplied
    together: launching work for each by itself takes longer than the work.
    """
    sums: dict[int, _Sum] = {}  # of the one whose blocks are coming
    left = set(range(len(opened)))  # of which there is neither a Gram nor an error yet
    with closing(uploads(opened, grams.device, pack=True)) as sent:
        for one in sent:
            if isinstance(one, Failed):
                sums.pop(one.at, None)
                left.discard(one.at)
                on_error(one.at, one.error)
                continue
            for run in _alike(one.members) if one.packed else [one.members]:
                first = run[0]
                try:
                    if one.packed:
                        _multiply(one, run, grams, tallies)
                        left.difference_update(member.at for member in run)
                    elif first.at in left:  # else an error has made the rest of its blocks useless
                        if first.at not in sums:
                            sums[first.at] = _Sum(first.matrix, grams[first.at], tallies=tallies)
                        if sums[first.at].add(one.block()):
                            del sums[first.at]
                            left.discard(first.at)
                except Exception as error:
                    sums.pop(first.at, None)
                    left.difference_update(member.at for member in run)
                    for member in run:
                        on_error(member.at, error)
    for at in left:
        on_error(at, RuntimeError("it did not arrive on the GPU"))


def count_cuda(matrix: Tallied, device: str) -> None:
    """Has a GPU count a matrix's elements, of which no Gram is made."""
    import torch

    tallies = Tallies()
    for block in _blocks_on(torch.device(device), matrix):
        tallies.add([matrix], block)
    tallies.tell()


def count_bytes(M: int, N: int, itemsize: int) -> int:
    """Memory of a GPU that `count_cuda` takes at its peak: a block, widened, and its magnitudes."""
    return min(UPLOAD_BYTES // itemsize, M * N) * (itemsize + 2 * 8 + 1)


def largest_exponent(matrix: Matrix) -> int | None:
    """e such that 2**(e−1) ≤ max|W| < 2**e; None for an all-zero matrix. NaN and ±Inf raise ValueError."""
    largest = 0.0
    for _, block in _blocks(matrix, np.dtype(np.float64)):
        largest = max(largest, float(np.abs(block, out=block).max()))
        if not np.isfinite(largest) or np.isnan(block).any():
            raise ValueError("NaN or Inf")
    return int(np.frexp(largest)[1]) if largest else None


def triangle(matrix: Matrix, exponent: int) -> np.ndarray:
    """R, (n, n) in float64, of the QR decomposition of the matrix times 2**-exponent, or of its transpose where it is
    wide: it has the same singular values. Made block by block: LAPACK's dtpqrt adds rows to a triangle."""
    n = min(matrix.shape)
    R_nn = np.zeros((n, n), order="F")
    width = min(n, _REFLECTIONS)
    T, work = np.empty((2, width, n))
    for axis, block in _blocks(matrix, R_nn.dtype):
        np.ldexp(block, -exponent, out=block)
        rows_Kn = np.asfortranarray(block if axis == 0 else block.T)
        K = rows_Kn.shape[0]
        call("lapack", "tpqrt", R_nn.dtype, K, n, 0, width, R_nn, n, rows_Kn, K, T, width, work, 0)
    return R_nn


class _Sum:
    """G of one matrix times 2**-exponent, from blocks of its rows."""

    def __init__(self, matrix: Matrix, gram: torch.Tensor, exponent: int = 0, tallies: Tallies | None = None) -> None:
        import torch

        self._matrix, self._gram, self._exponent, self._tallies = matrix, gram, exponent, tallies
        exact = gram.dtype == torch.float64
        self._total = gram if exact else torch.empty(gram.shape, dtype=torch.float64, device=gram.device)
        self._total.zero_()
        self._rows = 0
        self._whole: torch.Tensor | None = None
        """A matrix of more columns than rows, of which all blocks are needed at once."""

    def add(self, block: torch.Tensor) -> bool:
        """The next rows, as they are stored; True when they were the last."""

        M, N = self._matrix.shape
        first = self._rows
        self._rows += block.shape[0]
        if N <= M:
            self._add(block)
        else:
            W_MN = self._whole = block if block.shape[0] == M else self._gathered(block, first)
            if self._rows == M:
                for start, stop in spans(N, M * self._gram.element_size(), 8 * BLOCK_BYTES):
                    self._add(W_MN[:, start:stop].mT)
                self._whole = None
        if self._rows == M and self._total is not self._gram:
            self._gram.copy_(self._total)
        return self._rows == M

    def _gathered(self, block: torch.Tensor, first: int) -> torch.Tensor:
        import torch

        if self._whole is None:
            self._whole = torch.empty(self._matrix.shape, dtype=block.dtype, device=block.device)
        self._whole[first : first + block.shape[0]] = block
        return self._whole

    def _add(self, block: torch.Tensor) -> None:
        import torch

        exact = self._total is self._gram
        if self._exponent:  # in two factors: one alone may be beyond float64, and float32 would not hold the elements
            half = self._exponent // 2
            scaled = block.double() * math.ldexp(1.0, -half) * math.ldexp(1.0, half - self._exponent)
            wide = scaled.to(self._gram.dtype)
        else:
            wide = block.to(self._gram.dtype)
        if self._tallies is not None:
            self._tallies.add([self._matrix], block, wide if exact and not self._exponent else None)
        if exact:
            _add_lower(self._gram, wide)
        else:
            product = torch.zeros_like(self._gram)
            _add_lower(product, wide)
            self._total.add_(product)


def _blocks_on(device: torch.device, matrix: Matrix) -> Iterator[torch.Tensor]:
    """Blocks of rows on a GPU, as they are stored."""
    with closing(uploads([lambda: nullcontext([matrix])], device, pack=False)) as sent:
        for one in sent:
            if isinstance(one, Failed):
                raise one.error
            yield one.block()


def _multiply(sent: Sent, run: Sequence[Member], grams: torch.Tensor, tallies: Tallies) -> None:
    """Puts the Grams of equal members that stand together into their places of `grams`, together."""
    import torch

    first, count = run[0], len(run)
    M, N = first.matrix.shape
    step = _step(first)
    given = sent.there.view(first.dtype, (count, M, N), (step // first.dtype.itemsize, N, 1), first.begin)
    wide = given.to(grams.dtype)
    exact = grams.dtype == torch.float64
    tallies.add([member.matrix for member in run], given, wide if exact else None)
    if cublas.takes(grams):
        cublas.multiply_each(wide, grams, first.at)
    else:
        short = wide if M < N else wide.mT
        torch.bmm(short, short.mT, out=grams[first.at : first.at + count])


def _alike(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Runs of consecutive numbers of one dtype and shape, at equal distances."""
    run: list[Member] = []
    for member in members:
        if run and not _follows(run[-1], member):
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def _follows(one: Member, other: Member) -> bool:
    """Whether it is of one kind with the one before it, and right behind it."""
    return (
        other.at == one.at + 1
        and other.matrix.shape == one.matrix.shape
        and other.dtype is one.dtype
        and other.begin == one.begin + _step(one)
    )


def _step(member: Member) -> int:
    """Bytes from it to the next one."""
    M, N = member.matrix.shape
    return aligned(M * N * member.dtype.itemsize)


def _add_lower(total_NN: torch.Tensor, block_KN: torch.Tensor) -> None:
    """total += blockᵀ·block, the lower triangle; what lies above it is undefined."""
    if cublas.takes(total_NN):
        cublas.add_lower(total_NN, block_KN)
        return
    n = total_NN.shape[0]
    step = max(_COLUMNS, -(-n // 8))
    for start in range(0, n, step):
        total_NN[start:, start : start + step].addmm_(block_KN[:, start:].mT, block_KN[:, start : start + step])


def _blocks(matrix: Matrix, dtype: np.dtype[Any]) -> Iterator[tuple[Literal[0, 1], np.ndarray]]:
    M, N = matrix.shape
    axis: Literal[0, 1] = 0 if N <= M else 1
    for start, stop in spans(max(M, N), min(M, N) * dtype.itemsize, BLOCK_BYTES):
        yield axis, matrix.block(axis, start, stop, dtype)
