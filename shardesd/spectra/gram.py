"""The Gram matrix of the shorter side, accumulated over blocks so that a matrix is never converted whole.

For W of M × N with n = min(M, N): G = WᵀW where N ≤ M, else WWᵀ; its n eigenvalues are the squared singular values
of W. In float64, from weights stored in 32 bits or fewer, each is right to about n·ε·λmax.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardesd.records import Matrix
from shardesd.spectra.blas import syrk
from shardesd.spectra.tally import Tallied, Tallies

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16_000_000
"""Size of one converted block: long enough for BLAS to run at full speed, short beside the Gram of a large layer."""

UPLOAD_BYTES = 1 << 25
"""Of stored elements, sent to a GPU at once. Each time costs some forty turns of the interpreter's lock, but pinned
memory costs half a second a gigabyte once in a process (docs/performance.md)."""

_PACKED_BYTES = 8_000_000
"""The largest matrix that travels together with others: of larger ones only the lower triangle is multiplied."""

_COLUMNS = 1024
"""Of a Gram that are multiplied at once on a GPU: fewer of the upper triangle's products, in products still large."""

_Member = tuple[int, int, "torch.dtype", "tuple[int, int]"]
"""Of a pack: its number, where it begins, how its elements are stored, (M, N)."""

_local = threading.local()


def gram_cpu(matrix: Matrix, dtype: np.dtype[Any], exponent: int = 0) -> np.ndarray:
    """The lower triangle of G, (n, n) in F order, of the matrix times 2**-exponent. What lies above it is undefined."""
    n = min(matrix.shape)
    gram = np.empty((n, n), dtype, order="F")
    beta = 0.0
    for axis, block in _blocks(matrix, dtype):
        if exponent:
            np.ldexp(block, -exponent, out=block)
        syrk(block.T if axis == 0 else block, gram, beta)
        beta = 1.0
    return gram


def gram_cuda(matrix: Matrix, gram: torch.Tensor, exponent: int = 0, tallies: Tallies | None = None) -> None:
    """G of the matrix times 2**-exponent, into `gram` (n, n) on its device, in its precision: its lower triangle.

    What its elements are like goes into `tallies`.

    The bytes travel as they are stored, through pinned memory, while the block before them is worked on; they are
    widened on the device. A float32 Gram is summed up in float64, so that only the products of one block are rounded.
    """
    import torch

    M, N = matrix.shape
    total = gram if gram.dtype == torch.float64 else torch.empty(gram.shape, dtype=torch.float64, device=gram.device)
    total.zero_()
    if N <= M:
        blocks = _staging().upload(matrix, gram.device)
    else:
        W_MN = torch.cat(list(_staging().upload(matrix, gram.device)))
        blocks = (W_MN[:, start:stop].mT for start, stop in _spans(N, M * gram.element_size(), 8 * BLOCK_BYTES))
    for block in blocks:
        wide = block.to(gram.dtype)
        if tallies is not None:
            tallies.add([matrix], wide if total is gram else block)
        if exponent:  # in two factors: one alone may be beyond float64
            half = exponent // 2
            wide = wide * math.ldexp(1.0, -half) * math.ldexp(1.0, half - exponent)
        if total is gram:
            _add_lower(gram, wide)
        else:
            total.add_(wide.mT @ wide)
    if total is not gram:
        gram.copy_(total)


def grams_cuda(
    opened: Sequence[Callable[[], AbstractContextManager[Sequence[Matrix]]]],
    grams: torch.Tensor,
    on_error: Callable[[int, Exception], None],
    tallies: Tallies,
) -> None:
    """As `gram_cuda` of each matrix of `opened`, into `grams` (B, n, n). What reading one raises goes to `on_error`.

    Small ones travel and are multiplied together: launching work for each by itself takes longer than the work.
    """
    staging = _staging()
    pack = staging.pack(on_error)
    for at, open_ in enumerate(opened):
        try:
            with open_() as (matrix,):
                if not pack.takes(matrix):
                    pack.multiply(grams, tallies)
                    pack = staging.pack(on_error)
                if pack.takes(matrix):
                    pack.add(at, matrix)
                else:
                    gram_cuda(matrix, grams[at], tallies=tallies)
        except Exception as error:
            on_error(at, error)
    pack.multiply(grams, tallies)


def count_cuda(matrix: Tallied, device: str) -> None:
    """Has a GPU count a matrix's elements, of which no Gram is made."""
    import torch

    tallies = Tallies()
    for block in _staging().upload(matrix, torch.device(device)):
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


class _Staging:
    """Two pinned buffers of one thread: one is read into while the other's bytes travel to the device."""

    def __init__(self) -> None:
        import torch

        self._buffers = [torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def buffer(self) -> torch.Tensor:
        """The one that is free first, once it is."""
        sent = self._sent[self._next]
        if sent is not None:
            sent.synchronize()
        return self._buffers[self._next]

    def send(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device of what lies in `buffer()`, which may be asked for again."""
        import torch

        on_device = stored.to(device, non_blocking=True)
        self._sent[self._next] = torch.cuda.current_stream(device).record_event()
        self._next = 1 - self._next
        return on_device

    def upload(self, matrix: Matrix, device: torch.device) -> Iterator[torch.Tensor]:
        """Blocks of rows on the device, as they are stored."""
        M, N = matrix.shape
        for start, stop in _spans(M, N * matrix.itemsize, UPLOAD_BYTES):
            yield self.send(matrix.rows(start, stop, self.buffer().numpy()), device)

    def pack(self, on_error: Callable[[int, Exception], None]) -> _Pack:
        return _Pack(self, on_error)


class _Pack:
    """Whole matrices, one behind the other in one pinned buffer; those that lie so in their file are read at once."""

    def __init__(self, staging: _Staging, on_error: Callable[[int, Exception], None]) -> None:
        self._staging = staging
        self._on_error = on_error
        self._buffer: torch.Tensor | None = None
        self._members: list[_Member] = []
        self._matrices: dict[int, Matrix] = {}
        self._end = 0
        self._awaited: list[tuple[int, int, tuple[int, int]]] = []
        """Number, where it begins, (M, N) of those that are not yet read."""
        self._stretch: Matrix | None = None
        """All of them."""

    def takes(self, matrix: Matrix) -> bool:
        nbytes = _nbytes(matrix)
        return nbytes <= _PACKED_BYTES and self._end + nbytes <= UPLOAD_BYTES

    def add(self, at: int, matrix: Matrix) -> None:
        if self._buffer is None:
            self._buffer = self._staging.buffer()
        joined = self._stretch.followed_by(matrix) if self._stretch and self._ends(self._stretch) else None
        if joined is None:
            self._read()
        self._stretch = joined or matrix
        self._awaited.append((at, self._end, matrix.shape))
        self._matrices[at] = matrix
        self._end += -(-_nbytes(matrix) // 16) * 16
        if not matrix.is_stretch:
            self._read()

    def _ends(self, stretch: Matrix) -> bool:
        """Whether the next matrix goes to right behind it."""
        return self._awaited[0][1] + _nbytes(stretch) == self._end

    def _read(self) -> None:
        """Reads those that are not yet."""
        stretch, awaited = self._stretch, self._awaited
        self._stretch, self._awaited = None, []
        if stretch is None or self._buffer is None:
            return
        start = awaited[0][1]
        place = self._buffer[start : start + _nbytes(stretch)]
        try:
            rows = stretch.rows(0, stretch.shape[0], place.numpy())
        except Exception as error:
            for at, _, _ in awaited:
                self._on_error(at, error)
            return
        if rows.data_ptr() != place.data_ptr():
            place.view(rows.dtype).view(stretch.shape).copy_(rows)
        self._members += [(at, begin, rows.dtype, shape) for at, begin, shape in awaited]

    def multiply(self, grams: torch.Tensor, tallies: Tallies) -> None:
        """Puts the Gram of each into its place of `grams`; the equal ones that stand together, together."""
        import torch

        self._read()
        if self._buffer is None or not self._members:  # none could be read
            return
        stored = self._staging.send(self._buffer[: self._end], grams.device)
        for run in _alike(self._members):
            (first, start, dtype, (M, N)), count = run[0], len(run)
            nbytes = M * N * dtype.itemsize
            step = -(-nbytes // 16) * 16
            flat = stored[start : start + (count - 1) * step + nbytes]
            given = torch.as_strided(flat.view(dtype), (count, M, N), (step // dtype.itemsize, N, 1))
            wide = given.to(grams.dtype)
            exact = wide if grams.dtype == torch.float64 else given
            tallies.add([self._matrices[at] for at in range(first, first + count)], exact)
            short = wide if M < N else wide.mT
            torch.bmm(short, short.mT, out=grams[first : first + count])


def _nbytes(matrix: Matrix) -> int:
    M, N = matrix.shape
    return M * N * matrix.itemsize


def _alike(members: list[_Member]) -> Iterator[list[_Member]]:
    """Runs of consecutive numbers of one dtype and shape."""
    run: list[_Member] = []
    for member in members:
        if run and (member[0] != run[-1][0] + 1 or member[2:] != run[-1][2:]):
            yield run
            run = []
        run.append(member)
    yield run


def _staging() -> _Staging:
    """This thread's."""
    if not hasattr(_local, "staging"):
        _local.staging = _Staging()
    staging: _Staging = _local.staging
    return staging


def _add_lower(total_NN: torch.Tensor, block_KN: torch.Tensor) -> None:
    """total += blockᵀ·block, the lower triangle, and what of the upper one a few products of columns cover."""
    n = total_NN.shape[0]
    step = max(_COLUMNS, -(-n // 8))
    for start in range(0, n, step):
        total_NN[start:, start : start + step].addmm_(block_KN[:, start:].mT, block_KN[:, start : start + step])


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
