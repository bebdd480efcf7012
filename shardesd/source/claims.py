"""Which shards of a place were downloaded only to be removed again: noted on disk before the download begins.

A run that is killed leaves its notes, so that the next one knows what of the Hub cache is its predecessor's and what
the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from shardesd.errors import ResultsError

_OPEN: WeakValueDictionary[str, Claims] = WeakValueDictionary()
"""Of the scans that this process has not ended."""


class Claims:
    """Notes under `folder` about the files of one place (a source's location, in one Hub cache)."""

    def __init__(self, folder: Path, location: str, cache: str) -> None:
        place = hashlib.sha256(f"{cache}\n{location}".encode()).hexdigest()[:32]
        self._folder = folder / "downloads" / place
        self._scan = uuid.uuid4().hex
        _OPEN[self._scan] = self

    def make(self, name: str) -> None:
        """Notes that this scan is about to download a file. Raises `ResultsError` where it can't be noted."""
        note = {"name": name, "host": platform.node(), "scan": self._scan, **_process(os.getpid())}
        path = self._path(name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".tmp")
            beside.write_text(json.dumps(note), "utf-8")
            os.replace(beside, path)
        except OSError as error:
            raise ResultsError(
                f"can't note in {self._folder} what --evict is to remove: {error.strerror or error}; choose another "
                "--cache-dir"
            ) from error

    def forget(self, name: str) -> None:
        """The file has been removed: neither this scan nor a dead one claims it any more. Another may, that goes on."""
        for path in (self._path(name), *(path for path, claimed in self._orphans() if claimed == name)):
            with suppress(OSError):
                path.unlink()

    def orphans(self) -> list[str]:
        """Names of files whose claims are left of scans that this process has ended, or of dead processes here."""
        return sorted({name for _, name in self._orphans()})

    def _orphans(self) -> Iterator[tuple[Path, str]]:
        for path in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            try:
                note = json.loads(path.read_text("utf-8"))
                name, host = str(note["name"]), note["host"]
                alive = {key: note[key] for key in ("pid", "since")} == _process(int(note["pid"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            ended = note["pid"] == os.getpid() and note.get("scan") not in _OPEN
            if host == platform.node() and (not alive or ended):
                yield path, name

    def close(self) -> None:
        """This scan has ended: what it has not forgotten are orphans."""
        _OPEN.pop(self._scan, None)

    def _path(self, name: str) -> Path:
        """One for each scan: several may claim a file, and not all of them may live to remove it."""
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}-{self._scan}.json"


def _process(pid: int) -> dict[str, float | None]:
    """A process's number, and when it began (numbers are used again); None where there is none."""
    import psutil

    try:
        return {"pid": pid, "since": psutil.Process(pid).create_time()}
    except psutil.Error:
        return {"pid": pid, "since": None}
