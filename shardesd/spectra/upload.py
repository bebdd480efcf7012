"""Matrices on their way to a GPU: read into pinned memory by one thread, sent and worked on by another.

To launch the kernels of a Gram takes about as long as to read what comes next: two cards can't wait for one after the
other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from shardesd.records import Matrix
from shardesd.spectra.staging import LOOK, PATIENCE, UPLOAD_BYTES, Buffer, Bytes, Staging, staging_of

if TYPE_CHECKING:
    import numpy as np
    import torch

PACKED_BYTES = 8_000_000
"""The largest matrix that travels together with others."""

_AHEAD = 2
"""Buffers that a thread has read into and not sent: one is read into while another's bytes travel."""

Open = Callable[[], AbstractContextManager[Sequence[Matrix]]]
"""Gives one matrix, which is read within the context."""


class Member(NamedTuple):
    """A matrix, or some of its rows, among the bytes that are sent at once."""

    at: int
    """Its number among those that were to be sent."""
    matrix: Matrix
    begin: int
    """Its first byte."""
    dtype: torch.dtype
    rows: int


class Sent(NamedTuple):
    """What has been sent at once."""

    there: Bytes
    """On the device, until the next is asked for."""
    members: Sequence[Member]
    packed: bool
    """Several whole matrices; else rows of one, which come in order."""

    def block(self) -> torch.Tensor:
        """The rows of the only member, as they are stored."""
        (member,) = self.members
        N = member.matrix.shape[1]
        return self.there.view(member.dtype, (member.rows, N), (N, 1))


class Failed(NamedTuple):
    """A matrix that can't be read, or not to its end."""

    at: int
    error: Exception


class _Loaded(NamedTuple):
    """What is to be sent."""

    where: Buffer | torch.Tensor
    """In a buffer, of which it is the first `nbytes`, or in bytes of its own."""
    nbytes: int
    held: Buffer | None
    """Which one can be read into again once it is sent, whether it lies there or not: or all would be read ahead."""
    members: Sequence[Member]
    packed: bool


class _Stopped(BaseException):
    """Nobody wants what comes next."""


def uploads(opened: Sequence[Open], device: torch.device, *, pack: bool) -> Generator[Sent | Failed, None, None]:
    """Sends matrices to a GPU as they are stored, in order; with `pack`, small ones several at a time.

    What is yielded last may still be on its way, which the current stream waits for. To be closed. One matrix is open
    at a time, besides those that are stretches of files.
    """
    import torch

    staging = staging_of(device)
    reading = _Reading(staging, opened, pack)
    name = f"{threading.current_thread().name}-reader"
    thread = threading.Thread(target=reading.run, name=name, args=(device, torch.get_num_threads()), daemon=True)
    here = reading.items()
    items: Iterator[_Loaded | Failed | BaseException] = iter(reading.done.get, None)
    try:
        thread.start()
    except RuntimeError:  # the system allows no more threads: what is next is read when what came before has been sent
        items = here
    try:
        for item in items:
            if isinstance(item, _Loaded):
                there = staging.send(item.where, item.nbytes)
                if item.held is not None:
                    reading.more()
                try:
                    yield Sent(there, item.members, item.packed)
                finally:
                    if isinstance(item.where, Buffer):
                        staging.worked(item.where)
                    if item.held is not None:
                        reading.give(item.held)
            elif isinstance(item, Failed):
                yield item
            else:
                raise item
    finally:
        reading.stop()
        try:
            if thread.ident is not None:
                thread.join()
            here.close()
        finally:
            reading.close()


class _Reading:
    """What the reading thread does."""

    def __init__(self, staging: Staging, opened: Sequence[Open], pack: bool) -> None:
        self._staging, self._opened, self._pack = staging, opened, pack
        self._turn = staging.turn
        self._allowed: SimpleQueue[None] = SimpleQueue()
        """One for each buffer that may be taken."""
        self.done: SimpleQueue[_Loaded | Failed | BaseException | None] = SimpleQueue()
        """What has been read, then None."""
        self._held: set[Buffer] = set()
        self._stopped = self._has_turn = False
        for _ in range(_AHEAD):
            self.more()

    def more(self) -> None:
        """One more buffer may be taken, since what one held has been sent."""
        self._allowed.put(None)

    def give(self, buffer: Buffer) -> None:
        """One is of no more use here."""
        self._held.discard(buffer)
        self._staging.give(buffer)

    def run(self, device: torch.device, threads: int) -> None:
        import torch

        try:
            torch.set_num_threads(threads)
            if device.type == "cuda":  # or to wait for an event would take memory of the first GPU, whose ever that is
                torch.cuda.set_device(device)
            for item in self.items():
                self.done.put(item)
        except _Stopped:
            pass
        except BaseException as error:
            self.done.put(error)
        finally:
            self.done.put(None)

    def stop(self) -> None:
        """Has it end soon, if it hasn't."""
        self._stopped = True
        self._allowed.put(None)

    def close(self) -> None:
        """Gives back what was read and not sent."""
        for buffer in list(self._held):
            self.give(buffer)

    def items(self) -> Generator[_Loaded | Failed, None, None]:
        """Reads one after the other."""
        try:
            yield from self._items()
        finally:
            self._in_turn(False)

    def _in_turn(self, needed: bool, *, wait: bool = True) -> None:
        """Has this thread's turn come where it is needed, and gives it to another where it isn't any more.

        Of the threads that feed a GPU, one at a time reads what only has to be copied from files: several would all
        take longer, and the GPU would have nothing to do until all of them were through, and then the work of all.
        Whoever has a buffer in hand must not wait: it may be the one that the thread whose turn it is waits for.
        """
        if self._has_turn and not needed:
            self._turn.release()
            self._has_turn = False
        elif needed and not self._has_turn:
            self._has_turn = self._turn.acquire(blocking=False)
            until = time.monotonic() + PATIENCE
            while wait and not self._has_turn:
                self._has_turn = self._turn.acquire(timeout=LOOK)
                self._look()
                if not self._has_turn and time.monotonic() > until:  # who has it may hang
                    if self._staging.turn is self._turn:
                        self._staging.turn = threading.Lock()
                    self._turn, until = self._staging.turn, time.monotonic() + PATIENCE

    def _items(self) -> Iterator[_Loaded | Failed]:
        pack: _Pack | None = None
        for at, open_ in enumerate(self._opened):
            try:
                with open_() as (matrix,):
                    size = nbytes(matrix)
                    small = self._pack and size <= PACKED_BYTES
                    if pack is not None and not (small and pack.has_room(size)):
                        yield from pack.all()
                        pack = None
                    self._in_turn(matrix.is_stretch, wait=pack is None)
                    if not small:
                        yield from self._blocks(at, matrix)
                    else:
                        pack = pack or _Pack(self._buffer())
                        pack.add(at, matrix, size)
            except Exception as error:
                if self._stopped:  # nobody would be told
                    return
                yield Failed(at, error)
        if pack is not None:
            yield from pack.all()

    def _blocks(self, at: int, matrix: Matrix) -> Iterator[_Loaded]:
        M, N = matrix.shape
        for start, stop in spans(M, N * matrix.itemsize, UPLOAD_BYTES):
            buffer = self._buffer()
            with self._back_if_raised(buffer):
                rows = matrix.rows(start, stop, buffer.memory)
            # Wider than they are stored, since an adapter is merged into them, they go through several buffers.
            for first, last in spans(stop - start, N * rows.element_size(), UPLOAD_BYTES):
                if first:
                    buffer = self._buffer()
                member = Member(at, matrix, 0, rows.dtype, last - first)
                with self._back_if_raised(buffer):
                    part = rows if last - first == stop - start else rows[first:last]
                    where = buffer if _lies_in(buffer.memory, part) else _bytes(part.clone())  # one row is too long
                yield _Loaded(where, part.nbytes, buffer, [member], packed=False)

    def _look(self) -> None:
        if self._stopped:
            raise _Stopped

    def _buffer(self) -> Buffer:
        self._allowed.get()
        self._look()
        try:
            buffer = self._staging.take(self._look)
        except BaseException:
            self.more()
            raise
        self._held.add(buffer)
        return buffer

    @contextmanager
    def _back_if_raised(self, buffer: Buffer) -> Iterator[None]:
        """What will not be sent can be taken again."""
        try:
            yield
        except BaseException:
            self.give(buffer)
            self.more()
            raise


class _Pack:
    """Whole matrices, one behind the other in one buffer; those that lie so in their file are read at once."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._members: list[Member] = []
        self._others: list[_Loaded | Failed] = []
        self._end = 0
        self._awaited: list[tuple[int, Matrix, int]] = []
        """Number, matrix and first byte of those that are not yet read: one, or stretches that follow each other."""
        self._gapless = True
        """Whether the last one's end is where the next one begins."""

    def has_room(self, size: int) -> bool:
        return self._end + size <= UPLOAD_BYTES

    def add(self, at: int, matrix: Matrix, size: int) -> None:
        """Reads it, of `size` bytes, now or, of a stretch, before `all` gives it."""
        if self._awaited and not (self._gapless and self._awaited[-1][1].precedes(matrix)):
            self._read()
        self._awaited.append((at, matrix, self._end))
        self._end += aligned(size)
        self._gapless = aligned(size) == size
        if not matrix.is_stretch:
            self._read()

    def all(self) -> Iterator[_Loaded | Failed]:
        """The buffer, and what could not be put into it."""
        self._read()
        yield from self._others
        end = self._end if self._members else 0
        yield _Loaded(self._buffer, end, self._buffer, self._members, packed=True)

    def _read(self) -> None:
        awaited, self._awaited = self._awaited, []
        if not awaited:
            return
        try:
            self._read_all(awaited)
        except Exception as error:  # whatever it is: no Gram may be taken for made that isn't
            self._others += [Failed(at, error) for at, _, _ in awaited]

    def _read_all(self, awaited: Sequence[tuple[int, Matrix, int]]) -> None:
        (_, first, begin), (_, last, _) = awaited[0], awaited[-1]
        matrix = first.through(last) if len(awaited) > 1 else first
        place = self._buffer.memory[begin : begin + nbytes(matrix)]
        rows = matrix.rows(0, matrix.shape[0], place)
        if _lies_in(place, rows):
            self._members += [Member(at, one, start, rows.dtype, one.shape[0]) for at, one, start in awaited]
        else:  # it is wider than it is stored, since an adapter is merged into it
            ((at, matrix, _),) = awaited
            member = Member(at, matrix, 0, rows.dtype, matrix.shape[0])
            self._others.append(_Loaded(_bytes(rows), rows.nbytes, None, [member], packed=True))


def _lies_in(place: np.ndarray, rows: torch.Tensor) -> bool:
    """Has `place` begin with `rows`, copied into it if they aren't there; False where they are more than it holds."""
    import torch

    if rows.nbytes > len(place):
        return False
    if rows.data_ptr() != place.ctypes.data:
        torch.from_numpy(place[: rows.nbytes]).view(rows.dtype).view(rows.shape).copy_(rows)
    return True


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    import torch

    return rows.contiguous().view(-1).view(torch.uint8)


def nbytes(matrix: Matrix) -> int:
    """Of its elements as they are stored."""
    M, N = matrix.shape
    return M * N * matrix.itemsize


def aligned(size: int) -> int:
    """Bytes from one matrix of a pack to the next: a GPU reads from where its elements may begin."""
    return -(-size // 16) * 16


def spans(length: int, bytes_each: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Spans of `block_bytes` at most, or of one row; equal ones: a short one at the end would waste a pass over G."""
    most = max(1, block_bytes // max(1, bytes_each))
    count = -(-length // most)
    step = -(-length // count)
    for start in range(0, length, step):
        yield start, min(start + step, length)
