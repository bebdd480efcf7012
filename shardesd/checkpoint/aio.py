"""A long range of a file is read in parts by threads of the C library, which need no turn of the interpreter's lock.

That is POSIX AIO as glibc has it: one call, ``lio_listio``, hands it all parts and waits for them. Two cards are fed
thirteen gigabytes a second in parts of two megabytes: with threads of Python's, each of which has to have the lock
twice a part, that takes 1.8 instead of 1.1 s (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
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
"""Read by one call, which keeps some bytes for each on its thread's stack."""
_MOST_COPIES = 256
"""Of descriptors that there are at a time, and at most a quarter of those that the process may have."""

# struct aiocb of 64-bit glibc, whatever the processor.
_REQUEST = np.dtype(
    {
        "names": ["fildes", "opcode", "buffer", "nbytes", "notify", "returned", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 44, 120, 128],
        "itemsize": 168,
    }
)
_LIO_READ, _LIO_WAIT, _SIGEV_NONE = 0, 0, 1
_F_DUPFD_CLOEXEC, _SIG_SETMASK, _SIGNALS_BYTES = 1030, 2, 128  # Linux's


def unread(fd: int, target: np.ndarray, offset: int) -> Sequence[tuple[int, int]]:
    """Reads ``len(target)`` bytes of a file, from `offset` on, into `target` (contiguous, uint8).

    Returns the spans of `target` that have not been read to their ends: what is wrong there another way of reading
    will tell. All of it where there is no such library, where it is one part, and in the main thread, in which Ctrl-C
    could raise while the parts are still being read.
    """
    nbytes = len(target)
    library = _library() if nbytes > PART_BYTES and threading.current_thread() is not threading.main_thread() else None
    if library is None:
        return [(0, nbytes)]
    left: list[tuple[int, int]] = []
    step = _MOST_PARTS * PART_BYTES
    for start in range(0, nbytes, step):
        spans = _unread(library, fd, target[start : start + step], offset + start)
        left += [(start + first, start + end) for first, end in spans]
    return left


def _unread(library: _Library, fd: int, target: np.ndarray, offset: int) -> Iterator[tuple[int, int]]:
    nbytes = len(target)
    starts_P = np.arange(0, nbytes, PART_BYTES)
    lengths_P = np.minimum(PART_BYTES, nbytes - starts_P)
    requests_P = np.zeros(len(starts_P), _REQUEST)
    with library.copies(fd, len(starts_P)) as fds:
        requests_P["fildes"] = np.resize(fds, len(starts_P))
        requests_P["opcode"] = _LIO_READ
        requests_P["buffer"] = target.ctypes.data + starts_P
        requests_P["nbytes"] = lengths_P
        requests_P["notify"] = _SIGEV_NONE
        requests_P["offset"] = offset + starts_P
        pointers_P = requests_P.ctypes.data + np.arange(len(starts_P)) * _REQUEST.itemsize
        with library.no_signals():
            library.lio_listio(_LIO_WAIT, pointers_P.ctypes.data, len(starts_P), None)
    for part in np.flatnonzero(requests_P["returned"] != lengths_P).tolist():
        yield part * PART_BYTES, min((part + 1) * PART_BYTES, nbytes)


@dataclass(frozen=True, slots=True)
class _Library:
    lio_listio: Any
    fcntl: Any
    close: Any
    pthread_sigmask: Any
    threads: int

    @contextmanager
    def copies(self, fd: int, count: int) -> Iterator[list[int]]:
        """Descriptors of the same file, as many as are of use: requests of one are served one after the other."""
        allowed = _allowance.take(min(count, self.threads))
        fds: list[int] = []
        try:
            while len(fds) < allowed:
                copied = self.fcntl(fd, _F_DUPFD_CLOEXEC, 0)
                if copied < 0:  # the process has as many as it may
                    break
                fds.append(copied)
            yield fds or [fd]
        finally:
            for copied in fds:
                self.close(copied)
            _allowance.give(allowed)

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

    def take(self, count: int) -> int:
        """As many of these as there are left, down to none."""
        with self._lock:
            taken = min(count, self._left)
            self._left -= taken
            return taken

    def give(self, count: int) -> None:
        with self._lock:
            self._left += count


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
        quick = ctypes.PyDLL(None)  # keeps the interpreter's lock, which costs more to have back than these calls take
        # The other cores are for whoever works with what came before: threads on all of them would not read faster.
        threads = min(_MOST_THREADS, cores - cores // 4)
        prepare((ctypes.c_int * 8)(threads, 2 * _MOST_THREADS))  # struct aioinit
        lio_listio.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        quick.fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
        quick.close.argtypes = (ctypes.c_int,)
        quick.pthread_sigmask.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
        return _Library(lio_listio, quick.fcntl, quick.close, quick.pthread_sigmask, threads)
    return None


_forked = False


def _fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)  # glibc believes that its threads are there too, and would wait for ever
