"""The queue: tasks in, outcomes out, on every slot of every device, within memory, whatever devices do.

A feeder thread pulls tasks from the caller's iterator (which may block on a download) into a reach of ready tasks. A
worker thread for each slot of each device takes the longest task that fits into memory, on a GPU together with others
of its group. Threads, not processes: BLAS, LAPACK, CUDA and file reads release the interpreter's lock, and neither
weights nor CUDA contexts need a copy per process. docs/architecture.md tells what happens when things fail.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from shardesd.engine.attempt import RunMany, attempt, prepared
from shardesd.engine.devices import Device
from shardesd.engine.places import Place, Worker
from shardesd.engine.ready import Ready
from shardesd.engine.threads import close_at_exit, start
from shardesd.engine.work import FeedError, Outcome, State, Task, Ticket, Trouble

T = TypeVar("T")
K = TypeVar("K")

_TICK = 0.1  # seconds between two looks at deadlines and at `stop`
_STOPPED = 5.0  # seconds between two looks, in which the process itself may have stood still: no device's fault
_REACH = 512  # tasks for each slot of a GPU, of which a group takes up to 256
_GATHER = 0.02  # seconds for which a group that could be larger waits for more of it
_LOOKS = 20  # whether it is large enough, in this time
_BREATH = 32  # tasks after which the feeder lets others have the interpreter's lock: each would wait for it 5 ms


class Engine:
    """Runs tasks on devices, as long as one is left.

    `prepare(device)` is called once in each worker thread. `classify(error)` says what an exception means. `fallback`
    takes what no device could, and all of it once no device is left. `notice(text)` is told what a user should know.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        *,
        budget: int,
        fallback: Device | None = None,
        prepare: Callable[[Device], None] = lambda device: None,
        classify: Callable[[Exception], Trouble] = lambda error: "memory" if isinstance(error, MemoryError) else "task",
        notice: Callable[[str], None] = lambda text: None,
        reach: int | None = None,
    ) -> None:
        self.devices = devices
        self.budget = budget
        self.fallback = fallback or Device("cpu")
        self.prepare = prepare
        self.classify = classify
        self.notice = notice
        slots = sum(device.slots for device in devices if device.name != "cpu")
        self.reach = (_REACH * slots or 256) if reach is None else reach
        """Tasks that are pulled from the caller's iterator before their outcomes are taken."""

    @property
    def gpus(self) -> int:
        """How many of its devices are GPUs."""
        return sum(device.name != "cpu" for device in self.devices)

    def map(
        self,
        tasks: Iterable[Task[K, T]],
        *,
        run_many: RunMany[K, T] | None = None,
        on_start: Callable[[K, str], None] = lambda key, device: None,
        on_state: Callable[[State[K]], None] = lambda state: None,
        stop: threading.Event | None = None,
    ) -> Generator[Outcome[K, T], None, None]:
        """Outcomes as they come, each task's once. Once `stop` is set, only tasks in flight are finished.

        `run_many` solves tasks of one group together on a GPU; what it raises, each of them has raised. An exception
        of `tasks` itself is raised when those before it are done. `on_state` is called now and then, by the caller.
        """
        run = _Run(self, tasks, run_many, on_start, stop or threading.Event())
        try:
            yield from run.outcomes(on_state)
        finally:
            run.close()


class _Run(Generic[K, T]):
    """One `map`. `_changed` guards everything below it."""

    def __init__(
        self,
        engine: Engine,
        tasks: Iterable[Task[K, T]],
        run_many: RunMany[K, T] | None,
        on_start: Callable[[K, str], None],
        stop: threading.Event,
    ) -> None:
        self._engine = engine
        self._run_many = run_many
        self._on_start = on_start
        self._stop = stop
        self._done: queue.SimpleQueue[Outcome[K, T] | FeedError | BaseException | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._all_here = threading.Event()  # the feeder has, for now, nothing more to add
        self._closed = False
        self._looked = self._away = 0.0  # at deadlines, and how long the caller was away since
        self._pending = 0  # taken from the caller, outcome not yet handed back
        self._full = False  # no more is taken until `_refill` are left: one by one, each would wake the feeder
        self._refill = engine.reach - max(1, engine.reach // 8)
        self._ready: Ready[K, T] = Ready()
        close_at_exit(self)
        self._places = [Place[K, T](device) for device in engine.devices]
        self._aside = Place[K, T](replace(engine.fallback, slots=1))  # has its worker once there is something for it
        try:
            for place in self._places:
                self._staff(place)
            start(self._feed, "shardesd-feeder", tasks)
        except BaseException:  # the system allows no more threads
            self.close()
            raise

    # The caller's thread

    def outcomes(self, on_state: Callable[[State[K]], None]) -> Iterator[Outcome[K, T]]:
        failure: BaseException | None = None
        fed = False
        while True:
            if self._stop.is_set():
                self._drop_ready()
            with self._changed:
                if (fed or self._stop.is_set()) and not self._pending:
                    break
            if time.monotonic() - self._looked > _TICK:
                self._look_for_hung()
                on_state(self._state())
            try:
                item = self._done.get(timeout=_TICK)
            except queue.Empty:
                continue
            if item is None:
                fed = True
            elif isinstance(item, FeedError):
                fed, failure = True, item.error
            elif isinstance(item, BaseException):  # a worker's thread has ended: what it had to do will not be done
                raise item
            else:
                given = time.monotonic()
                yield item
                self._away += time.monotonic() - given
                with self._changed:
                    self._pending -= 1
                    if self._full and self._pending <= self._refill:
                        self._full = False
                        self._changed.notify_all()
        if failure is not None and not self._stop.is_set():
            raise failure

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _drop_ready(self) -> None:
        with self._changed:
            self._pending -= len(self._ready)
            self._ready = Ready()

    def _state(self) -> State[K]:
        with self._changed:
            return State(
                devices=tuple(place.state() for place in self._places),
                ready=len(self._ready),
                host_bytes=self._host_bytes(),
            )

    def _look_for_hung(self) -> None:
        now = time.monotonic()
        unseen = now - self._looked - self._away  # not while the caller had an outcome: the devices went on
        missed = unseen if unseen > _STOPPED else 0.0
        self._looked, self._away = now, 0.0
        with self._changed:
            for place in (*self._places, self._aside):
                for worker in list(place.workers):
                    worker.since = min(now, worker.since + missed)
                    if now - worker.since > worker.allowed:
                        self._abandon(worker, now - worker.since)

    def _abandon(self, worker: Worker[K, T], seconds: float) -> None:
        """A solve that doesn't end: its thread is left to itself, and what it may still give is not taken."""
        worker.abandoned = True
        worker.place.workers.remove(worker)
        tickets = worker.clear()
        if worker.place.is_cpu:
            error = TimeoutError(f"no answer from the CPU after {seconds:.0f} s")
            for ticket in tickets:
                self._deliver(ticket, Outcome(key=ticket.task.key, error=error, device="cpu", seconds=seconds))
            self._hire(worker.place)
        elif not (worker.preparing and worker.place.prepared):  # else fewer threads will do
            self._retire(worker.place, f"no answer after {seconds:.0f} s")
            for ticket in tickets:
                ticket.cpu_only = True  # it may be what hangs
                self._ready.add(ticket)
            self._ensure_fallback()

    # The feeder's thread

    def _feed(self, tasks: Iterable[Task[K, T]]) -> None:
        try:
            for number, task in enumerate(tasks):
                if self._engine.gpus and not number % _BREATH:
                    time.sleep(1e-6)
                with self._changed:
                    # Outcomes that the caller hasn't taken count too: a caller that pauses pauses the scan.
                    if self._pending >= self._engine.reach:
                        self._full = True
                        self._all_here.set()
                        self._changed.wait_for(lambda: self._over() or not self._full)
                        self._all_here.clear()
                    if self._over():
                        return
                    if task.aside and not self._aside.workers:
                        self._staff(self._aside)
                    self._pending += 1
                    self._ready.add(Ticket(task, number))
                    if task.aside or any(place.is_open_to(task) for place in self._places):
                        self._changed.notify_all()
            self._done.put(None)
        except BaseException as error:
            self._done.put(FeedError(error))
        finally:
            self._all_here.set()

    def _over(self) -> bool:
        return self._closed or self._stop.is_set()

    @property
    def _gpus(self) -> list[Place[K, T]]:
        return [place for place in self._places if place.is_gpu]

    # The workers' threads

    def _staff(self, place: Place[K, T]) -> None:
        for _ in range(place.device.slots):
            self._hire(place)

    def _hire(self, place: Place[K, T]) -> None:
        worker = Worker(place, since=time.monotonic())
        place.workers.append(worker)
        try:
            start(self._work, f"shardesd-{place.device.name}-{len(place.workers)}", worker)
        except BaseException:
            place.workers.remove(worker)
            raise

    def _work(self, worker: Worker[K, T]) -> None:
        try:
            self._serve(worker)
        except BaseException as error:  # what an `Exception` of a task, or a GPU that can't be used, is not
            if not worker.abandoned:
                self._done.put(error)

    def _serve(self, worker: Worker[K, T]) -> None:
        device, engine = worker.place.device, self._engine
        error = prepared(engine.prepare, device, engine.classify)
        if error is not None and worker.place.is_cpu:
            raise error
        with self._changed:
            if worker.abandoned:
                return
            if error is not None:
                self._dismiss(worker, error)
                return
            worker.preparing, worker.place.prepared = False, True
        while (tickets := self._take(worker)) is not None:
            for ticket in tickets:
                self._on_start(ticket.task.key, device.name)
            outcomes = attempt([ticket.task for ticket in tickets], device.name, self._run_many)
            with self._changed:
                if worker.abandoned:
                    return
                worker.clear()
                for ticket, outcome in zip(tickets, outcomes, strict=True):
                    self._settle(ticket, outcome, worker.place)
                self._changed.notify_all()

    def _take(self, worker: Worker[K, T]) -> list[Ticket[K, T]] | None:
        """What the worker does next; None when there will be nothing more for it."""
        place = worker.place
        with self._changed:
            while True:
                if self._over() or place.retired or worker.abandoned:
                    return None
                if (first := self._longest(place)) is not None:
                    break
                self._changed.wait(1.0)
            worker.add(first)
            worker.since = time.monotonic()
            self._changed.notify_all()
            if self._run_many is None or first.task.group is None or place.is_cpu or first.alone:
                return [first]
            worker.gathers = first.task.group
        return self._gathered(worker, first)

    def _gathered(self, worker: Worker[K, T], first: Ticket[K, T]) -> list[Ticket[K, T]] | None:
        """A ticket with others of its group, after a moment in which there may come more."""
        place, group = worker.place, first.task.group
        for _ in range(_LOOKS):
            here, all_ = self._ready.count(group), len(self._ready)
            if self._ready.has_best(first.task, place, self._gpus) or self._all_here.wait(_GATHER / _LOOKS):
                break
            if self._ready.count(group) == here and len(self._ready) > all_:
                break  # what comes now is of other groups
        with self._changed:
            worker.gathers = None
            if worker.abandoned:
                return None
            if self._over() or place.retired:  # meanwhile
                for ticket in worker.clear():
                    self._ready.add(ticket)
                self._changed.notify_all()
                return None
            host_bytes = worker.host_bytes + max(0, self._engine.budget - self._host_bytes())
            device_bytes = worker.device_bytes + place.device.budget - place.device_bytes
            self._ready.gather(worker, self._gpus, host_bytes, device_bytes)
            self._changed.notify_all()
            return list(worker.tickets)

    def _longest(self, place: Place[K, T]) -> Ticket[K, T] | None:
        """What is for this place; on a CPU that has nothing else to do, also what is for the thread aside."""
        if not place.free_slots or (self._ready.all_large and place.has_its_large):  # known without asking each
            return None
        gpus = self._gpus

        def longest(aside: bool) -> Ticket[K, T] | None:
            return self._ready.longest(place, gpus, lambda ticket: self._fits(ticket, place), aside=aside)

        return (None if place is self._aside else longest(False)) or (longest(True) if place.is_cpu else None)

    def _fits(self, ticket: Ticket[K, T], place: Place[K, T]) -> bool:
        """Whether it may begin there now. One beyond the whole budget runs alone."""
        host = self._host_bytes()
        return place.has_room(ticket) and not (host and host + ticket.task.host_bytes > self._engine.budget)

    def _host_bytes(self) -> int:
        return sum(place.host_bytes for place in (*self._places, self._aside))

    def _settle(self, ticket: Ticket[K, T], outcome: Outcome[K, T], place: Place[K, T]) -> None:
        """An outcome is delivered, or its task tried elsewhere: for want of memory alone, then on the CPU."""
        trouble = "task" if outcome.error is None or place.is_cpu else self._engine.classify(outcome.error)
        if trouble == "task":
            place.done += 1
            self._deliver(ticket, outcome)
        else:
            if trouble == "device":
                self._retire(place, str(outcome.error))
            elif ticket.alone:
                ticket.alone, ticket.cpu_only = False, True
                self._tell_of_memory(place)
            else:
                ticket.alone = True
            self._ready.add(ticket)
            self._ensure_fallback()

    def _deliver(self, ticket: Ticket[K, T], outcome: Outcome[K, T]) -> None:
        if not ticket.delivered:
            ticket.delivered = True
            self._done.put(outcome)

    def _dismiss(self, worker: Worker[K, T], error: Exception) -> None:
        """One that can't begin: for want of memory fewer will do, as long as there are any."""
        place = worker.place
        place.workers.remove(worker)
        if not place.workers or self._engine.classify(error) != "memory":
            self._retire(place, str(error))
            self._ensure_fallback()

    def _retire(self, place: Place[K, T], why: str) -> None:
        if not place.retired:
            place.retired = " ".join(why.split()) or "lost"
            self._engine.notice(f"{place.device.name} is used no more: {place.retired[:200]}; the scan goes on without")

    def _tell_of_memory(self, place: Place[K, T]) -> None:
        if not place.told_of_memory:
            place.told_of_memory = True
            self._engine.notice(f"{place.device.name} has no memory for some of the work, which the CPU does instead")

    def _ensure_fallback(self) -> None:
        """A CPU for what only a CPU can do now, or for all where no other device is left."""
        alive = [place for place in self._places if not place.retired]
        needed = not alive or any(ticket.cpu_only for ticket in self._ready)
        if needed and not any(place.is_cpu for place in alive):
            place = Place[K, T](self._engine.fallback, fallback=True)
            self._places.append(place)
            self._staff(place)
        self._changed.notify_all()
