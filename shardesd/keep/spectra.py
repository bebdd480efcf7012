"""Spectra in the folder, and which bytes of which files they were computed from."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shardesd.cachefolder import CacheFolder, Contents, users_folder
from shardesd.errors import ResultsError
from shardesd.keep.keys import place_key
from shardesd.records import Spectrum


class Keep:
    """Spectra by key. A folder that can't be written costs a word to `warn`, once, and nothing else.

    `folder` None is the user's own; `limit` bytes are the most that it takes. What is put is written by a thread of its
    own, many at once, so that no device waits for a disk: `flush` waits for it.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, limit: int, warn: Callable[[str], None] = lambda words: None
    ) -> None:
        self.folder = users_folder(folder)
        self._files = CacheFolder(self.folder / "spectra", limit)
        self._warn = warn
        self._writes = True
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[dict[str, Any], bytes]] = {}
        self._leaving: dict[str, tuple[dict[str, Any], bytes]] = {}
        """What is being written."""
        self._writing = False

    def content(self, sha256: str | None, start: int, end: int, delta: str = "") -> str | None:
        """The digest of what bytes `start`…`end` of the file with this sha256 become by `delta`, if it was ever taken.

        `delta` is a digest of what an adapter does to them; empty where they are taken as they are.
        """
        found = self._find(place_key(sha256, start, end, delta)) if sha256 else None
        return str(found[0]["content"]) if found else None

    def remember(self, sha256: str | None, start: int, end: int, delta: str, content: str) -> None:
        """Notes what `content` will answer; without a sha256 there is nothing to note it by."""
        if sha256 and self._find(key := place_key(sha256, start, end, delta)) is None:
            self._put(key, {"content": content})

    def get(self, key: str) -> Spectrum | None:
        """The spectrum that was put under `key` (`keys.spectrum_key`)."""
        found = self._find(key)
        if found is None:
            return None
        meta, data = found
        return Spectrum(
            eigs=np.frombuffer(data, dtype="<f8"),
            solver=meta["solver"],
            precision=meta["precision"],
            device=meta["device"],
            seconds=meta["seconds"],
        )

    def put(self, key: str, spectrum: Spectrum) -> None:
        """Keeps a spectrum, in place of any other under this key."""
        meta = {name: getattr(spectrum, name) for name in ("solver", "precision", "device", "seconds")}
        self._put(key, meta, np.ascontiguousarray(spectrum.eigs, dtype="<f8").tobytes())

    def contents(self) -> Contents:
        """How much there is."""
        return self._files.contents()

    def prune(self, limit: int | None = None) -> int:
        """Removes the least recently used entries beyond `limit` bytes; how many. Raises `ResultsError`."""
        try:
            return self._files.prune(limit)
        except OSError as error:
            raise ResultsError(f"the cache {self.folder} can't be written: {error.strerror or error}") from error

    def flush(self) -> None:
        """Returns once everything that was put is written."""
        if sys.is_finalizing():  # no thread runs any more
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)

    def _find(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        with self._changed:
            found = self._waiting.get(key) or self._leaving.get(key)
        return found or self._files.get(key)

    def _put(self, key: str, meta: dict[str, Any], data: bytes = b"") -> None:
        with self._changed:
            if not self._writes:
                return
            self._waiting[key] = meta, data
            if self._writing:
                return
            self._writing = True
        try:
            # No daemon: at exit the interpreter waits until all is written, which is soon.
            threading.Thread(target=self._write, name="shardesd-keep", daemon=False).start()
        except RuntimeError:  # the interpreter is about to exit
            self._stop()

    def _write(self) -> None:
        """Until nothing waits."""
        try:
            while True:
                with self._changed:
                    self._leaving, self._waiting = self._waiting, {}
                    if not self._leaving:
                        self._writing = False
                        self._changed.notify_all()
                        return
                self._files.put_all((key, *entry) for key, entry in self._leaving.items())
        except Exception as error:  # whatever it is, nobody may wait for this thread
            self._stop()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._warn(f"spectra are not kept: {self.folder} can't be written ({why})")

    def _stop(self) -> None:
        with self._changed:
            self._writes = self._writing = False
            self._waiting, self._leaving = {}, {}
            self._changed.notify_all()
