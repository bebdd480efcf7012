"""Files that appear whole or not at all, locks, and the names of one model's files.

Foreign `OSError`s become `NoSpace` or `ResultsError` here, with the folder in the message.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import filelock
import psutil

from shardesd.errors import Held, NoSpace, ResultsError

MAX_NAME_BYTES = 200
_KEPT = frozenset("._-+=,")


def file_stem(model_id: str, revision: str | None = None) -> str:
    """The name, without extension, of a model's files: ``org--name``, or ``org--name@revision`` when one was asked for.

    Letters, digits and ``. _ - + = ,`` stay; a slash in the model's id becomes ``--``. Every other character (slashes
    and ``@`` in a revision among them), a dot or dash at the beginning, and a dash that could be taken for a slash
    become ``%XX``, so that two models never share a name. A name over 200 bytes is cut and ends in ``~`` and a digest
    of the whole one.
    """
    # A dash beside another dash or a slash would make "a--b", "a-/b" and "a/-b" alike.
    text = re.sub(r"(?<=[-/])-|-(?=/)", "\0", model_id)
    stem = "--".join(_escape(part) for part in text.split("/")).replace("%00", "%2D")
    stem = (f"%{ord(stem[0]):02X}{stem[1:]}" if stem[0] in ".-" else stem) if stem else "unnamed"
    if revision:
        stem += "@" + _escape(revision)
    encoded = stem.encode()
    if len(encoded) <= MAX_NAME_BYTES:
        return stem
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return encoded[: MAX_NAME_BYTES - 17].decode(errors="ignore") + "~" + digest


def _escape(text: str) -> str:
    def one(char: str) -> str:
        # A letter that has another normal form might come back changed from the file system.
        letter = char.isalnum() and unicodedata.normalize("NFC", char) == char == unicodedata.normalize("NFD", char)
        if letter or char in _KEPT:
            return char
        return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))

    return "".join(map(one, text))


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into `NoSpace` or `ResultsError`, one line that names `path`'s folder."""
    try:
        yield
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> NoSpace | ResultsError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"no space left in {path.parent} while {path.name} was written; free some and run the same command again"
            " (finished rows are kept)"
        )
    reason = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        reason = next((f"{p} is not a folder" for p in (path.parent, *path.parent.parents) if p.is_file()), reason)
    elif error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        return ResultsError(f"can't write {path}: {reason}; move it away, or choose another --out")
    return ResultsError(f"can't write into {path.parent}: {reason}; choose another --out")


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends: written beside, synced, renamed, the folder synced.

    When the block raises, `path` is as it was and nothing is left beside it. Raises `NoSpace` or `ResultsError`.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_errors(path):
        try:
            beside.unlink(missing_ok=True)
            with open(beside, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def make_folders(folders: Iterable[Path]) -> None:
    """Makes each folder and writes a first byte into it, so that a folder that can't be written is found at once."""
    for folder in folders:
        probe = folder / f".writable.{os.getpid()}.tmp"
        with named_errors(probe):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(b"\n")
            finally:
                with suppress(OSError):
                    probe.unlink(missing_ok=True)


def remove_stale_locks(folder: Path) -> None:
    """Removes the locks in `folder` that processes of this machine left which are no more."""
    for holder in folder.glob("*.pid"):
        lock = Lock(holder.with_suffix(".lock"))
        if lock.is_stale():
            with suppress(ResultsError):
                lock.acquire(0, lambda holder: holder)
                lock.release()


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Removes what a killed process left beside these files. Only for whoever holds the lock on them."""
    for path in paths:
        pattern = re.compile(rf"\.{re.escape(path.name)}\.\d+\.tmp")
        with named_errors(path):
            for entry in os.scandir(path.parent):
                if pattern.fullmatch(entry.name):
                    Path(entry.path).unlink(missing_ok=True)


class Lock:
    """A lock on a file's name, for one process and one holder at a time; the system lets go of a dead process's.

    The holder's pid and host lie in a file beside it, for the message to others. Both files go when it is released:
    filelock (3.21 and later) sees that the file it locked has been removed, and tries again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._holder = path.with_suffix(".pid")
        self._lock = filelock.FileLock(str(path), thread_local=False)

    def acquire(self, timeout: float, held: Callable[[str], str]) -> None:
        """Waits `timeout` s; raises `Held` with what `held` makes of its holder (``process 7 on host``)."""
        with named_errors(self.path):
            try:
                self._wait(timeout)
            except filelock.Timeout:
                raise Held(held(self._read_holder())) from None
            with suppress(OSError):  # a help for others, not a condition
                self._holder.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")

    @property
    def is_held(self) -> bool:
        return bool(self._lock.is_locked)

    def release(self) -> None:
        if not self.is_held:
            return
        for path in (self._holder, self.path):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._lock.release()

    def is_stale(self) -> bool:
        """Whether the holder that it names is a process of this machine that is no more."""
        match = re.fullmatch(r"process (\d+) on (.*)", self._read_holder())
        return match is not None and match[2] == platform.node() and not psutil.pid_exists(int(match[1]))

    def _wait(self, timeout: float) -> None:
        for attempt in range(10):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._lock.acquire(timeout=timeout)
                return
            except FileNotFoundError:  # another process, which needed the folder no more, has just removed it
                if attempt == 9:
                    raise

    def _read_holder(self) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return self._holder.read_text(encoding="utf-8").strip() or "another process"
        return "another process"
