"""Events of a batch added up: where it stands. Safe to feed from several threads; knows nothing of screens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shardesd.events import (
    BatchEvent,
    BatchFinished,
    BatchStarted,
    EngineReport,
    Event,
    Fetching,
    GpuChanged,
    MatrixStarted,
    ModelDone,
    ModelEvent,
    ModelFailed,
    ModelStarted,
    RowDone,
    ScanFinished,
    ScanStarted,
    ShardDone,
    ShardOpened,
)
from shardesd.show.memory import Memory, MemoryMeter

LAST_FAILURES = 5


@dataclass(slots=True)
class Current:
    """A model that is being scanned."""

    model: str
    since: float
    nbytes: int | None
    shards: int = 0
    shards_done: int = 0
    matrices: int | None = None
    matrices_done: int = 0
    failed: int = 0
    fetched: tuple[int, int | None] | None = None
    """Bytes here and in all of the shard that downloads."""
    now: str = ""
    """The matrix that was begun last."""

    def add(self, event: Event) -> None:
        match event:
            case ScanStarted():
                self.shards, self.matrices, self.matrices_done = event.shards, event.matrices, event.resumed
            case ShardOpened():
                self.matrices = event.matrices if event.matrices is not None else self.matrices
                self.fetched = None
            case ShardDone():
                self.shards_done += 1
            case Fetching():
                self.fetched = (event.done, event.total)
            case MatrixStarted():
                self.now = event.longname
            case RowDone() if event.row.status != "skipped":
                self.matrices_done += 1
                self.failed += event.row.status == "failed"
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: who has it, and what it does."""

    name: str
    state: str
    others_bytes: int | None = None
    working: int = 0
    """Matrices in work on it."""
    memory: int = 0
    """Bytes that the matrices in work take of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """Where a batch stands at one moment."""

    started: BatchStarted | None
    elapsed: float
    done: int
    failed: int
    left: int
    eta: float | None
    bytes_done: int
    """Of weights, in this run."""
    current: tuple[Current, ...]
    gpus: tuple[Gpu, ...]
    failures: tuple[ModelFailed, ...]
    """The last ones."""
    waiting: int
    """Models that failed and are tried again later."""
    memory: Memory
    now: float


@dataclass
class BatchProgress:
    """Takes events, gives `BatchView`s."""

    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: BatchStarted | None = None
    _since: float = 0.0
    _done: int = 0
    _failed: int = 0
    _ended: int = 0
    _bytes_ended: int = 0
    _bytes: int = 0
    _current: dict[str, Current] = field(default_factory=dict)
    _gpus: dict[str, GpuChanged] = field(default_factory=dict)
    _report: EngineReport | None = None
    _failures: deque[ModelFailed] = field(default_factory=lambda: deque(maxlen=LAST_FAILURES))
    _waiting: set[str] = field(default_factory=set)
    _meter: MemoryMeter = field(default_factory=MemoryMeter)

    def add(self, event: BatchEvent) -> None:
        with self._lock:
            self._add(event, self.clock())

    def _add(self, event: BatchEvent, now: float) -> None:
        match event:
            case BatchStarted():
                self._started, self._since = event, now
                self._done, self._failed = event.done, event.failed
            case ModelStarted():
                self._waiting.discard(event.model)
                self._current[event.model] = Current(event.model, now, event.nbytes)
            case ModelEvent(model=model, event=inner):
                if isinstance(inner, EngineReport):
                    self._report = inner
                if isinstance(inner, RowDone):
                    self._bytes += inner.nbytes
                if model in self._current:
                    self._current[model].add(inner)
                    if isinstance(inner, ScanFinished) and inner.interrupted:
                        self._current.pop(model)
            case ModelDone():
                self._done += 1
                self._end(event.model)
            case ModelFailed():
                self._failures.append(event)
                if event.again_in is not None:
                    self._waiting.add(event.model)
                    self._current.pop(event.model, None)
                elif self._started is not None:
                    self._failed += 1
                    self._end(event.model)
            case GpuChanged():
                self._gpus[event.gpu] = event
            case BatchFinished():
                self._current.clear()
            case _:
                pass

    def _end(self, model: str) -> None:
        self._ended += 1
        ended = self._current.pop(model, None)
        self._bytes_ended += (ended.nbytes or 0) if ended else 0
        self._waiting.discard(model)

    def view(self) -> BatchView:
        with self._lock:
            now = self.clock()
            started = self._started
            elapsed = now - self._since if started else 0.0
            left = started.left - self._ended if started else 0
            return BatchView(
                started=started,
                elapsed=elapsed,
                done=self._done,
                failed=self._failed,
                left=left,
                eta=self._eta(elapsed, left),
                bytes_done=self._bytes,
                current=tuple(self._current.values()),
                gpus=self._gpu_views(),
                failures=tuple(self._failures),
                waiting=len(self._waiting),
                memory=self._meter.read(),
                now=now,
            )

    def _eta(self, elapsed: float, left: int) -> float | None:
        """By bytes where they are known of all models, else by the number of models."""
        started = self._started
        if started is None or not left:
            return 0.0 if started else None
        if started.total_bytes:
            under_way = sum(
                (current.nbytes or 0) * min(1.0, current.matrices_done / current.matrices)
                for current in self._current.values()
                if current.matrices
            )
            read = self._bytes_ended + under_way
            rate = read / elapsed if read and elapsed > 1 else started.rate
            return max(0.0, started.total_bytes - read) / rate if rate else None
        return elapsed / self._ended * left if self._ended else None

    def _gpu_views(self) -> tuple[Gpu, ...]:
        reports = {device.name: device for device in self._report.devices} if self._report else {}
        gpus = []
        for name, change in sorted(self._gpus.items()):
            report = reports.get(name)
            gpus.append(
                Gpu(
                    name=name,
                    state=change.state,
                    others_bytes=change.others_bytes,
                    working=len(report.working) if report and change.state == "ours" else 0,
                    memory=report.memory if report and change.state == "ours" else 0,
                )
            )
        return tuple(gpus)
