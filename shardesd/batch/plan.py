"""A quick pass over a list before anything is computed: what is done, what can't work, and how much is left.

Models that are done, or failed for good, cost no request. For each of the others the place is listed and its headers
or index are read, several at a time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Literal

from shardesd.adapters import is_adapter
from shardesd.batch.failures import Failure, classify
from shardesd.batch.listing import ModelList
from shardesd.batch.model import ListRow
from shardesd.checkpoint import open_checkpoint
from shardesd.errors import ResultsError, ShardesdError
from shardesd.options import BatchOptions, ScanOptions
from shardesd.results import find_finished
from shardesd.source import open_source
from shardesd.version import __version__

State = Literal["new", "half done", "done", "failed", "impossible"]
_AT_ONCE = 8
_POLL_SECONDS = 0.1
_OF_THE_OUTPUT = ("other_options", "results")
"""Failures that the output folder shows anew each time, if they are still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the plan knows of one model."""

    row: ListRow
    state: State
    """``failed``: in an earlier run, for good. ``impossible``: found out just now."""
    nbytes: int | None = None
    """Of the weights to read, the base's for an adapter; None where they are not known yet."""
    shards: int | None = None
    adapter: bool = False
    failed_rows: int = 0
    """Of a model that is done: rows that could not be analysed."""
    failure: Failure | None = None
    """Why it can't work, or what the plan met that may pass."""

    @property
    def left(self) -> bool:
        return self.state in ("new", "half done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All models of a list, in the order in which they are worked on."""

    models: tuple[Planned, ...]
    rate: float | None
    """Bytes of weights a second in the finished scans of the same folder; None where there are none."""

    def count(self, *states: State) -> int:
        return sum(model.state in states for model in self.models)

    @property
    def left_bytes(self) -> int | None:
        sizes = [model.nbytes for model in self.models if model.left]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def eta(self) -> float | None:
        """Seconds for what is left, guessed from the bytes."""
        total = self.left_bytes
        return total / self.rate if total is not None and self.rate else None


def chosen(models: ModelList, options: BatchOptions) -> tuple[ListRow, ...]:
    """The rows to work on, in order: filtered, shuffled, cut off, and those of one base one after the other."""
    rows = [row for row in models.rows if _wanted(row, options)]
    if options.shuffle is not None:
        Random(options.shuffle).shuffle(rows)
    rows = rows[: options.limit]
    families: dict[str, list[ListRow]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    return tuple(row for family in families.values() for row in family)


def _wanted(row: ListRow, options: BatchOptions) -> bool:
    names = (row.model_id, row.name)
    return not options.only or any(fnmatchcase(name, glob) for name in names for glob in options.only)


def unmet(models: ModelList, options: BatchOptions) -> list[str]:
    """The globs of ``--only`` that no model of the list matches."""
    return [
        glob for glob in options.only if not any(_wanted(row, replace(options, only=(glob,))) for row in models.rows)
    ]


def make_plan(
    rows: Sequence[ListRow],
    out: Path,
    scan: ScanOptions,
    *,
    failures: Mapping[tuple[str, str | None], Failure],
    overwrite: bool = False,
    retry_failed: bool = False,
    on_model: Callable[[Planned], None] = lambda model: None,
    stop: threading.Event | None = None,
) -> Plan:
    """Looks at every model. `on_model` is told each, from several threads; once `stop` is set nothing is waited for."""
    bases = _Bases(scan)
    read, seconds = 0, 0.0
    at_hand: list[Planned] = []
    for row in rows:
        finished = None if overwrite else find_finished(out, row.model_id, row.revision)
        if finished is not None:
            read += int(finished.run.get("bytes_read") or 0)
            seconds += float(finished.run.get("seconds") or 0)
            why = _other(finished.fingerprint, scan) or ("of other weights" if finished.moved_on() else "")
            if why:
                message = f"its results were made {why}; --overwrite replaces them"
                failure = Failure(stage="plan", reason="other_options", message=message)
                at_hand.append(Planned(row=row, state="impossible", failure=failure))
                continue
            try:
                failed = finished.rows()[1]
                again = failed > 0 and finished.may_pass()
            except ResultsError as error:  # of this one; the others go on
                failure = Failure(stage="plan", reason="results", message=str(error))
                at_hand.append(Planned(row=row, state="impossible", failure=failure))
                continue
            at_hand.append(Planned(row=row, state="half done" if again else "done", failed_rows=failed))
            continue
        earlier = failures.get(row.key)
        if earlier and not earlier.passing and not retry_failed and earlier.reason not in _OF_THE_OUTPUT:
            at_hand.append(Planned(row=row, state="failed", failure=earlier))
            continue
        journal = out / "partial" / f"{row.stem}.jsonl"
        at_hand.append(Planned(row=row, state="half done" if not overwrite and journal.exists() else "new"))
    ended = stop or threading.Event()

    def look(model: Planned) -> Planned:
        if model.left:
            model = _looked(model, bases, scan)
        if not ended.is_set():  # nobody listens any more
            on_model(model)
        return model

    models = _side_by_side(look, at_hand, ended)
    return Plan(models=models, rate=read / seconds if read and seconds else None)


def _side_by_side(
    look: Callable[[Planned], Planned], models: Sequence[Planned], stop: threading.Event
) -> tuple[Planned, ...]:
    """`look` at each, several at a time. Once `stop` is set, those that are not done are given as they are.

    What waits for a server then is left behind, in threads that don't keep the process: an executor's would.
    """
    found: queue.SimpleQueue[tuple[int, Planned | BaseException]] = queue.SimpleQueue()
    waiting = deque(enumerate(models))

    def work() -> None:
        while not stop.is_set():
            try:
                at, model = waiting.popleft()
            except IndexError:
                return
            try:
                found.put((at, look(model)))
            except BaseException as error:
                found.put((at, error))

    for _ in range(min(_AT_ONCE, len(models))):
        threading.Thread(target=work, name="shardesd-plan", daemon=True).start()
    looked = list(models)
    left = len(models)
    try:
        while left and not stop.is_set():
            try:
                at, result = found.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            looked[at] = result
            left -= 1
    finally:
        waiting.clear()  # nobody fetches what the threads would find
    return tuple(looked)


def _looked(model: Planned, bases: _Bases, scan: ScanOptions) -> Planned:
    row = model.row
    try:
        source = open_source(row.model, revision=row.revision)
        if row.base or is_adapter(file.name for file in source.files()):
            return replace(model, adapter=True, nbytes=bases.size(row.base) if row.base else None)
        checkpoint = open_checkpoint(source, io=scan.io, allow_pickle=scan.allow_pickle)
        sizes = [shard.size for shard in checkpoint.shards]
        nbytes = None if None in sizes else sum(size or 0 for size in sizes)
        return replace(model, nbytes=nbytes, shards=len(sizes))
    except ShardesdError as error:
        failure = classify(error, out_of_memory=lambda error: False, stage="source")
        return replace(model, failure=failure, state=model.state if failure.passing else "impossible")


class _Bases:
    """The sizes of bases that adapters name, each asked for once."""

    def __init__(self, scan: ScanOptions) -> None:
        self._scan = scan
        self._lock = threading.Lock()
        self._known: dict[str, int | ShardesdError | None] = {}

    def size(self, repo: str) -> int | None:
        with self._lock:  # one at a time: adapters of one base come together
            if repo not in self._known:
                try:
                    source = open_source(repo)
                    checkpoint = open_checkpoint(source, io=self._scan.io, allow_pickle=self._scan.allow_pickle)
                    sizes = [shard.size for shard in checkpoint.shards]
                    self._known[repo] = None if None in sizes else sum(size or 0 for size in sizes)
                except ShardesdError as error:
                    self._known[repo] = error
            found = self._known[repo]
        if isinstance(found, ShardesdError):
            raise found
        return found


def _other(fingerprint: Mapping[str, object], scan: ScanOptions) -> str:
    """How the results were made otherwise than they would be now; empty where they weren't."""
    if not fingerprint:
        return "without a record of how"
    before, now = fingerprint.get("options"), scan.numbers()
    before = before if isinstance(before, dict) else {}
    changed = [
        f"with {name}={_text(before.get(name))}, now {_text(value)}"
        for name, value in now.items()
        if _text(before.get(name)) != _text(value)
    ]
    version = ".".join(__version__.split(".")[:2])
    if fingerprint.get("shardesd") != version:
        changed.append(f"by shardesd {fingerprint.get('shardesd')}, now {version}")
    return " and ".join(changed[:2])


def _text(value: object) -> str:
    return (",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)) or "none"
