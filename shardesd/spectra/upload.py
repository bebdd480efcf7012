"""Matrices on their way to a GPU: read into pinned memory by one thread, sent and worked on by another.

To launch the kernels of a Gram takes about as long as to read what comes next: two cards can't wait for one after the
other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from shardesd.records import Matrix

if TYPE_CHECKING:
    import torch

UPLOAD_BYTES = 1 << 25
"""Of stored elements, sent to a GPU at once. Each time costs some forty turns of the interpreter's lock, but pinned
memory costs half a second a gigabyte once in a process (docs/performance.md)."""

PACKED_BYTES = 8_000_000
"""The largest matrix that travels together with others."""

_BUFFERS = 2

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

    stored: torch.Tensor
    """On the device, flat, bytes."""
    members: Sequence[Member]
    packed: bool
    """Several whole matrices; else rows of one, which come in order."""

    def block(self) -> torch.Tensor:
        """The rows of the only member, as they are stored."""
        (member,) = self.members
        return self.stored.view(member.dtype).view(member.rows, -1)


class Failed(NamedTuple):
    """A matrix that can't be read, or not to its end."""

    at: int
    error: Exception


class _Loaded(NamedTuple):
    """What is to be sent."""

    stored: torch.Tensor
    pinned: bool
    """Whether that lies in a buffer."""
    buffer: int | None
    """Which one can be read into again once it is sent, whether it lies there or not: or all would be read ahead."""
    members: Sequence[Member]
    packed: bool


class _Stopped(BaseException):
    """Nobody wants what comes next."""


class Staging:
    """The pinned buffers of one thread: one is read into while another's bytes travel to the device."""

    def __init__(self) -> None:
        import torch

        self._buffers = [torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _BUFFERS

    def buffer(self, number: int) -> torch.Tensor:
        """One that may be read into: waits until what it held has arrived."""
        sent = self._sent[number]
        if sent is not None:
            sent.synchronize()
        return self._buffers[number]

    def send(self, stored: torch.Tensor, number: int | None, device: torch.device) -> torch.Tensor:
        """A copy on the device of what lies in a buffer, or, without a number, elsewhere."""
        import torch

        on_device = stored.to(device, non_blocking=number is not None)
        if number is not None:
            event = self._sent[number]  # used again: to make one takes the driver long
            if event is None or event.device != on_device.device:
                event = self._sent[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
        return on_device


_local = threading.local()


def _staging() -> Staging:
    """This thread's."""
    if not hasattr(_local, "staging"):
        _local.staging = Staging()
    staging: Staging = _local.staging
    return staging


def uploads(opened: Sequence[Open], device: torch.device, *, pack: bool) -> Generator[Sent | Failed, None, None]:
    """Sends matrices to a GPU as they are stored, in order; with `pack`, small ones several at a time.

    What is yielded last may still be on its way, which the current stream waits for. To be closed. One matrix is open
    at a time, besides those that are stretches of files.
    """
    import torch

    staging = _staging()
    reading = _Reading(staging, opened, pack)
    name = f"{threading.current_thread().name}-reader"
    thread = threading.Thread(target=reading.run, name=name, args=(device, torch.get_num_threads()), daemon=True)
    items: Iterator[_Loaded | Failed | BaseException]
    try:
        thread.start()
        items = iter(reading.done.get, None)
    except RuntimeError:  # the system allows no more threads: what is next is read when what came before has been sent
        items = reading.items()
    try:
        for item in items:
            if isinstance(item, _Loaded):
                stored = staging.send(item.stored, item.buffer if item.pinned else None, device)
                if item.buffer is not None:
                    reading.free.put(item.buffer)
                yield Sent(stored, item.members, item.packed)
            elif isinstance(item, Failed):
                yield item
            else:
                raise item
    finally:
        reading.stop()
        if thread.ident is not None:
            thread.join()


class _Reading:
    """What the reading thread does."""

    def __init__(self, staging: Staging, opened: Sequence[Open], pack: bool) -> None:
        self._staging, self._opened, self._pack = staging, opened, pack
        self.free: SimpleQueue[int | None] = SimpleQueue()
        """Buffers that may be asked for."""
        self.done: SimpleQueue[_Loaded | Failed | BaseException | None] = SimpleQueue()
        """What has been read, then None."""
        self._stopped = False
        for number in range(_BUFFERS):
            self.free.put(number)

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
        self.free.put(None)

    def items(self) -> Iterator[_Loaded | Failed]:
        """Reads one after the other."""
        pack: _Pack | None = None
        for at, open_ in enumerate(self._opened):
            try:
                with open_() as (matrix,):
                    small = self._pack and nbytes(matrix) <= PACKED_BYTES
                    if pack is not None and not (small and pack.has_room(matrix)):
                        yield from pack.all()
                        pack = None
                    if not small:
                        yield from self._blocks(at, matrix)
                    else:
                        pack = pack or _Pack(*self._buffer())
                        pack.add(at, matrix)
            except Exception as error:
                yield Failed(at, error)
        if pack is not None:
            yield from pack.all()

    def _blocks(self, at: int, matrix: Matrix) -> Iterator[_Loaded]:
        M, N = matrix.shape
        for start, stop in spans(M, N * matrix.itemsize, UPLOAD_BYTES):
            number, buffer = self._buffer()
            with self._back_if_raised(number):
                rows = matrix.rows(start, stop, buffer.numpy())
            # Wider than they are stored, since an adapter is merged into them, they go through several buffers.
            for first, last in spans(stop - start, N * rows.element_size(), UPLOAD_BYTES):
                if first:
                    number, buffer = self._buffer()
                member = Member(at, matrix, 0, rows.dtype, last - first)
                with self._back_if_raised(number):
                    pinned = _in(buffer, rows[first:last])
                    stored = _bytes(rows[first:last].clone()) if pinned is None else pinned  # one row is too long
                yield _Loaded(stored, pinned is not None, number, [member], packed=False)

    def _buffer(self) -> tuple[int, torch.Tensor]:
        number = self.free.get()
        if number is None or self._stopped:
            raise _Stopped
        with self._back_if_raised(number):
            return number, self._staging.buffer(number)

    @contextmanager
    def _back_if_raised(self, number: int) -> Iterator[None]:
        """A buffer that was asked for and will not be sent can be asked for again."""
        try:
            yield
        except BaseException:
            self.free.put(number)
            raise


class _Pack:
    """Whole matrices, one behind the other in one buffer; those that lie so in their file are read at once."""

    def __init__(self, number: int, buffer: torch.Tensor) -> None:
        self._number, self._buffer = number, buffer
        self._members: list[Member] = []
        self._others: list[_Loaded | Failed] = []
        self._end = 0
        self._awaited: list[tuple[int, Matrix, int]] = []
        """Number, matrix and first byte of those that are not yet read: one, or stretches that follow each other."""

    def has_room(self, matrix: Matrix) -> bool:
        return self._end + nbytes(matrix) <= UPLOAD_BYTES

    def add(self, at: int, matrix: Matrix) -> None:
        """Reads it, now or, of a stretch, before `all` gives it."""
        if self._awaited:
            _, last, begin = self._awaited[-1]
            if begin + nbytes(last) != self._end or not last.precedes(matrix):
                self._read()
        self._awaited.append((at, matrix, self._end))
        self._end += aligned(nbytes(matrix))
        if not matrix.is_stretch:
            self._read()

    def all(self) -> Iterator[_Loaded | Failed]:
        """The buffer, and what could not be put into it."""
        self._read()
        yield from self._others
        end = self._end if self._members else 0
        yield _Loaded(self._buffer[:end], True, self._number, self._members, packed=True)

    def _read(self) -> None:
        awaited, self._awaited = self._awaited, []
        if not awaited:
            return
        (_, first, begin), (_, last, _) = awaited[0], awaited[-1]
        try:
            matrix = first.through(last) if len(awaited) > 1 else first
            place = self._buffer[begin : begin + nbytes(matrix)]
            rows = matrix.rows(0, matrix.shape[0], place.numpy())
        except Exception as error:
            self._others += [Failed(at, error) for at, _, _ in awaited]
            return
        if _in(place, rows) is None:  # it is wider than it is stored, since an adapter is merged into it
            ((at, matrix, _),) = awaited
            member = Member(at, matrix, 0, rows.dtype, matrix.shape[0])
            self._others.append(_Loaded(_bytes(rows), False, None, [member], packed=True))
            return
        self._members += [Member(at, one, start, rows.dtype, one.shape[0]) for at, one, start in awaited]


def _in(place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The part of `place` that holds `rows`, copied into it if they aren't there; None where they are more."""
    size = rows.numel() * rows.element_size()
    if size > place.numel():
        return None
    if rows.data_ptr() != place.data_ptr():
        place[:size].view(rows.dtype).view(rows.shape).copy_(rows)
    return place[:size]


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
