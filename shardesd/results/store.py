"""One model's files under an output folder, from the first row to the finished tables, and the same in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from shardesd.errors import MadeOtherwise, ResultsError
from shardesd.options import FORMATS
from shardesd.records import Row, StatsRow, is_of, may_pass
from shardesd.results.files import (
    Lock,
    atomic,
    file_stem,
    make_folders,
    named_errors,
    remove_leftovers,
    remove_stale_locks,
)
from shardesd.results.journal import Journal
from shardesd.results.result import Result, make_result, shown
from shardesd.results.statistics import read_stats, stats_frame, stats_path, write_stats
from shardesd.results.stored import StoredSpectra, all_rows, read_whole, write_spectra
from shardesd.results.summary import read_summary, update_summary
from shardesd.results.tables import plain_value, row_values, table_bytes, to_rows

Order = Callable[[str], Any]
Amend = Callable[[Row], Row]
_PATIENCE = 0.2
"""Seconds to wait for a lock."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What `begin` found."""

    state: Literal["new", "resumed", "done"]
    rows: tuple[Row, ...] = ()
    """Already there, skipped ones too: in their final order when done, in the order of computation when resumed."""
    table: Path | None = None
    """When done: the table that the rows were taken from; in another format than the one asked for, that one was made
    from it."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """When resumed: longname → tensor, as far as that is known."""


class ModelStore:
    """One model's files under one output folder.

    `begin`, `append` for every row, `finish`, `result`; `close` (or leaving a ``with`` block) at any time keeps the
    finished rows for the next run. While it is open no other process can write this model into this folder. For one
    thread.
    """

    def __init__(
        self, out: str | Path, model_id: str, revision: str | None, format: str = "csv", *, show_skipped: bool = False
    ) -> None:
        self.out, self.model_id, self.revision = Path(out), model_id, revision
        self.format, self.show_skipped = format, show_skipped
        self.stem = file_stem(model_id, revision)
        self.table_path = self._table(format)
        self.spectra_path = self.out / "spectra" / f"{self.stem}.safetensors"
        self.run_path = self.out / "runs" / f"{self.stem}.json"
        self.journal_path = self.out / "partial" / f"{self.stem}.jsonl"
        self.summary_path = self.out / "summary.csv"
        self._lock = Lock(self.out / "partial" / f"{self.stem}.lock")
        self._journal: Journal | None = None
        self._rows: list[Row] | None = None
        self._result: Result | None = None
        """Of `_rows`."""
        self._stats: pl.DataFrame | None = None
        self._unfinished: tuple[Row, ...] = ()

    def __enter__(self) -> ModelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, fingerprint: Mapping[str, Any], *, overwrite: bool) -> Begun:
        """Finds out what is there already, and makes ready for `append`.

        `fingerprint` says, in plain JSON, what the numbers follow from: ``options`` (a dict), ``shardesd`` (the
        version), and under any other keys which weights they are. A finished table or an unfinished scan with an equal
        one is taken up ("done", "resumed"); one with another is refused unless `overwrite`, which computes everything
        anew and leaves the old table in place until the new one replaces it. A table that is done in another format
        is written in this one too. Failed rows whose reason may be gone (`records.may_pass`) are as if they were not
        there; a table with such rows is no longer done.

        Raises `ResultsError` (not writable, made otherwise, or being written by another process) and `NoSpace`.
        """
        plain: dict[str, Any] = json.loads(json.dumps(fingerprint))
        folders = [self.out, *(path.parent for path in (self.table_path, self.spectra_path, self.run_path))]
        make_folders(folders)
        try:
            # Not 0: whoever removes stale locks holds them for a moment.
            self._lock.acquire(
                _PATIENCE,
                lambda holder: f"{holder} is scanning {self.model_id} into {self.out}; wait, or choose another --out",
            )
            remove_stale_locks(self.journal_path.parent)
            tables = [self._table(format) for format in FORMATS]
            remove_leftovers([*tables, self.spectra_path, self.run_path])
            read_summary(self.out)  # to fail now rather than when all is computed
            begun = self._look(plain, overwrite)
            if begun is None:
                self._journal = Journal.create(self.journal_path, plain)
                begun = Begun("new")
        except BaseException:
            self.close()
            raise
        if begun.state == "done":
            self.close()
        return begun

    def append(self, row: Row, eigs: np.ndarray | None, tensor: str | None = None) -> None:
        """Keeps a finished row and its λ; they survive a kill -9 from the moment this returns. `tensor` is the name of
        the tensor that the row is about.

        Raises `NoSpace` or `ResultsError`; what was there before is unharmed.
        """
        self._open_journal().append(row, eigs, tensor)

    def eigs(self, longname: str) -> np.ndarray | None:
        """The λ of a row that has been appended; None for one that has none."""
        journal = self._open_journal()
        return journal.eigs(longname) if longname in journal.lengths() else None

    def finish(
        self,
        order: Order,
        provenance: Mapping[str, Any],
        amend: Amend = lambda row: row,
        *,
        stats: Iterable[StatsRow] | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> tuple[Path, ...]:
        """Writes spectra, table, statistics, provenance and the summary's row; gives their paths.

        Rows are sorted by ``order(longname)`` and passed through `amend`. With `owners` (longname → tensor) those of
        other longnames or tensors are left out: an interrupted run may not have known yet that names would meet.
        `provenance` is JSON for the run's file; its ``commit`` and ``versions.shardesd`` also go into the spectra's
        metadata. λ pass from the journal to the file one row at a time. When it raises (`NoSpace`, `ResultsError`), the
        rows are kept as before.
        """
        journal = self._open_journal()
        rows = arranged(_owned(journal, owners), order, amend)
        # From here on an old provenance would describe files that are no longer its own.
        with named_errors(self.run_path):
            self.run_path.unlink(missing_ok=True)
        known = journal.lengths()
        lengths = {
            row.longname: known[row.longname] for row in rows if row.longname in known and row.status != "skipped"
        }
        versions = provenance.get("versions") or {}
        metadata = {
            "model_id": self.model_id,
            "revision": self.revision,
            "commit": provenance.get("commit"),
            "shardesd": versions.get("shardesd"),
        }
        write_spectra(
            self.spectra_path, lengths, journal.eigs, {key: str(value) for key, value in metadata.items() if value}
        )
        self._stats = None if stats is None else stats_frame(stats)  # made of λ that lie in the journal
        layers = shown(rows, self.show_skipped)
        self._write_table(layers)
        write_stats(self.out, self.stem, self.format, self._stats)
        for format in FORMATS:
            if format != self.format:
                with named_errors(self._table(format)):
                    self._table(format).unlink(missing_ok=True)
        run = {**provenance, "model_id": self.model_id, "revision": self.revision, "fingerprint": journal.fingerprint}
        run["skipped"] = [
            {"position": i, **{k: v for k, v in row_values(row).items() if v not in (None, "")}}
            for i, row in enumerate(rows)
            if row.status == "skipped"
        ]
        run["finished_at"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._write_run(run)
        self._rows, self._result = rows, self._finished(rows, layers)
        update_summary(self.out, self._result.summary)
        journal.remove()
        self._journal = None
        self.close()
        return (*self._own_files(), self.summary_path)

    def result(self) -> Result:
        """The finished model: after `finish`, or when `begin` found it done.

        Of an unfinished scan that has been closed: the rows so far, without spectra, and the journal as its file.
        """
        if self._rows is None:
            return make_result(
                self.model_id,
                self.revision,
                self._unfinished,
                show_skipped=self.show_skipped,
                spectra={},
                files=(self.journal_path,),
            )
        if self._result is None:
            self._result = self._finished(self._rows)
        return self._result

    def close(self) -> None:
        """Lets go of the files. Rows of an unfinished scan stay for the next run."""
        if self._journal is not None:
            self._unfinished = tuple(self._journal.rows.values())
            if self._journal.rows:
                self._journal.close()
            else:
                self._journal.remove()
            self._journal = None
        if self._lock.is_held:
            self._lock.release()
            with suppress(OSError):  # others' work is in it, or it can't be removed
                self.journal_path.parent.rmdir()

    def _look(self, fingerprint: dict[str, Any], overwrite: bool) -> Begun | None:
        """What of earlier runs can be taken up; None for nothing."""
        if overwrite:
            return None
        table = next((t for t in map(self._table, (self.format, *FORMATS)) if t.exists()), None)
        run = self._provenance()
        if table and run.get("fingerprint") == fingerprint:
            layers = read_whole(table)
            rows = to_rows(layers)
            if not any(map(may_pass, rows)):
                return self._take_done(table, layers, run)
            self._take_apart(rows, run.get("tensors") or {}, fingerprint)
            return self._resumed()
        journal = Journal.open(self.journal_path)
        if journal is not None and journal.fingerprint == fingerprint:
            self._journal = journal
            return self._resumed()
        remedy = "add --overwrite to replace it, or choose another --out"
        if journal is not None:
            journal.close()
        if table:
            why = _difference(run["fingerprint"], fingerprint) if "fingerprint" in run else "without a record of how"
            raise MadeOtherwise(f"{table} was made {why}; {remedy}")
        if journal is not None and journal.rows:
            why = _difference(journal.fingerprint, fingerprint)
            raise MadeOtherwise(f"{self.journal_path} holds an unfinished scan made {why}; {remedy}")
        return None

    def _resumed(self) -> Begun:
        journal = self._open_journal()
        rows = tuple(row for row in journal.rows.values() if not may_pass(row))
        return Begun("resumed", rows, tensors=dict(journal.tensors))

    def _take_apart(self, rows: Iterable[Row], tensors: Mapping[str, str], fingerprint: dict[str, Any]) -> None:
        """Makes an unfinished scan of a finished one, whose files stay until it is finished again."""
        journal = Journal.open(self.journal_path)
        if journal is None or journal.fingerprint != fingerprint:
            if journal is not None:
                journal.close()
            journal = Journal.create(self.journal_path, fingerprint)
        self._journal = journal
        spectra = StoredSpectra(self.spectra_path)
        for row in rows:
            known = journal.rows.get(row.longname)
            if row.status != "skipped" and not may_pass(row) and (known is None or may_pass(known)):
                try:
                    eigs = spectra.get(row.longname)
                except ResultsError:  # they have been taken away, and are computed again
                    continue
                journal.append(row, eigs, tensors.get(row.longname))

    def _take_done(self, table: Path, layers: pl.DataFrame, run: dict[str, Any]) -> Begun:
        rows = all_rows(layers, run)
        wanted = sum(self.show_skipped or row.status != "skipped" for row in rows)
        if table != self.table_path or wanted != layers.height:
            self._write_table(shown(rows, self.show_skipped))
            self._write_run(run)
        self._stats = read_stats(self.out, self.stem)
        if self._stats is not None:
            write_stats(self.out, self.stem, self.format, self._stats)
        leftover = Journal.open(self.journal_path)
        if leftover is not None:
            # Of a run that was killed between its last two steps; another run's unfinished work stays.
            (leftover.remove if leftover.fingerprint == run["fingerprint"] else leftover.close)()
        self._rows = rows
        update_summary(self.out, self.result().summary)
        return Begun("done", tuple(rows), table)

    def _finished(self, rows: list[Row], layers: pl.DataFrame | None = None) -> Result:
        return make_result(
            self.model_id,
            self.revision,
            rows,
            show_skipped=self.show_skipped,
            spectra=StoredSpectra(self.spectra_path) if self.spectra_path.exists() else {},
            stats=self._stats,
            files=(*self._own_files(), self.summary_path),
            layers=layers,
        )

    def _write_table(self, layers: pl.DataFrame) -> None:
        with atomic(self.table_path) as file:
            file.write(table_bytes(layers, self.format))

    def _write_run(self, run: dict[str, Any]) -> None:
        run["files"] = [path.relative_to(self.out).as_posix() for path in self._own_files() if path != self.run_path]
        with atomic(self.run_path) as file:
            file.write(json.dumps(run, indent=1, ensure_ascii=True, default=str).encode() + b"\n")

    def _provenance(self) -> dict[str, Any]:
        """The finished run's JSON; empty where there is none that can be read."""
        try:
            run = json.loads(self.run_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return run if isinstance(run, dict) else {}

    def _own_files(self) -> tuple[Path, ...]:
        tables = [self.table_path, *(table for table in map(self._table, FORMATS) if table != self.table_path)]
        stats = (stats_path(self.out, self.stem, format) for format in FORMATS)
        return tuple(path for path in (*tables, *stats, self.spectra_path, self.run_path) if path.exists())

    def _table(self, format: str) -> Path:
        return self.out / "models" / f"{self.stem}.{format}"

    def _open_journal(self) -> Journal:
        if self._journal is None:
            raise RuntimeError("begin() must come first, and find the model not done")
        return self._journal


def _owned(journal: Journal, owners: Mapping[str, str] | None) -> Iterable[Row]:
    if owners is None:
        return journal.rows.values()
    # As a file can hold them.
    known = {plain_value(longname, str): tensor for longname, tensor in owners.items()}
    return [row for name, row in journal.rows.items() if is_of(journal.tensors.get(name), known.get(name))]


def arranged(rows: Iterable[Row], order: Order, amend: Amend) -> list[Row]:
    """Rows in the order of ``order(longname)``, each passed through `amend`."""
    return [amend(row) for row in sorted(rows, key=lambda row: order(row.longname))]


def _difference(old: Any, new: dict[str, Any]) -> str:
    """How a finished result's fingerprint differs from the one asked for, in a few words: ``with …, now …``."""
    old = old if isinstance(old, dict) else {}
    before, now = old.get("options") or {}, new.get("options") or {}
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    parts = [f"with {key}={_short(before.get(key))}, now {_short(now.get(key))}" for key in changed[:2]]
    if len(changed) > 2:
        parts.append(f"with {len(changed) - 2} other options changed")
    if old.get("shardesd") != new.get("shardesd"):
        parts.append(f"by shardesd {old.get('shardesd')}, now {new.get('shardesd')}")
    if any(old.get(key) != new.get(key) for key in {**old, **new} if key not in ("options", "shardesd")):
        parts.append("of other weights")
    return " and ".join(parts)


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return (text if len(text) <= 40 else text[:39] + "…") or "none"
