"""Ranges of one file, fetched over several connections into memory a little before they are needed."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from shardesd.source.base import Progress
from shardesd.source.remote import Remote

CONNECTIONS = 4
REQUEST_BYTES = 8 << 20
"""Of one request at most: enough to be at full speed for most of it, and little to ask for again when it breaks."""
GAP_BYTES = 64 << 10
"""Two ranges this close to each other are asked for as one, if that wastes no more than one byte in a hundred."""
_REPORT_SECONDS = 0.1
_MAPPED_BYTES = 256 << 10

Span = tuple[int, int]


class _Closed(BaseException):
    """Raised inside a request to end it. Not an `Exception`, so that nobody retries."""


@dataclass(eq=False, slots=True)
class _Buffer:
    start: int
    end: int
    uses: int = 0
    """How often it will still be read."""
    readers: int = 0
    """Who waits for it."""
    data: np.ndarray | None = None
    missing: int = 0
    counted: bool = False
    """Whether it counts as fetched ahead: until somebody reads it."""
    error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(eq=False, slots=True)
class _Request:
    start: int
    end: int
    buffers: list[_Buffer] = field(default_factory=list)


class Ahead:
    """The `spans` (start, end) of `remote`, in the order in which they will be read; one that is read n times, n times.

    At most `limit` bytes (or one span, where that alone is larger) lie in memory unread. One that is read before its
    turn is fetched at once, whatever the limit. `report` is told the bytes that are here and that there will be.
    """

    def __init__(self, remote: Remote, spans: Sequence[Span], *, limit: int, report: Progress | None = None) -> None:
        self._remote = remote
        self._limit = limit
        self._report = report
        self._changed = threading.Condition()
        self._closed = False
        self._held = 0
        self._buffers: dict[Span, _Buffer] = {}
        for start, end in spans:
            self._buffers.setdefault((start, end), _Buffer(start, end, missing=end - start)).uses += 1
        self._waiting = deque(_requests(list(self._buffers.values())))
        self._urgent: deque[_Request] = deque()
        self.total = sum(request.end - request.start for request in self._waiting)
        self._done = 0
        self._told = 0.0
        for _ in range(min(CONNECTIONS, len(self._waiting))):
            threading.Thread(target=self._work, name="ranges", daemon=True).start()

    def find(self, span: Span) -> AbstractContextManager[np.ndarray] | None:
        """What gives the bytes of a span, once they are here, as uint8, valid until the context ends; to be entered.

        None where it is not fetched here, or has been read as often as was announced. Raises, when it is entered, what
        the fetching raised: `SourceError`, `ShardChanged`.
        """
        with self._changed:
            buffer = self._buffers.get(span)
            if buffer is None:
                return None
            buffer.readers += 1
        return self._read(span, buffer)

    @contextmanager
    def _read(self, span: Span, buffer: _Buffer) -> Iterator[np.ndarray]:
        with self._changed:
            self._hurry(buffer)
            self._changed.wait_for(lambda: self._closed or buffer.error is not None or not buffer.missing)
            buffer.readers -= 1
            buffer.uses -= 1
            wanted = buffer.uses > 0 or buffer.readers > 0  # by one who was not announced
            if not wanted:
                self._buffers.pop(span, None)
            if buffer.counted:
                buffer.counted = False
                self._held -= buffer.nbytes
                self._changed.notify_all()
            if buffer.error is not None:
                raise buffer.error
            if buffer.missing:
                raise ValueError("closed while it was read")
            data, buffer.data = buffer.data, buffer.data if wanted else None
        assert data is not None
        yield data

    def close(self) -> None:
        """Ends what is under way. Arrays in use stay valid."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._urgent.clear()
            self._buffers.clear()
            self._changed.notify_all()

    def _hurry(self, buffer: _Buffer) -> None:
        """Puts a span that is needed now before all others, and nothing else of what would have come with it.

        Else reading in another order than was announced would bring everything into memory.
        """
        waiting: deque[_Request] = deque()
        for request in self._waiting:
            if buffer not in request.buffers:
                waiting.append(request)
                continue
            at = request.buffers.index(buffer)
            before, after = request.buffers[:at], request.buffers[at + 1 :]
            mine = _Request(max(request.start, buffer.start), min(request.end, buffer.end), [buffer])
            self._urgent.append(mine)
            rest = [_Request(request.start, min(before[-1].end, mine.start), before)] if before else []
            rest += [_Request(max(after[0].start, mine.end), request.end, after)] if after else []
            waiting.extend(rest)
            self.total -= sum(r.start - r.end for r in (mine, *rest)) + request.end - request.start
        self._waiting = waiting
        self._changed.notify_all()

    def _work(self) -> None:
        while (request := self._next()) is not None:
            try:
                self._remote.read(request.start, request.end, lambda at, data, to=request: self._put(to, at, data))  # type: ignore[misc]
            except _Closed:
                return
            except BaseException as error:
                with self._changed:
                    for buffer in request.buffers:
                        buffer.error = buffer.error or error
                    self._changed.notify_all()

    def _next(self) -> _Request | None:
        with self._changed:
            while not self._closed and (self._urgent or self._waiting):
                if self._urgent:
                    return self._allocated(self._urgent.popleft())
                new = sum(buffer.nbytes for buffer in self._waiting[0].buffers if buffer.data is None)
                if not new or not self._held or self._held + new <= self._limit:
                    return self._allocated(self._waiting.popleft())
                self._changed.wait()
            return None

    def _allocated(self, request: _Request) -> _Request:
        for buffer in request.buffers:
            if buffer.data is None:
                buffer.data = memory(buffer.nbytes)
                buffer.counted = True
                self._held += buffer.nbytes
        return request

    def _put(self, request: _Request, at: int, data: bytes) -> None:
        if self._closed:
            raise _Closed
        end = at + len(data)
        ready = False
        for buffer in request.buffers:
            low, high = max(at, buffer.start), min(end, buffer.end)
            if low < high:
                assert buffer.data is not None
                buffer.data[low - buffer.start : high - buffer.start] = np.frombuffer(
                    data, np.uint8, high - low, low - at
                )
                with self._changed:
                    buffer.missing -= high - low
                    ready |= not buffer.missing
        with self._changed:
            self._done += len(data)
            done, now = self._done, time.monotonic()
            tell = done == self.total or now - self._told >= _REPORT_SECONDS
            self._told = now if tell else self._told
            if ready:
                self._changed.notify_all()
        if tell and self._report is not None:
            self._report(done, self.total)


def memory(nbytes: int) -> np.ndarray:
    """Bytes that go back to the system as soon as nobody holds them.

    Buffers of many sizes that one thread takes and another one frees would leave the heap in holes.
    """
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8) if nbytes >= _MAPPED_BYTES else np.empty(nbytes, np.uint8)


def _requests(buffers: Sequence[_Buffer]) -> Iterator[_Request]:
    """As few requests as may be: neighbours joined, then cut to `REQUEST_BYTES`."""
    joined: list[_Request] = []
    wasted = 0
    for buffer in buffers:
        last = joined[-1] if joined else None
        gap = buffer.start - last.end if last else -1
        if last and 0 <= gap <= GAP_BYTES and wasted + gap <= (buffer.end - last.start) // 100:
            last.end, wasted = buffer.end, wasted + gap
            last.buffers.append(buffer)
        else:
            joined.append(_Request(buffer.start, buffer.end, [buffer]))
            wasted = 0
    for whole in joined:
        for start in range(whole.start, whole.end, REQUEST_BYTES):
            end = min(start + REQUEST_BYTES, whole.end)
            touched = [b for b in whole.buffers if b.start < end and start < b.end]
            if touched:
                yield _Request(start, end, touched)
