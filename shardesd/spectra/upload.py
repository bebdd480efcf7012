"""Matrices on their way to a GPU: read into pinned memory by one thread, sent and worked on by another.

To launch the kernels of a Gram takes about as long as to read what comes next: two cards can't wait for one after the
other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from shardesd.records import Matrix
from shardesd.spectra.pack import Come, Failed, Loaded, Member, Pack, flat_bytes, lies_in, nbytes
from shardesd.spectra.staging import LOOK, PATIENCE, UPLOAD_BYTES, Buffer, Bytes, Staging, staging_of

if TYPE_CHECKING:
    import torch

PACKED_BYTES = 1 << 23
"""The largest matrix that travels together with others: 2048 × 2048 of 16 bits."""

_AHEAD = 3
"""Buffers that a thread reads into, or has read into and not sent: of two at once, since what reads has nothing to do
from the last byte of one to the first of the next, and another's bytes travel meanwhile."""

Open = Callable[[], AbstractContextManager[Sequence[Matrix]]]
"""Gives one matrix, which is read within the context."""


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
    items: Iterator[Loaded | Failed | BaseException] = iter(reading.done.get, None)
    try:
        thread.start()
    except RuntimeError:  # the system allows no more threads: what is next is read when what came before has been sent
        items = here
    try:
        for item in items:
            if isinstance(item, Loaded):
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
        self.done: SimpleQueue[Loaded | Failed | BaseException | None] = SimpleQueue()
        """What has been read, then None."""
        self._held: set[Buffer] = set()
        self._begun: Come | None = None
        self._packing: Pack | None = None
        self._failed: set[int] = set()
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

    def items(self) -> Generator[Loaded | Failed, None, None]:
        """Reads one after the other; what is next is begun before the one before it has come."""
        try:
            yield from self._items()
        finally:
            self._in_turn(False)
            for _ in self._rest():  # or it would come into memory that is used for something else
                pass
            if self._packing is not None:
                self._packing.wait()

    def _next(self, come: Come) -> Iterator[Loaded | Failed]:
        """What was begun before, once it has come; and what is `come`, now begun, where others may read too."""
        yield from self._rest(come)
        if not self._has_turn:  # they may wait for this buffer
            yield from self._rest()

    def _rest(self, then: Come | None = None) -> Iterator[Loaded | Failed]:
        """What was begun, once it has come; `then` has been begun since."""
        before, self._begun = self._begun, then
        if before is not None:
            yield from before()

    def _packed(self) -> Iterator[Loaded | Failed]:
        """As `_next`, of the pack, if there is one."""
        pack, self._packing = self._packing, None
        if pack is not None:
            yield from self._next(pack.begun())

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

    def _items(self) -> Iterator[Loaded | Failed]:
        for at, open_ in enumerate(self._opened):
            try:
                with open_() as (matrix,):
                    size = nbytes(matrix)
                    small = self._pack and size <= PACKED_BYTES
                    if self._packing is not None and not (small and self._packing.has_room(size)):
                        yield from self._packed()
                    if not matrix.is_stretch:
                        yield from self._rest()
                    self._in_turn(matrix.is_stretch, wait=self._packing is None)
                    if not small:
                        yield from self._blocks(at, matrix)
                    else:
                        self._packing = self._packing or Pack((yield from self._buffer()))
                        self._packing.add(at, matrix, size)
            except Exception as error:
                if self._stopped:  # nobody would be told
                    return
                yield from self._rest()  # of one before it
                yield Failed(at, error)
        yield from self._packed()
        self._in_turn(False)
        yield from self._rest()

    def _blocks(self, at: int, matrix: Matrix) -> Iterator[Loaded | Failed]:
        M, N = matrix.shape
        for start, stop in spans(M, N * matrix.itemsize, UPLOAD_BYTES):
            if at in self._failed:  # the rest of it is of no use
                return
            buffer = yield from self._buffer()
            with self._back_if_raised(buffer):
                begun = matrix.begin(start, stop, buffer.memory)
            come = partial(self._block, at, matrix, stop - start, buffer, begun)
            yield from self._next(come) if matrix.is_stretch else come()

    def _block(
        self, at: int, matrix: Matrix, count: int, buffer: Buffer, begun: Callable[[], torch.Tensor]
    ) -> Iterator[Loaded | Failed]:
        try:
            with self._back_if_raised(buffer):
                rows = begun()
            # Wider than they are stored, since an adapter is merged into them, they go through several buffers.
            for first, last in spans(count, matrix.shape[1] * rows.element_size(), UPLOAD_BYTES):
                if first:
                    buffer = yield from self._buffer()
                member = Member(at, matrix, 0, rows.dtype, last - first)
                with self._back_if_raised(buffer):
                    part = rows if last - first == count else rows[first:last]
                    where = buffer if lies_in(buffer.memory, part) else flat_bytes(part.clone())  # one row is too long
                yield Loaded(where, part.nbytes, buffer, [member], packed=False)
        except Exception as error:
            self._failed.add(at)
            yield Failed(at, error)

    def _look(self) -> None:
        if self._stopped:
            raise _Stopped

    def _buffer(self) -> Generator[Loaded | Failed, None, Buffer]:
        """One to read into. Where none can be had at once, what was begun comes first: it may hold the only one."""
        self._allowed.get()
        self._look()
        try:
            buffer = self._staging.spare() if self._begun is not None else None
            if buffer is None:
                yield from self._rest()
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


def spans(length: int, bytes_each: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Spans of `block_bytes` at most, or of one row; equal ones: a short one at the end would waste a pass over G."""
    most = max(1, block_bytes // max(1, bytes_each))
    count = -(-length // most)
    step = -(-length // count)
    for start in range(0, length, step):
        yield start, min(start + step, length)
