"""Where the bytes of matrices lie on their way to a GPU: in pinned memory, then in as much on the device."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue, SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from shardesd.errors import bare
from shardesd.spectra import driver

if TYPE_CHECKING:
    import torch

UPLOAD_BYTES = 1 << 26
"""Of stored elements, sent to a GPU at once. Each time costs some turns of the interpreter's lock, but pinned memory
costs half a second a gigabyte once in a process (docs/tuning.md)."""

BUFFERS = 4
"""Of a GPU, for all threads that feed it."""

PATIENCE = 10.0
"""Seconds for which a thread waits for what others of its GPU have: they may never give it back, where they hang."""

LOOK = 0.1
"""Seconds between two looks at whether what is waited for is still wanted."""

_MOMENT = 0.005
"""Seconds in which what is being read comes, and another buffer is given back."""

_MOST_VIEWS = 64


class Bytes:
    """Bytes on a device."""

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat`: uint8, contiguous."""
        self.flat = flat
        self._views: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], torch.Tensor] = {}

    def view(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], begin: int = 0
    ) -> torch.Tensor:
        """Those from `begin` on as elements; `strides` count these.

        Made once: for each view torch gives the interpreter's lock away, which others may then keep for milliseconds.
        """
        key = dtype, shape, strides, begin
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            typed = self.flat.view(dtype)
            view = self._views[key] = typed.as_strided(shape, strides, typed.storage_offset() + begin // dtype.itemsize)
        return view


class Pinned:
    """Memory of this process that a device reads by itself.

    Like torch's own it is kept for who needs some next, and never freed: to pin it is what takes time.
    """

    def __init__(self) -> None:
        import torch

        self.flat = torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=driver.library() is None)
        self.memory = self.flat.numpy()
        """The same; of which a part can be taken without giving the interpreter's lock away."""
        self.arrived, self.worked = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        """What was sent from it; what was made of that."""
        self._is_new = True
        self._is_pinned = False

    def pin(self) -> bool:
        """Before it is sent; whether it is pinned. By the first time the threads that read into it have brought its
        pages in, all at once, which alone would take CUDA ten times as long as the rest, while this process could map
        no other."""
        if self._is_new:
            self._is_new = False
            self._is_pinned = driver.pin(self.flat)
        return self._is_pinned


class Buffer:
    """Pinned memory, and as much on a device."""

    def __init__(self, device: torch.device, travel: torch.cuda.Stream) -> None:
        import torch

        idle = _idle.setdefault((device, UPLOAD_BYTES), SimpleQueue())
        try:
            pinned = idle.get_nowait()
        except Empty:
            pinned = Pinned()
        weakref.finalize(self, idle.put, pinned).atexit = False
        self._pinned, self.here, self.memory = pinned, pinned.flat, pinned.memory
        self.arrived, self.worked = pinned.arrived, pinned.worked
        self.there = Bytes(torch.empty(UPLOAD_BYTES, dtype=torch.uint8, device=device))
        self.there.flat.record_stream(travel)  # or what is still on its way could arrive in another's memory
        self.worked.record(torch.cuda.current_stream(device))  # after what was done with that memory before

    def pin(self) -> bool:
        """See `Pinned.pin`."""
        return self._pinned.pin()

    def wait(self) -> None:
        """Until it may be read into, since what it held has arrived."""
        if not self.arrived.query():  # type: ignore[no-untyped-call]
            self.arrived.synchronize()

    def is_done(self) -> bool:
        """Whether nothing will come to it, or be made of it, any more; or its device is lost."""
        try:
            return all(event.query() for event in (self.arrived, self.worked))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True


class Staging:
    """The buffers of one device. What one thread has read travels, on a stream of its own, while others are read into
    and what has arrived is worked on."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._travel = _travels.get(device) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        _travels[device] = self._travel
        self.turn = threading.Lock()
        """Of those who read what only has to be copied from files, see `upload`."""
        self._free: Queue[Buffer] = Queue()  # a SimpleQueue may wait for ever where another takes what it woke up for
        self._lock = threading.Lock()
        self._left = BUFFERS  # that may still be made: each costs time

    def take(self, look: Callable[[], None] = lambda: None) -> Buffer:
        """One that may be read into; waits for it, calling `look`, which may raise, now and then."""
        return self._ready(self._one(look))

    def spare(self) -> Buffer | None:
        """One that may be read into, where there is one, can be made, or is given back in a moment."""
        try:
            return self._ready(self._free.get_nowait())
        except Empty:
            pass
        with suppress(RuntimeError):  # no memory
            if (made := self._make()) is not None:
                return made
        try:
            return self._ready(self._free.get(timeout=_MOMENT))
        except Empty:
            return None

    def _ready(self, buffer: Buffer) -> Buffer:
        try:
            buffer.wait()
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def _one(self, look: Callable[[], None]) -> Buffer:
        until = time.monotonic() + PATIENCE
        failed: RuntimeError | None = None
        while True:
            with suppress(Empty):
                return self._free.get_nowait()
            late = time.monotonic() > until
            if late or failed is None:
                try:
                    made = self._make(more=late)
                except RuntimeError as error:
                    if late:
                        raise
                    failed = bare(error)  # with no memory for one more, those that there are will do
                else:
                    if made is not None:
                        return made
            if failed is not None and self._left >= BUFFERS:  # there are none, and none is being made
                raise failed
            with suppress(Empty):
                return self._free.get(timeout=LOOK)
            look()

    def _make(self, *, more: bool = False) -> Buffer | None:
        """A new one, where fewer than `BUFFERS` are there, or `more` may be."""
        with self._lock:
            make = more or self._left > 0
            self._left -= make
        if not make:
            return None
        try:
            return self._new()
        except BaseException:
            with self._lock:
                self._left += 1
            raise

    def begin(self) -> None:
        """Makes a buffer before one is needed, where there is memory for it."""
        with suppress(RuntimeError):
            self.give(self._one(lambda: None))

    def drop(self) -> None:
        """Lets go of the buffers that nobody uses; made anew when they are needed."""
        used: list[Buffer] = []
        with suppress(Empty):
            while True:
                buffer = self._free.get_nowait()
                if buffer.is_done():
                    with self._lock:
                        self._left += 1
                else:
                    used.append(buffer)
        for buffer in used:
            self.give(buffer)

    def _new(self) -> Buffer:
        return Buffer(self._device, self._travel)

    def give(self, buffer: Buffer) -> None:
        """It may be read into again."""
        self._free.put(buffer)

    def send(self, where: Buffer | torch.Tensor, nbytes: int) -> Bytes:
        """Copies a buffer's first bytes to the device, good until `worked`; or those that lie elsewhere.

        The current stream of the calling thread, which is the one that works with them, waits for that.
        """
        import torch

        if not isinstance(where, Buffer):
            return Bytes(where.to(self._device))
        with torch.cuda.device(self._device):
            pinned = where.pin()
            driver.wait(self._travel, where.worked)
            driver.send(where.here, where.there.flat, nbytes, self._travel, pinned=pinned)
            where.arrived.record(self._travel)
            driver.wait(torch.cuda.current_stream(), where.arrived)
        return where.there

    def worked(self, buffer: Buffer) -> None:
        """All that is to be done with what a buffer's bytes became has been given to the current stream."""
        import torch

        buffer.worked.record(torch.cuda.current_stream(self._device))


_travels: dict[torch.device, torch.cuda.Stream] = {}
"""torch has few streams, and gives one of them anew to who asks for more."""
_idle: dict[tuple[torch.device, int], SimpleQueue[Pinned]] = {}
"""Of each device and size."""
_local = threading.local()
_stagings: WeakValueDictionary[torch.device, Staging] = WeakValueDictionary()
"""Of each device, as long as a thread works for it."""
_locks: dict[torch.device, threading.Lock] = {}


def staging_of(device: torch.device) -> Staging:
    """What all threads that work for a device share."""
    with _locks.setdefault(device, threading.Lock()):
        staging = _stagings.get(device)
        if staging is None:
            staging = _stagings[device] = Staging(device)
            staging.begin()
        _local.staging = staging
    return staging


def drop_buffers() -> None:
    """Lets go of the GPUs' memory that is kept for uploads, as far as none are under way."""
    for staging in list(_stagings.values()):
        staging.drop()
