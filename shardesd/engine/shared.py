"""One engine for several scans at once, whose devices may come and go while they run.

Scans give their tasks to a `SharedEngine` as they would to an engine of their own; threads, devices and the memory
budget are one engine's. When the set of devices changes, the tasks in flight are finished, an engine on the new set
takes the place of the old one, and goes on with the tasks that wait. The scans notice nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardesd.engine.attempt import RunMany
from shardesd.engine.devices import Device
from shardesd.engine.queue import Engine
from shardesd.engine.work import FeedError, Outcome, State, Task

_POLL_SECONDS = 0.2
_Any = Task[Any, Any]


class _NotHere(Exception):
    """A task was begun on a device that is no longer to be used, or for a scan that has stopped."""


class _Client:
    """One scan: the task that it offers next, and the outcomes that it has not fetched yet."""

    def __init__(
        self, run_many: RunMany[Any, Any] | None, on_start: Callable[[Any, str], None], stop: threading.Event
    ) -> None:
        self.run_many, self.on_start, self.stop = run_many, on_start, stop
        self.offered: _Any | None = None
        self.pending = 0
        """Taken, and not fetched."""
        self.closed = False
        self.state: State[Any] | None = None
        """As the engine was seen last, and the scan has not been told."""
        self.done: queue.SimpleQueue[Outcome[Any, Any] | FeedError | None] = queue.SimpleQueue()

    @property
    def over(self) -> bool:
        return self.closed or self.stop.is_set()


class SharedEngine(Engine):
    """An `Engine` whose `map` may run several times at once. A context manager.

    `make(devices)` gives the engine for a set of devices. Without any device, tasks wait until `use` gives some.
    """

    def __init__(
        self,
        make: Callable[[tuple[Device, ...]], Engine],
        devices: tuple[Device, ...],
        *,
        budget: int,
        on_busy: Callable[[str, float], None] = lambda device, seconds: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_busy` is told a device's name and the seconds of each task that it has finished; `on_idle` is called
        when no device may be used any more and nothing is under way."""
        super().__init__(devices, budget=budget)
        self._make = make
        self._on_busy, self._on_idle = on_busy, on_idle
        self._changed = threading.Condition()
        self._clients: deque[_Client] = deque()
        self._again: deque[tuple[_Client, _Any]] = deque()
        self._flying: dict[int, tuple[_Client, _Any]] = {}
        self._tickets = 0
        self._closed = False
        self._broken: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._drive, name="shardesd-shared-engine", daemon=True)

    def __enter__(self) -> SharedEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._end.set()
            self._changed.notify_all()

    def use(self, devices: tuple[Device, ...]) -> None:
        """From now on, start tasks on these devices only."""
        with self._changed:
            if devices != self.devices:
                self.devices = devices
                self._end.set()
                self._changed.notify_all()

    def map(
        self,
        tasks: Iterable[_Any],
        *,
        run_many: RunMany[Any, Any] | None = None,
        on_start: Callable[[Any, str], None] = lambda key, device: None,
        on_state: Callable[[State[Any]], None] = lambda state: None,
        stop: threading.Event | None = None,
    ) -> Generator[Outcome[Any, Any], None, None]:
        """See `Engine.map`."""
        client = _Client(run_many, on_start, stop or threading.Event())
        with self._changed:
            self._clients.append(client)
        threading.Thread(target=self._offer_all, args=(client, tasks), name="shardesd-feeder", daemon=True).start()
        try:
            yield from self._outcomes(client, on_state)
        finally:
            with self._changed:
                client.closed = True
                self._withdraw(client)
                self._clients.remove(client)
                self._changed.notify_all()

    # The scans' threads

    def _outcomes(self, client: _Client, on_state: Callable[[State[Any]], None]) -> Iterator[Outcome[Any, Any]]:
        failure: BaseException | None = None
        fed = False
        while True:
            with self._changed:
                if self._broken is not None:
                    raise self._broken
                if client.over:
                    self._withdraw(client)
                if (fed or client.over) and not client.pending:
                    break
                state, client.state = client.state, None
            if state is not None:
                on_state(state)
            try:
                item = client.done.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                fed = True
            elif isinstance(item, FeedError):
                fed, failure = True, item.error
            else:
                yield item
                with self._changed:
                    client.pending -= 1
                    self._changed.notify_all()
        if failure is not None and not client.stop.is_set():
            raise failure

    def _offer_all(self, client: _Client, tasks: Iterable[_Any]) -> None:
        try:
            for task in tasks:
                with self._changed:
                    client.offered = task
                    self._changed.notify_all()
                    while client.offered is not None and not (client.over or self._closed):
                        self._changed.wait(_POLL_SECONDS)
                    if client.offered is not None:
                        client.offered = None
                        return
            client.done.put(None)
        except BaseException as error:
            client.done.put(FeedError(error))

    def _withdraw(self, client: _Client) -> None:
        """Takes back what waits to be begun again."""
        kept = [waiting for waiting in self._again if waiting[0] is not client]
        client.pending -= len(self._again) - len(kept)
        self._again = deque(kept)

    # The driver's thread, and those of the engine that it drives

    def _drive(self) -> None:
        try:
            while self._next_engine():
                pass
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _next_engine(self) -> bool:
        """Runs one on the devices of this moment until they change; False when there will be none any more."""
        if not self.devices:
            self._on_idle()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.devices)
            if self._closed:
                return False
            self._end = end = threading.Event()
            devices = self.devices
        self._run(self._make(devices), end)
        with self._changed:
            # What was handed to the old engine and not begun.
            self._again.extend(self._flying.values())
            self._flying.clear()
        return True

    def _run(self, engine: Engine, end: threading.Event) -> None:
        def started(ticket: int, device: str) -> None:
            client, task = self._flying[ticket]
            if not client.over:
                client.on_start(task.key, device)

        for outcome in engine.map(
            self._feed(end), run_many=self._together, on_start=started, on_state=self._tell_state, stop=end
        ):
            with self._changed:
                client, task = self._flying.pop(outcome.key)
                if isinstance(outcome.error, _NotHere):
                    if client.over:
                        client.pending -= 1
                    else:
                        self._again.append((client, task))
                    continue
            if not task.aside:
                self._on_busy(outcome.device, outcome.seconds)
            client.done.put(replace(outcome, key=task.key))

    def _feed(self, end: threading.Event) -> Iterator[Task[int, Any]]:
        while True:
            with self._changed:
                picked = None
                while not end.is_set() and (picked := self._pick()) is None:
                    self._changed.wait(_POLL_SECONDS)
                if picked is None:
                    return
                ticket = self._tickets = self._tickets + 1
                self._flying[ticket] = picked
            yield replace(picked[1], key=ticket, run=self._guarded(*picked))

    def _pick(self) -> tuple[_Client, _Any] | None:
        """The next task, of each scan in turn. A scan that doesn't fetch its outcomes is waited for."""
        if self._again:
            return self._again.popleft()
        for _ in range(len(self._clients)):
            client = self._clients[0]
            self._clients.rotate(-1)
            task = client.offered
            if task is not None and not client.over and client.pending < self.reach:
                client.offered = None
                client.pending += 1
                self._changed.notify_all()
                return client, task
        return None

    def _guarded(self, client: _Client, task: _Any) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            if self._unwanted(client, device):
                raise _NotHere
            return task.run(device)

        return run

    def _together(self, tasks: Sequence[Task[int, Any]], device: str) -> list[Outcome[int, Any]]:
        """Each scan's part of a group by itself: it alone knows what its tasks are, and they alone fail with it."""
        outcomes: dict[int, Outcome[int, Any]] = {}
        parts: dict[_Client, list[tuple[int, _Any]]] = {}
        for ticketed in tasks:
            client, task = self._flying[ticketed.key]
            parts.setdefault(client, []).append((ticketed.key, task))
        for client, part in parts.items():
            if self._unwanted(client, device):
                outcomes |= {ticket: Outcome(key=ticket, error=_NotHere(), device=device) for ticket, _ in part}
                continue
            assert client.run_many is not None, "a group was offered without a way to solve it"
            try:
                found = client.run_many([task for _, task in part], device)
            except Exception as error:
                outcomes |= {ticket: Outcome(key=ticket, error=error, device=device) for ticket, _ in part}
                continue
            for (ticket, _), outcome in zip(part, found, strict=True):
                outcomes[ticket] = replace(outcome, key=ticket)
        return [outcomes[ticketed.key] for ticketed in tasks]

    def _unwanted(self, client: _Client, device: str) -> bool:
        allowed = device == "cpu" or any(device == known.name for known in self.devices)
        return client.over or not allowed

    def _tell_state(self, state: State[int]) -> None:
        with self._changed:
            for client in self._clients:
                devices = tuple(
                    replace(device, working=tuple(self._keys(client, device.working))) for device in state.devices
                )
                client.state = replace(state, devices=devices)

    def _keys(self, client: _Client, tickets: Iterable[int]) -> Iterator[Any]:
        for ticket in tickets:
            owner, task = self._flying.get(ticket, (None, None))
            if owner is client and task is not None:
                yield task.key
