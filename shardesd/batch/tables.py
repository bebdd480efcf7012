"""The two tables of a batch, which all its processes share: summary.csv with the list's own columns, in the list's
order, and failed_models.csv."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import psutil

from shardesd.batch.failures import Failure
from shardesd.batch.listing import ModelList, Problem
from shardesd.batch.model import ListRow
from shardesd.results import SUMMARY_COLUMNS, Cells, edit_table, read_models

RELATION = "base_model_relation"
FAILED_COLUMNS = ("model_id", "revision", "stage", "reason", "message", "attempts", "time")
_PROBE = re.compile(r"\.(?:writable|now)\.(\d+)\.tmp")
_Key = tuple[str, "str | None"]


class Ledger:
    """Writes both tables. Every method may raise `ResultsError` or `NoSpace`."""

    def __init__(self, out: Path, models: ModelList) -> None:
        self._out = out
        self._summary, self._failed = out / "summary.csv", out / "failed_models.csv"
        # In the list's order, whatever the order of the work, so that every process and every run sorts alike.
        keys: list[_Key] = [row.key for row in models.rows]
        lost: list[_Key] = [(problem.text, None) for problem in models.problems if not problem.repeats]
        self._places = {key: number for number, key in enumerate([*keys, *lost])}
        self._models = {row.key for row in models.rows}
        # A list's own column never takes the place of what a scan has found.
        self._names = {name: f"list_{name}" if name in SUMMARY_COLUMNS else name for name in models.columns}
        self._columns = (RELATION, *self._names.values())

    def failures(self) -> dict[_Key, Failure]:
        """Every failure so far, of all processes and runs."""
        return read_failures(self._out)

    def note_failure(self, row: ListRow, failure: Failure) -> Failure:
        """Notes a failed attempt; gives it with the count of all attempts so far."""
        cells: Cells = {}

        def change(found: list[Cells]) -> list[Cells]:
            nonlocal cells
            before = next((_failure(other) for other in found if _key(other) == row.key), None)
            cells = _again(row.key, failure, before)
            return self._arranged([*(other for other in found if _key(other) != row.key), cells])

        edit_table(self._failed, FAILED_COLUMNS, change)
        return _failure(cells)

    def note_found(self, found: Iterable[tuple[ListRow, Failure]]) -> None:
        """Notes failures that come of the plan and not of an attempt: once, however often they are found again."""
        self._state({row.key: failure for row, failure in found})

    def note_problems(self, problems: Iterable[Problem]) -> int:
        """Notes the lines of the list that name no model, and forgets those that it has no more; gives their number."""
        lost = [problem for problem in problems if not problem.repeats]
        told: dict[_Key, Failure] = {}
        for problem in lost:
            failure = Failure(stage="list", reason="bad_row", message=f"line {problem.line}: {problem.message}")
            told.setdefault((problem.text, None), failure)
        known = self._models | told.keys()
        self._state(told, kept=lambda cells: cells["reason"] != "bad_row" or _key(cells) in known)
        return len(lost)

    def note_done(self, rows: Iterable[ListRow]) -> None:
        """Joins what the list says of finished models into their rows of the summary, and forgets their failures."""
        rows = list(rows)
        done = {row.key for row in rows}
        if not done.isdisjoint(self.failures()):
            edit_table(self._failed, FAILED_COLUMNS, lambda found: [row for row in found if _key(row) not in done])
        told: dict[_Key, Cells] = {}
        for row in rows:
            cells = {self._names[name]: value for name, value in row.extra.items()}
            cells |= {RELATION: row.relation or "", "source_model": row.source_model or ""}
            if any(cells.values()):
                told[row.key] = {name: value for name, value in cells.items() if value}
        if told:
            edit_table(
                self._summary,
                SUMMARY_COLUMNS,
                lambda found: [_joined(cells, told.get(_key(cells), {})) for cells in found],
                extra=self._columns,
            )

    def finish(self) -> list[Path]:
        """Brings both tables into the list's order and clears away what killed processes left; gives their paths."""
        edit_table(self._summary, SUMMARY_COLUMNS, self._arranged, extra=self._columns)
        edit_table(self._failed, FAILED_COLUMNS, self._arranged)
        for folder in (self._out, *(path for path in self._out.iterdir() if path.is_dir())):
            with suppress(OSError):  # a folder that another process has just removed
                for entry in os.scandir(folder):
                    match = _PROBE.fullmatch(entry.name)
                    if match and not psutil.pid_exists(int(match[1])):
                        os.unlink(entry.path)
        return [path for path in (self._summary, self._failed) if path.exists()]

    def _state(self, told: Mapping[_Key, Failure], kept: Callable[[Cells], bool] = lambda cells: True) -> None:
        """Puts all of them into the table in one step (a list may have thousands), but those that it has already."""

        def change(found: list[Cells]) -> list[Cells]:
            known = {_key(cells): cells for cells in found if kept(cells)}
            for key, failure in told.items():
                before = _failure(known[key]) if key in known else None
                if before is None or (before.reason, before.message) != (failure.reason, failure.message):
                    known[key] = _again(key, failure, before)
            return self._arranged(known.values())

        edit_table(self._failed, FAILED_COLUMNS, change)

    def _arranged(self, found: Iterable[Cells]) -> list[Cells]:
        last = len(self._places)
        return sorted(found, key=lambda cells: (self._places.get(_key(cells), last), _key(cells)[0], cells["revision"]))


def read_failures(out: Path) -> dict[tuple[str, str | None], Failure]:
    """What ``out/failed_models.csv`` says, by model and revision. Raises `ResultsError`."""
    return {_key(cells): _failure(cells) for cells in read_models(out / "failed_models.csv")}


def _joined(cells: Cells, told: Mapping[str, str]) -> Cells:
    # The source that a scan has found out itself is the truer one.
    return {**cells, **{name: value for name, value in told.items() if name != "source_model" or not cells.get(name)}}


def _key(cells: Mapping[str, str]) -> _Key:
    return cells.get("model_id", ""), cells.get("revision") or None


def _again(key: _Key, failure: Failure, before: Failure | None) -> Cells:
    """A failure's row, with the attempts so far."""
    return {
        "model_id": key[0],
        "revision": key[1] or "",
        "stage": failure.stage,
        "reason": failure.reason,
        "message": failure.message,
        "attempts": str(failure.attempts + (before.attempts if before else 0)),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _failure(cells: Mapping[str, str]) -> Failure:
    attempts = cells.get("attempts", "")
    return Failure(
        stage=cells.get("stage", ""),
        reason=cells.get("reason", ""),
        message=cells.get("message", ""),
        attempts=int(attempts) if attempts.isdigit() else 1,
    )
