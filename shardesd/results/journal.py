"""What an unfinished scan has done so far: an append-only file, a line per finished row.

The first line holds the fingerprint, each further one a row's fields and its λ (base64 of little-endian float64).
Every line begins with a CRC-32 of the rest of it. A line that is torn or damaged is as if it had never been written.

A row is handed to the system before `append` returns, so a killed process loses nothing. The disk is made to sync at
most 20 times a second: a power cut may lose the rows of the last burst that came faster than that.
"""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardesd.errors import ResultsError
from shardesd.records import Row
from shardesd.results.files import named_errors, sync_folder
from shardesd.results.tables import row_values

SYNC_INTERVAL = 0.05
"""Seconds between two syncs of the disk, at the least."""
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
_EIGS = b',"eigs":"'  # a line's last value
_PREFIX = len('{"crc":"00000000",')


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row's line lies in the file, and how many λ it holds (None: the row has no spectrum)."""

    offset: int
    length: int
    eigs: int | None


class Journal:
    """An open journal. `rows` is what it holds, by longname, and `tensors` the names of their tensors, as far as they
    were told; the λ stay on disk."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.fingerprint: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        self.tensors: dict[str, str] = {}
        self._places: dict[str, _Place] = {}
        self._handle = handle
        self._end = 0
        self._synced = time.monotonic()

    @classmethod
    def create(cls, path: Path, fingerprint: dict[str, Any]) -> Journal:
        """A new journal in place of any other. `fingerprint` is plain JSON."""
        with named_errors(path):
            handle = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666
            )
        journal = cls(path, handle)
        journal.fingerprint = fingerprint
        try:
            journal._write(_line({"fingerprint": fingerprint}))
            with named_errors(path):
                os.fsync(handle)
                sync_folder(path.parent)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, path: Path) -> Journal | None:
        """The journal that an earlier run left, cut off after its last good line; None where there is none to use."""
        with named_errors(path):
            try:
                handle = os.open(path, _FLAGS)
            except FileNotFoundError:
                return None
            journal = cls(path, handle)
            usable = False
            try:
                usable = journal._recover()
            finally:
                if not usable:
                    journal.close()
        return journal if usable else None

    def append(self, row: Row, eigs: np.ndarray | None, tensor: str | None = None) -> None:
        """Adds a row, its λ and the name of the tensor that it is about, in place of another row with its longname; all
        survive the death of this process from the moment it returns.

        Raises `NoSpace` or `ResultsError`; the journal is then as it was before.
        """
        values = row_values(row)
        content: dict[str, Any] = {"row": values}
        if tensor is not None:
            content["tensor"] = tensor
        if eigs is not None:
            content["eigs"] = base64.b64encode(np.ascontiguousarray(eigs, dtype="<f8").tobytes()).decode()
        line = _line(content)
        offset = self._end
        self._write(line)
        now = time.monotonic()
        if now - self._synced >= SYNC_INTERVAL:
            with named_errors(self.path):
                os.fsync(self._handle)
            self._synced = now
        self._remember(Row(**values), tensor, _Place(offset, len(line), None if eigs is None else eigs.size))

    def lengths(self) -> dict[str, int]:
        """Longname → number of λ, for the rows that have a spectrum."""
        return {name: place.eigs for name, place in self._places.items() if place.eigs is not None}

    def eigs(self, longname: str) -> np.ndarray:
        """The λ of one row, read back from the file."""
        place = self._places[longname]
        with named_errors(self.path):
            body = _body(_read_at(self._handle, place.length, place.offset))
        if body is None:
            raise ResultsError(f"the row of {longname} can't be read back from {self.path}; run the same command again")
        return _decoded(body[body.rindex(_EIGS) + len(_EIGS) : -len(b'"}')])

    def close(self) -> None:
        if self._handle >= 0:
            with suppress(OSError):
                os.fsync(self._handle)
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Closes and deletes it."""
        self.close()
        with named_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        with named_errors(self.path):
            try:
                while view:
                    view = view[os.write(self._handle, view) :]
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._handle, self._end)
                raise
        self._end += len(line)

    def _remember(self, row: Row, tensor: str | None, place: _Place) -> None:
        self.rows[row.longname] = row
        self.tensors.pop(row.longname, None)
        if tensor is not None:
            self.tensors[row.longname] = tensor
        self._places[row.longname] = place

    def _recover(self) -> bool:
        """Reads every good line; False where the first one isn't. Damaged lines between good ones are passed over."""
        offset = 0
        with os.fdopen(os.dup(self._handle), "rb") as file:
            for line in file:
                content = _content(line)
                if offset == 0:
                    if content is None or not isinstance(content.get("fingerprint"), dict):
                        return False
                    self.fingerprint = content["fingerprint"]
                elif content is not None and "row" in content:
                    try:
                        row = Row(**content["row"])
                    except TypeError:  # fields of another version
                        content = None
                    else:
                        count = None if "eigs" not in content else _decoded(content["eigs"]).size
                        self._remember(row, content.get("tensor"), _Place(offset, len(line), count))
                offset += len(line)
                if content is not None:
                    self._end = offset
        if self._end < offset:
            os.ftruncate(self._handle, self._end)
        return self._end > 0


def _line(content: dict[str, Any]) -> bytes:
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:]
    return b'{"crc":"%08x",' % zlib.crc32(body) + body + b"\n"


def _body(line: bytes) -> bytes | None:
    """What its checksum is of; None where the line is torn or damaged."""
    head, body = line[:_PREFIX], line[_PREFIX:-1]
    return body if line.endswith(b"\n") and head == b'{"crc":"%08x",' % zlib.crc32(body) else None


def _content(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is torn or damaged."""
    body = _body(line)
    return None if body is None else dict(json.loads(b"{" + body))


def _read_at(handle: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, length, offset)
    os.lseek(handle, offset, os.SEEK_SET)  # Windows
    return os.read(handle, length)


def _decoded(text: str | bytes) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<f8")
