"""Events added up: where a scan stands. Safe to feed from several threads; knows nothing of screens."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shardesd.events import (
    EngineReport,
    Event,
    Fetching,
    MatrixStarted,
    RowDone,
    ScanFinished,
    ScanStarted,
    ShardDone,
    ShardOpened,
)
from shardesd.records import Row
from shardesd.show.alpha import alpha_range
from shardesd.show.memory import Memory, MemoryMeter

LAST_ROWS = 12
_MEMORY_EVERY = 0.5


class Rate:
    """Units per second over the last seconds, from a running total."""

    def __init__(self, window: float = 8.0) -> None:
        self._window = window
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, total: float) -> None:
        samples = self._samples
        # Samples a quarter of a second apart at the least: thousands of events cost no more than a few.
        if len(samples) >= 2 and samples[-1][0] - samples[-2][0] < self._window / 32:
            samples.pop()
        samples.append((now, total))
        while len(samples) > 2 and samples[1][0] < now - self._window:
            samples.popleft()

    def per_second(self, now: float) -> float | None:
        """None until there is a time span to speak of."""
        if len(self._samples) < 2:
            return None
        (start, before), (_, total) = self._samples[0], self._samples[-1]
        return (total - before) / (now - start) if now - start > 0.05 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The download that moved last."""

    shard: str
    done: int
    total: int | None
    per_second: float | None

    @property
    def active(self) -> bool:
        return self.total is None or self.done < self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The matrix that has been worked on for the longest, and how many others are under way."""

    longname: str
    device: str
    seconds: float
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where a scan stands at one moment."""

    started: ScanStarted | None
    finished: bool
    elapsed: float
    shards_done: int
    shards: int
    bytes_done: int
    """Bytes of the shards that are through, and of what was read of the one that is open."""
    total_bytes: int | None
    bytes_per_second: float | None
    """Of weights read."""
    fetched: Fetched | None
    matrices_done: int
    """Analysed or failed, those of an earlier run included."""
    matrices: int | None
    exact: bool
    eta: float | None
    """Seconds left; None while unknown, or where the guess has run out before the matrices have."""
    failed: int
    skipped: int
    kept: int
    """Rows whose λ were kept from before."""
    fetched_bytes: int
    """Of all shards that came over the line, as far as they have."""
    needed_bytes: int
    """The same, once they are all here: of the shards whose fetching has begun."""
    ranges: dict[str, int]
    """Name of an α range → how many rows of this run lie in it."""
    rows: tuple[Row, ...]
    """The last ones, skipped tensors left out."""
    running: Running | None
    memory: Memory
    engine: EngineReport | None = None
    """The newest; None before the first."""


@dataclass
class _Totals:
    """What is counted anew for every scan."""

    since: float
    started: ScanStarted | None = None
    finished: bool = False
    matrices: int | None = None
    exact: bool = False
    open_shards: dict[str, int] = field(default_factory=dict)
    shards_done: int = 0
    bytes_of_done_shards: int = 0
    bytes_since_shard: int = 0
    bytes_read: int = 0
    rows_done: int = 0
    last_row: float = 0.0
    failed: int = 0
    skipped: int = 0
    kept: int = 0
    ranges: Counter[str] = field(default_factory=Counter)
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=LAST_ROWS))
    running: dict[str, tuple[str, float]] = field(default_factory=dict)
    read_rate: Rate = field(default_factory=Rate)
    fetches: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    fetch_last: str | None = None
    fetched_bytes: int = 0
    fetch_rate: Rate = field(default_factory=Rate)
    engine: EngineReport | None = None


class Progress:
    """Takes events, gives `View`s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals = _Totals(since=clock())
        self._meter = MemoryMeter()
        self._memory = Memory(0, 0)
        self._memory_read: float | None = None

    def add(self, event: Event) -> None:
        with self._lock:
            self._add(event, self._clock())

    def _add(self, event: Event, now: float) -> None:
        totals = self._totals
        match event:
            case ScanStarted():
                self._totals = _Totals(
                    since=now, started=event, matrices=event.matrices, exact=event.exact, last_row=now
                )
            case Fetching(shard=shard, done=done, total=total):
                before = totals.fetches.get(shard)
                # What an earlier, broken download left counts as there, not as speed.
                totals.fetched_bytes += max(0, done - before[0]) if before else 0
                totals.fetches[shard] = (done, total)
                totals.fetch_last = shard
                totals.fetch_rate.add(now, totals.fetched_bytes)
            case ShardOpened(shard=shard, nbytes=nbytes):
                totals.open_shards[shard] = nbytes
                if event.matrices is not None:
                    totals.matrices, totals.exact = event.matrices, event.exact
            case ShardDone(shard=shard):
                totals.shards_done += 1
                totals.bytes_of_done_shards += totals.open_shards.pop(shard, 0)
                totals.bytes_since_shard = 0
            case MatrixStarted(longname=longname, device=device):
                totals.running[longname] = (device, now)
            case RowDone(row=row, nbytes=nbytes, kept=kept):
                totals.running.pop(row.longname, None)
                totals.kept += kept
                totals.bytes_read += nbytes
                totals.bytes_since_shard += nbytes
                totals.read_rate.add(now, totals.bytes_read)
                if row.status == "skipped":
                    totals.skipped += 1
                else:
                    totals.rows.append(row)
                    totals.rows_done += 1
                    totals.last_row = now
                    if row.status == "failed":
                        totals.failed += 1
                    else:
                        totals.ranges[alpha_range(row.alpha).name] += 1
            case EngineReport():
                totals.engine = event
            case ScanFinished():
                totals.finished = True
                totals.running.clear()

    def view(self) -> View:
        with self._lock:
            now = self._clock()
            if self._memory_read is None or now - self._memory_read >= _MEMORY_EVERY:
                self._memory, self._memory_read = self._meter.read(), now
            totals, started = self._totals, self._totals.started
            done = (started.resumed if started else 0) + totals.rows_done
            matrices = totals.matrices if totals.matrices is None else max(totals.matrices, done)
            return View(
                started=started,
                finished=totals.finished,
                elapsed=now - totals.since,
                shards_done=totals.shards_done,
                shards=max(started.shards if started else 0, totals.shards_done),
                bytes_done=totals.bytes_of_done_shards
                + min(totals.bytes_since_shard, sum(totals.open_shards.values())),
                total_bytes=started.total_bytes if started else None,
                bytes_per_second=totals.read_rate.per_second(now),
                fetched=self._fetched(totals, now),
                matrices_done=done,
                matrices=matrices,
                exact=totals.exact and matrices == totals.matrices,
                eta=self._eta(totals, done, matrices, now),
                failed=totals.failed,
                skipped=totals.skipped,
                kept=totals.kept,
                fetched_bytes=sum(done for done, _ in totals.fetches.values()),
                needed_bytes=sum(total or done for done, total in totals.fetches.values()),
                ranges=dict(totals.ranges),
                rows=tuple(totals.rows),
                running=self._running(totals, now),
                memory=self._memory,
                engine=totals.engine,
            )

    @staticmethod
    def _eta(totals: _Totals, done: int, matrices: int | None, now: float) -> float | None:
        if matrices is None or not totals.rows_done or totals.finished:
            return None
        if done >= matrices:
            return 0.0
        # As of the last row, so that it counts down evenly until the next one.
        mean = (totals.last_row - totals.since) / totals.rows_done
        left = (matrices - done) * mean - (now - totals.last_row)
        return left if left > 0 else None

    @staticmethod
    def _fetched(totals: _Totals, now: float) -> Fetched | None:
        if totals.fetch_last is None:
            return None
        done, total = totals.fetches[totals.fetch_last]
        return Fetched(shard=totals.fetch_last, done=done, total=total, per_second=totals.fetch_rate.per_second(now))

    @staticmethod
    def _running(totals: _Totals, now: float) -> Running | None:
        if not totals.running:
            return None
        longname, (device, since) = min(totals.running.items(), key=lambda item: item[1][1])
        return Running(longname=longname, device=device, seconds=now - since, others=len(totals.running) - 1)
