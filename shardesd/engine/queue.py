"""The queue: tasks in, outcomes out, on every slot of every device, within one memory budget.

One thread pulls tasks from the caller's iterator (which may block on a download), waits until the budget admits the
next one and hands it to whichever slot is free. Threads, not processes: BLAS, LAPACK and CUDA release the
interpreter's lock, and weights need no copy from one process to another.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardesd.engine.devices import Device

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Task(Generic[K, T]):
    """One piece of work: `run(device name)` on any device."""

    key: K
    run: Callable[[str], T]
    nbytes: int = 0
    """Host memory that it takes while it runs."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[K, T]):
    """What became of a task: a value, or the exception that ended it."""

    key: K
    value: T | None
    error: Exception | None
    device: str
    seconds: float


class _FeedError:
    """The caller's iterator of tasks raised: its exception ends `Engine.map`, after the tasks in flight."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Engine:
    """Runs tasks on devices. `prepare(device)` is called once in each worker thread."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        *,
        budget: int,
        prepare: Callable[[Device], None] = lambda device: None,
        out_of_memory: Callable[[Exception], bool] = lambda error: isinstance(error, MemoryError),
    ) -> None:
        self.devices = devices
        self.budget = budget
        self._prepare = prepare
        self._out_of_memory = out_of_memory

    def map(
        self,
        tasks: Iterable[Task[K, T]],
        *,
        on_start: Callable[[K, str], None] = lambda key, device: None,
        stop: threading.Event | None = None,
    ) -> Generator[Outcome[K, T], None, None]:
        """Outcomes as they come, in no particular order. Once `stop` is set, only tasks in flight are finished.

        An exception of `tasks` itself is raised here when the tasks before it are done. A task whose memory can't be
        had on a GPU runs once more, on the CPU.
        """
        run = _Run(self, tasks, on_start, stop or threading.Event())
        try:
            yield from run.outcomes()
        finally:
            run.close()

    def attempt(self, task: Task[K, T], device: str) -> Outcome[K, T]:
        """The outcome of `task` on `device`, or on the CPU where `device` had no memory for it."""
        started = time.perf_counter()
        try:
            value = task.run(device)
        except Exception as error:
            if device != "cpu" and self._out_of_memory(error):
                return self.attempt(task, "cpu")
            return Outcome(task.key, None, error, device, time.perf_counter() - started)
        return Outcome(task.key, value, None, device, time.perf_counter() - started)


class _Run(Generic[K, T]):
    """One `map`: its feeder, its workers, and what passes between them."""

    def __init__(
        self,
        engine: Engine,
        tasks: Iterable[Task[K, T]],
        on_start: Callable[[K, str], None],
        stop: threading.Event,
    ) -> None:
        self._engine = engine
        self._on_start = on_start
        self._stop = stop
        self._closed = threading.Event()
        self._ready: queue.SimpleQueue[Task[K, T] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome[K, T] | _FeedError | None] = queue.SimpleQueue()
        self._admitted = threading.Condition()
        self._pending = 0  # admitted, outcome not yet handed to the caller
        self._waiting = 0  # admitted, not yet run to its end
        self._bytes = 0
        self._slots = sum(device.slots for device in engine.devices)
        self._workers = [
            threading.Thread(target=self._work, args=(device,), name=f"shardesd-{device.name}-{slot}", daemon=True)
            for device in engine.devices
            for slot in range(device.slots)
        ]
        for worker in self._workers:
            worker.start()
        threading.Thread(target=self._feed, args=(tasks,), name="shardesd-feeder", daemon=True).start()

    def outcomes(self) -> Iterator[Outcome[K, T]]:
        failure: BaseException | None = None
        fed = False
        while True:
            if fed or self._stop.is_set():
                with self._admitted:
                    if not self._pending:
                        break
            try:
                item = self._done.get(timeout=0.2)
            except queue.Empty:
                continue
            if item is None:
                fed = True
            elif isinstance(item, _FeedError):
                fed, failure = True, item.error
            else:
                with self._admitted:
                    self._pending -= 1
                yield item
        if failure is not None and not self._stop.is_set():
            raise failure

    def close(self) -> None:
        self._closed.set()
        with self._admitted:
            self._admitted.notify_all()
        for _ in self._workers:
            self._ready.put(None)

    def _feed(self, tasks: Iterable[Task[K, T]]) -> None:
        try:
            for task in tasks:
                if not self._admit(task):
                    return
                self._ready.put(task)
            self._done.put(None)
        except BaseException as error:
            self._done.put(_FeedError(error))

    def _admit(self, task: Task[K, T]) -> bool:
        """Waits for the budget; False once the run is over. A task beyond the whole budget runs alone."""
        with self._admitted:
            # One task more than there are slots may wait, so that no slot idles while the next one is prepared.
            while not (self._closed.is_set() or self._stop.is_set()):
                fits = self._bytes + task.nbytes <= self._engine.budget or self._bytes == 0
                if fits and self._waiting <= self._slots:
                    self._pending += 1
                    self._waiting += 1
                    self._bytes += task.nbytes
                    return True
                self._admitted.wait(0.2)
        return False

    def _work(self, device: Device) -> None:
        self._engine._prepare(device)
        while (task := self._ready.get()) is not None:
            self._on_start(task.key, device.name)
            outcome = self._engine.attempt(task, device.name)
            with self._admitted:
                self._waiting -= 1
                self._bytes -= task.nbytes
                self._admitted.notify_all()
            self._done.put(outcome)
