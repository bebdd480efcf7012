"""Byte ranges of one file → arrays in memory, one range at a time.

- ``pread``, and ``auto``: `preadv` in chunks into a buffer that is used again, long ranges by several threads.
- ``mmap``: the range is mapped, the kernel copies it chunk by chunk into that same buffer, and each chunk's pages are
  given back at once. This process never touches a mapped page itself: when a file shrinks, a touched page beyond its
  new end kills the process (SIGBUS, which no Python code can catch), while a system call merely reports a fault.
  Slower at every size (docs/tuning.md), since each range's page tables are built and torn down.

So nobody who changes the file can reach an array that was handed out, and a file that changed is noticed before the
array is: `ShardChanged`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from shardesd.checkpoint import aio
from shardesd.errors import AccessDenied, NotFound, OptionError, ShardChanged, SourceError
from shardesd.options import IO_METHODS

CHUNK_BYTES = 8 << 20
"""Copied per system call, so that other threads and a Ctrl-C never wait long."""

_Copy = Callable[[int, int, int], int]


class Reader:
    """One open file, read by any number of threads at once.

    `io` is ``mmap``, ``pread`` or ``auto`` (pread). Raises `SourceError` when the file can't be opened or mapped.

    Memory: one buffer per read in progress, plus one that waits for the next read; all are freed with the reader.
    """

    def __init__(self, path: Path, io: str = "auto") -> None:
        if io not in IO_METHODS:
            raise OptionError(f"--io '{io}' is invalid (expected one of: {', '.join(IO_METHODS)})")
        self._copy = _process_vm_readv() if io == "mmap" else None
        if io == "mmap" and self._copy is None:
            raise OptionError("--io mmap works on Linux only: use --io auto or --io pread")
        self.path = path
        try:
            self.file: BufferedReader = open(path, "rb")  # noqa: SIM115
            self._stamp = self._stat()
        except OSError as error:
            raise unreadable(path, error) from error
        self._lock = threading.RLock()  # a collector may end a reading while its thread has it
        self._reading = 0
        self._closed = False
        self._spare: np.ndarray | None = None

    @property
    def method(self) -> str:
        """``mmap`` or ``pread``."""
        return "pread" if self._copy is None else "mmap"

    @property
    def closed(self) -> bool:
        """Whether `close` was called: nothing more can be read."""
        return self._closed

    @property
    def modified_ns(self) -> int:
        """When the file was last changed, as of its opening."""
        return self._stamp[1]

    def read(self, start: int, end: int, into: np.ndarray | None = None) -> AbstractContextManager[np.ndarray]:
        """The bytes `start`…`end` as a uint8 array, valid until the context ends (its memory is then used again).

        `into` (flat uint8) is read into where it is large enough: the bytes are then the caller's for as long as it is,
        and may be on their way when this returns. So the context is to be entered, once, in any case.

        Raises `ShardChanged` if the file isn't what it was when it was opened, `SourceError` if it can't be read.
        """
        if into is None or len(into) < end - start:
            return self._read_aside(start, end)
        return _Reading(self, start, into[: end - start])

    @contextmanager
    def _read_aside(self, start: int, end: int) -> Iterator[np.ndarray]:
        """Into memory of this reader's."""
        with self._lock:
            buffer = self._take(end - start)
        try:
            with self.read(start, end, buffer) as data:
                yield data
        finally:
            with self._lock:
                if not self._closed and (self._spare is None or len(self._spare) < len(buffer)):
                    self._spare = buffer

    def close(self) -> None:
        """Let go of the file (once no thread reads it) and of the spare buffer. Arrays in use stay valid."""
        with self._lock:
            self._closed = True
            self._spare = None
            self._close_if_idle()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _close_if_idle(self) -> None:
        # A descriptor that is closed under a reading thread may be another file's by then.
        if self._closed and not self._reading:
            self.file.close()

    def _take(self, nbytes: int) -> np.ndarray:
        """The spare buffer if it fits; one that is far too large is dropped, so that its memory is free again."""
        spare, self._spare = self._spare, None
        if spare is not None and nbytes <= len(spare) <= max(2 * nbytes, CHUNK_BYTES):
            return spare
        del spare
        return np.empty(nbytes, np.uint8)

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_size, status.st_mtime_ns

    def _check(self) -> None:
        size, _ = now = self._stat()
        if now != self._stamp:
            before = self._stamp[0]
            what = f"from {before} to {size} bytes" if size != before else "in place"
            raise ShardChanged(f"{self.path} changed {what} while it was read: run again once it is complete")

    def _read_mapped(self, data: np.ndarray, start: int, copy: _Copy) -> int:
        """Copy `data` from a mapping; returns how many bytes could be had (`_read_plain` finds out why not all)."""
        before = start % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(self.file.fileno(), before + len(data), access=mmap.ACCESS_READ, offset=start - before)
        except ValueError:  # mmap's way to say that the file ends before the range does
            return 0
        except OSError as error:
            raise self._refused(error) from error
        with mapping:
            mapping.madvise(mmap.MADV_SEQUENTIAL)
            view = np.frombuffer(mapping, np.uint8)
            source, target = view.ctypes.data + before, data.ctypes.data
            del view  # or the mapping can't be closed; the address stays good until it is
            done = 0
            while done < len(data):
                copied = copy(target + done, source + done, min(CHUNK_BYTES, len(data) - done))
                if copied < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
                    raise self._refused(OSError(ctypes.get_errno(), "process_vm_readv is not permitted"))
                if copied <= 0:
                    break
                page = (before + done) // mmap.PAGESIZE * mmap.PAGESIZE
                done += copied
                mapping.madvise(mmap.MADV_DONTNEED, page, before + done - page)
        return done

    def _refused(self, error: OSError) -> SourceError:
        why = error.strerror or str(error)
        return SourceError(f"{self.path} can't be memory-mapped ({why}): use --io auto or --io pread")

    def _read_plain(self, data: np.ndarray, start: int, done: int) -> None:
        """Read `data` from its byte `done` on; a long range by several threads, which is faster from any good disk."""
        for first, end in aio.unread(self.file.fileno(), data[done:], start + done):
            self._read_span(data, start, done + first, done + end)

    def _read_span(self, data: np.ndarray, start: int, at: int, end: int) -> None:
        target = data.data
        while at < end:
            try:
                count = self._read_at(target[at : min(at + CHUNK_BYTES, end)], start + at)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not count:
                self._check()
                raise ShardChanged(f"{self.path} ends at byte {start + at}, within a tensor: download it again")
            at += count

    def _read_at(self, target: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.file.fileno(), [target], offset)
        with self._lock:  # Windows: the position is the file's own
            self.file.seek(offset)
            return self.file.readinto(target)


class _Reading:
    """A range of a file on its way into memory; while it is, the file stays open."""

    def __init__(self, reader: Reader, start: int, data: np.ndarray) -> None:
        self._reader, self._start, self._data = reader, start, data
        self._open = False
        with reader._lock:
            if reader._closed:
                raise ValueError(f"{reader.path} is closed")
            reader._reading += 1
            self._open = True
        try:
            reader._check()
            self._begun = aio.begin(reader.file.fileno(), data, start) if reader._copy is None else None
            if self._begun is None:
                done = reader._read_mapped(data, start, reader._copy) if reader._copy and len(data) else 0
                reader._read_plain(data, start, done)
        except BaseException:
            aio.settle(data)
            self._end()
            raise

    def __enter__(self) -> np.ndarray:
        try:
            for first, end in self._begun.unread() if self._begun else ():
                self._reader._read_span(self._data, self._start, first, end)
            self._reader._check()
        except BaseException:
            aio.settle(self._data)
            raise
        finally:
            self._end()
        return self._data

    def _end(self) -> None:
        with self._reader._lock:
            self._reader._reading -= self._open
            self._open = False
            self._reader._close_if_idle()

    def __del__(self) -> None:
        if self._open:  # there was no memory to enter it, or Ctrl-C came before
            aio.settle(self._data)
            self._end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


def unreadable(path: Path, error: OSError) -> SourceError:
    """The error of our own for an `OSError` on `path`."""
    kinds = {errno.ENOENT: NotFound, errno.EACCES: AccessDenied, errno.EPERM: AccessDenied}
    return kinds.get(error.errno or 0, SourceError)(f"{path} can't be read: {error.strerror or error}")


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _process_vm_readv() -> _Copy | None:
    """``copy(target, source, nbytes)`` between addresses of this process; None where the system has no such call.

    It returns the bytes copied, or -1 with `ctypes.get_errno()`; a source page that isn't there is EFAULT, not SIGBUS.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    one = ctypes.c_ulong(1)
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t

    def copy(target: int, source: int, nbytes: int) -> int:
        to, of = _IoVec(target, nbytes), _IoVec(source, nbytes)
        return cast(int, call(os.getpid(), ctypes.byref(to), one, ctypes.byref(of), one, 0))

    return copy
