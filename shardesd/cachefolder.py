"""A bounded folder of small checksummed files that any number of processes use at once.

    FOLDER/ab/ab….kept      digest · length of the JSON · JSON · data
    FOLDER/size             bytes of all of them, never less than the truth
    FOLDER/lock

Files appear whole (written beside, renamed), so that reading takes no lock. Writing does: the bytes are added to `size`
before the file appears, so that a process killed in between leaves the sum too large, never too small, and the bound
holds at every moment. What has been used least recently goes first; a file's time is that of its last use. Whatever is
torn or damaged, by a crash or a bad disk, fails its digest and is as if it had never been written.

Files, rather than one database: the folder may lie on a network file system, where SQLite's locks can't be trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

_SUFFIX = ".kept"
_NAME = re.compile(r"[0-9a-f]{64}\.kept")
_DIGEST_BYTES = 20
_LOCK_SECONDS = 30.0
_FRESH_SECONDS = 60.0
"""A use is not noted when the last one was noted so shortly before."""
_AFTER_PRUNE = 0.9
"""Of the bound, what is left when it was reached, so that not every file that is added makes room for itself."""


def users_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """The folder that the user named, else shardesd's among the user's caches."""
    if named is not None:
        return Path(named).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("shardesd", appauthor=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a folder holds."""

    entries: int
    nbytes: int
    oldest: float | None = None
    """When the entry that will go next was last used, in seconds since 1970."""


class CacheFolder:
    """The folder. `limit` bytes are the most that it takes. For any number of threads."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._thread_lock = threading.Lock()
        self._lock = filelock.FileLock(str(self.folder / "lock"), timeout=_LOCK_SECONDS, poll_interval=0.005)

    def get(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """What was put under `key`; None where there is nothing, or nothing sound (which is then removed)."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        found = _decoded(key, content)
        if found is None:
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # a folder that can only be read is of use all the same
            if time.time() - path.stat().st_mtime > _FRESH_SECONDS:
                os.utime(path)
        return found

    def put(self, key: str, meta: dict[str, Any], data: bytes = b"") -> None:
        """Keeps `data`, with plain JSON beside it. Raises OSError where the folder can't be written."""
        self.put_all([(key, meta, data)])

    def put_all(self, entries: Iterable[tuple[str, dict[str, Any], bytes]]) -> None:
        """As `put` of each, with one look at the folder's size."""
        contents = [(self._path(key), _encoded(key, meta, data)) for key, meta, data in entries]
        while contents:
            size = len(contents[0][1])
            count = 1
            while count < len(contents) and size + len(contents[count][1]) <= self.limit * (1 - _AFTER_PRUNE):
                size += len(contents[count][1])
                count += 1
            if size <= self.limit:
                self._add(contents[:count], size)
            contents = contents[count:]

    def _add(self, contents: list[tuple[Path, bytes]], size: int) -> None:
        with self._locked():
            total = self._size() + size
            if total > self.limit:
                total = self._shrink(max(0, int(self.limit * _AFTER_PRUNE) - size)) + size
            self._write_size(total)
            for path, content in contents:
                beside = path.with_suffix(".tmp")
                try:
                    try:
                        beside.write_bytes(content)
                    except FileNotFoundError:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        beside.write_bytes(content)
                    os.replace(beside, path)
                except BaseException:
                    with suppress(OSError):
                        beside.unlink(missing_ok=True)
                    raise

    def prune(self, limit: int | None = None) -> int:
        """Removes what was used least recently until `limit` bytes (or the folder's own bound) are left; how many."""
        if not self.folder.is_dir():
            return 0
        with self._locked():
            before = len(list(self._entries()))
            self._write_size(self._shrink(self.limit if limit is None else limit))
            return before - len(list(self._entries()))

    def contents(self) -> Contents:
        """Counted anew from the files."""
        found = list(self._entries())
        return Contents(
            entries=len(found),
            nbytes=sum(size for _, size, _ in found),
            oldest=min((used for used, _, _ in found), default=None),
        )

    def _shrink(self, limit: int) -> int:
        """Under the lock: removes the least recently used files beyond `limit` bytes; how many bytes are left."""
        found = sorted(self._entries(leftovers=True))
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if path.suffix == _SUFFIX and total <= limit:
                break
            # Nobody writes while the lock is held: a file that is unfinished now is a dead process's.
            path.unlink(missing_ok=True)
            total -= size
        return total

    def _entries(self, *, leftovers: bool = False) -> Iterator[tuple[float, int, Path]]:
        """Last use, bytes and path of every file; files that a dead process left unfinished come as never used."""
        for letters in "0123456789abcdef":
            for more in "0123456789abcdef":
                try:
                    entries = list(os.scandir(self.folder / (letters + more)))
                except OSError:
                    continue
                for entry in entries:
                    kept = bool(_NAME.fullmatch(entry.name))
                    if not kept and not (leftovers and entry.name.endswith(".tmp")):
                        continue
                    with suppress(OSError):
                        status = entry.stat()
                        yield (status.st_mtime if kept else 0.0), status.st_size, Path(entry.path)

    def _size(self) -> int:
        try:
            return int((self.folder / "size").read_text("ascii"))
        except (OSError, ValueError):
            return sum(size for _, size, _ in self._entries(leftovers=True))

    def _write_size(self, total: int) -> None:
        # One short write at the beginning: it is there or it isn't, even for a process that is killed.
        handle = os.open(self.folder / "size", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.write(handle, b"%020d" % max(0, total))
        finally:
            os.close(handle)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._thread_lock:
            try:
                self._lock.acquire()
            except (filelock.Timeout, NotImplementedError) as error:
                raise OSError(f"the lock {self._lock.lock_file} can't be had: {error}") from error
            try:
                yield
            finally:
                self._lock.release()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / (key + _SUFFIX)


def _encoded(key: str, meta: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(meta, separators=(",", ":")).encode()
    body = len(text).to_bytes(4, "little") + text + data
    return _sum(key, body) + body


def _decoded(key: str, content: bytes) -> tuple[dict[str, Any], bytes] | None:
    body = content[_DIGEST_BYTES:]
    if len(body) < 4 or _sum(key, body) != content[:_DIGEST_BYTES]:
        return None
    end = 4 + int.from_bytes(body[:4], "little")
    meta: dict[str, Any] = json.loads(body[4:end])
    return meta, body[end:]


def _sum(key: str, body: bytes) -> bytes:
    """Covers the key too: a file under another's name is no more sound than a torn one."""
    return hashlib.blake2b(body, key=bytes.fromhex(key), digest_size=_DIGEST_BYTES).digest()
