"""A long range of a file is read in parts by threads of the C library, which need no turn of the interpreter's lock.

That is POSIX AIO as glibc has it: one call, ``lio_listio``, hands it all parts, another one waits for them. Two cards
are fed thirteen gigabytes a second in parts of two megabytes: with threads of Python's, each of which has to have the
lock twice a part, that takes 1.8 instead of 1.1 s (docs/tuning.md).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PART_BYTES = 2 << 20
"""What one thread reads at a time."""

_MOST_THREADS = 32
_MOST_PARTS = 256
"""Handed over at once, while nobody else has the interpreter's lock."""
_MOST_COPIES = 256
"""Of descriptors that there are at a time, and at most a quarter of those that the process may have."""

# struct aiocb of 64-bit glibc, whatever the processor.
_REQUEST = np.dtype(
    {
        "names": ["fildes", "opcode", "buffer", "nbytes", "notify", "error", "returned", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 44, 112, 120, 128],
        "itemsize": 168,
    }
)
_LIO_READ, _LIO_WAIT, _LIO_NOWAIT, _SIGEV_NONE = 0, 0, 1, 1
_F_DUPFD_CLOEXEC, _SIG_SETMASK, _SIGNALS_BYTES = 1030, 2, 128  # Linux's


def unread(fd: int, target: np.ndarray, offset: int) -> Sequence[tuple[int, int]]:
    """Reads ``len(target)`` bytes of a file, from `offset` on, into `target` (contiguous, uint8).

    Returns the spans of `target` that have not been read to their ends: what is wrong there another way of reading
    will tell.
    """
    left: list[tuple[int, int]] = []
    step = _MOST_PARTS * PART_BYTES
    for start in range(0, len(target), step):
        piece = target[start : start + step]
        begun = begin(fd, piece, offset + start)
        spans = [(0, len(piece))] if begun is None else begun.unread()
        left += [(start + first, start + end) for first, end in spans]
    return left


def begin(fd: int, target: np.ndarray, offset: int) -> Begun | None:
    """Has the library read what `unread` would; `Begun.unread` waits for it, and is to be called in any case.

    None where there is no such library, where it is one part or very many, and in the main thread, in which Ctrl-C
    could raise while they are still being read.
    """
    suits = PART_BYTES < len(target) <= _MOST_PARTS * PART_BYTES
    library = _library() if suits and threading.current_thread() is not threading.main_thread() else None
    return None if library is None else Begun(library, fd, target, offset)


class Begun:
    """A range that is being read."""

    def __init__(self, library: _Library, fd: int, target: np.ndarray, offset: int) -> None:
        starts_P = np.arange(0, len(target), PART_BYTES)
        self._library, self.target = library, target
        self._parts_P = parts_P = np.zeros(len(starts_P), _REQUEST)
        parts_P["buffer"] = target.ctypes.data + starts_P
        parts_P["nbytes"] = np.minimum(PART_BYTES, len(target) - starts_P)
        parts_P["offset"] = offset + starts_P
        parts_P["fildes"] = fd
        self._fds: list[int] = []
        """Of the same file, as many as are of use: requests of one are served one after the other."""
        _under_way.add(self)
        library.copy(fd, len(starts_P), self._fds)
        if self._fds:
            parts_P["fildes"] = np.resize(self._fds, len(starts_P))
        _ask(library.hand_over, _LIO_NOWAIT, parts_P)

    def unread(self) -> list[tuple[int, int]]:
        """Waits; then gives the spans that have not been read to their ends."""
        parts_P = self._parts_P
        while self in _under_way:
            # A request for no bytes is served when those of its descriptor have been: one wait for all parts.
            fds_F = np.unique(parts_P["fildes"])
            last_F = np.zeros(len(fds_F), _REQUEST)
            last_F["fildes"], last_F["buffer"] = fds_F, self.target.ctypes.data
            with self._library.no_signals():
                _ask(self._library.lio_listio, _LIO_WAIT, last_F)
            if (parts_P["error"] == errno.EINPROGRESS).any():  # there was no memory to ask
                time.sleep(0.001)
            else:
                self._library.close_all(self._fds)
                _under_way.discard(self)
        ends_P = np.cumsum(parts_P["nbytes"])
        left_P = parts_P["returned"] != parts_P["nbytes"].astype(np.int64)
        return [(part * PART_BYTES, int(ends_P[part])) for part in np.flatnonzero(left_P).tolist()]


_under_way: set[Begun] = set()
"""The library writes into their memory, whoever has let go of them."""


def settle(target: np.ndarray) -> None:
    """Waits until nothing more is read into `target`: after an error, whatever it was, before it is used again.

    Where there isn't even the memory to wait it tries again.
    """
    while True:
        try:
            for begun in list(_under_way):
                if np.may_share_memory(begun.target, target):
                    begun.unread()
            return
        except MemoryError:
            time.sleep(0.01)


def _ask(lio_listio: Any, mode: int, requests_R: np.ndarray) -> None:
    """Has bytes read; `lio_listio`'s answer says no more than the requests themselves will."""
    requests_R["opcode"] = _LIO_READ
    requests_R["notify"] = _SIGEV_NONE
    pointers_R = requests_R.ctypes.data + np.arange(len(requests_R)) * _REQUEST.itemsize
    lio_listio(mode, pointers_R.ctypes.data, len(pointers_R), None)


@dataclass(frozen=True, slots=True)
class _Library:
    lio_listio: Any
    hand_over: Any
    """The same, where it doesn't wait."""
    fcntl: Any
    close: Any
    pthread_sigmask: Any
    threads: int

    def copy(self, fd: int, count: int, fds: list[int]) -> None:
        """Adds copies of a descriptor to `fds`: one for each thread at most, as many as there may be."""
        while len(fds) < min(count, self.threads) and _allowance.take():
            copied = self.fcntl(fd, _F_DUPFD_CLOEXEC, 0)
            if copied < 0:  # the process has as many as it may
                _allowance.give()
                break
            fds.append(copied)

    def close_all(self, fds: list[int]) -> None:
        """Closes copies, and takes them from `fds`."""
        while fds:
            self.close(fds.pop())
            _allowance.give()

    @contextmanager
    def no_signals(self) -> Iterator[None]:
        """This thread gets none: one would end `lio_listio`, whose own threads would then write where its stack was."""
        before = ctypes.create_string_buffer(_SIGNALS_BYTES)
        self.pthread_sigmask(_SIG_SETMASK, b"\xff" * _SIGNALS_BYTES, before)
        try:
            yield
        finally:
            self.pthread_sigmask(_SIG_SETMASK, before, None)


class _Allowance:
    """How many copies of descriptors all threads together may still make."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether there was one left."""
        with self._lock:
            taken = self._left > 0
            self._left -= taken
            return taken

    def give(self) -> None:
        with self._lock:
            self._left += 1


def _most_copies() -> int:
    try:
        import resource
    except ImportError:  # Windows, which has no such library
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_COPIES if soft == resource.RLIM_INFINITY else min(_MOST_COPIES, soft // 4)


_allowance = _Allowance(_most_copies())


def _library() -> _Library | None:
    return None if _forked else _load()


@cache
def _load() -> _Library | None:
    """None where there is no glibc, or nothing to gain."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not sys.platform.startswith("linux") or cores < 2 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    for name in (None, "librt.so.1"):  # where it was before glibc 2.34
        try:
            waiting = ctypes.CDLL(name)
            prepare, lio_listio = waiting.aio_init, waiting.lio_listio
        except (OSError, AttributeError):
            continue
        # Keep the interpreter's lock, which costs more to have back than these calls take.
        quick, hand_over = ctypes.PyDLL(None), ctypes.PyDLL(name).lio_listio
        # The other cores are for whoever works with what came before: threads on all of them would not read faster.
        threads = min(_MOST_THREADS, max(cores // 2, min(cores, 4)))
        prepare((ctypes.c_int * 8)(threads, 2 * _MOST_THREADS))  # struct aioinit
        for call in (lio_listio, hand_over):
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        quick.fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
        quick.close.argtypes = (ctypes.c_int,)
        quick.pthread_sigmask.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
        return _Library(lio_listio, hand_over, quick.fcntl, quick.close, quick.pthread_sigmask, threads)
    return None


_forked = False


def _fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)  # glibc believes that its threads are there too, and would wait for ever
