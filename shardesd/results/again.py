"""A finished model's files, opened to write its table anew from its own λ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from shardesd.errors import ResultsError
from shardesd.records import Row
from shardesd.results.files import Lock, atomic, named_errors
from shardesd.results.load import tables_of
from shardesd.results.stored import StoredSpectra, read_whole
from shardesd.results.summary import summarise
from shardesd.results.tables import table_bytes, to_frame, to_rows


class StoredModel:
    """One finished model, locked against every other writer while the ``with`` block lasts. For one thread.

    Raises `ResultsError` where the model has no table, spectra or provenance that can be read, or is being written.
    """

    def __init__(self, out: Path, stem: str) -> None:
        self._tables = tables_of(out, stem)
        self._spectra_path = out / "spectra" / f"{stem}.safetensors"
        self._run_path = out / "runs" / f"{stem}.json"
        self._lock = Lock(out / "partial" / f"{stem}.lock")
        self._stem = stem
        self.rows: list[Row] = []
        """Of the table, in its order."""

    def __enter__(self) -> StoredModel:
        with named_errors(self._lock.path):
            self._lock.path.parent.mkdir(exist_ok=True)
        self._lock.acquire(0, lambda holder: f"{holder} is writing {self._stem}; wait until it is done")
        try:
            if not self._tables:
                raise ResultsError(
                    f"{self._stem} has no table in {self._lock.path.parent.parent}; scan the model again"
                )
            self.rows = to_rows(read_whole(self._tables[0]))
            self._run = self._read_run()
            self._spectra: Mapping[str, np.ndarray] = {}
            if self._spectra_path.exists():
                self._spectra = StoredSpectra(self._spectra_path)
            lacking = [row.longname for row in self.rows if row.status == "ok" and row.longname not in self._spectra]
            if lacking:
                raise ResultsError(f"{self._spectra_path} has no λ of {lacking[0]}; scan the model again")
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @property
    def options(self) -> Mapping[str, Any]:
        """What it was scanned with, or made anew with since."""
        known: Mapping[str, Any] = self._run["fingerprint"]["options"]
        return known

    def eigs(self, longname: str) -> np.ndarray | None:
        """The λ of a row, ascending; None where it has none."""
        return self._spectra.get(longname)

    def replace(self, rows: Sequence[Row], options: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the table of `rows`, in its format, and the provenance with `options` changed; the summary's row.

        A scan with these options then finds the model done. Raises `NoSpace` or `ResultsError`.
        """
        run = {**self._run, "options": {**self._run.get("options", {}), **options}}
        fingerprint = run["fingerprint"]
        run["fingerprint"] = {**fingerprint, "options": {**fingerprint["options"], **options}}
        run["refitted_at"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        # Between the two writes, provenance would describe a table that is no longer its own.
        with named_errors(self._run_path):
            self._run_path.unlink()
        layers = to_frame(rows)
        for path in self._tables:
            with atomic(path) as file:
                file.write(table_bytes(layers, path.suffix[1:]))
        with atomic(self._run_path) as file:
            file.write(json.dumps(run, indent=1, ensure_ascii=True, default=str).encode() + b"\n")
        return summarise(layers, str(run["model_id"]), run["revision"])

    def _release(self) -> None:
        self._lock.release()
        with suppress(OSError):  # another process is at work there, or it can't be removed
            self._lock.path.parent.rmdir()

    def _read_run(self) -> dict[str, Any]:
        try:
            run = json.loads(self._run_path.read_bytes())
            if isinstance(run["fingerprint"]["options"], dict) and {"model_id", "revision"} <= run.keys():
                return dict(run)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise ResultsError(f"{self._run_path} doesn't say how {self._stem} was made; scan the model again")
