"""The devices in use, and the threads that work there."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardesd.engine.devices import Device
from shardesd.engine.work import DeviceState, Task, Ticket

T = TypeVar("T")
K = TypeVar("K")

PREPARE_SECONDS = 600.0
"""In which a thread has to be ready to work: torch and CUDA's libraries may come from a slow disk."""


@dataclass(slots=True, eq=False)
class Place(Generic[K, T]):
    """A device in use."""

    device: Device
    workers: list[Worker[K, T]] = field(default_factory=list)
    done: int = 0
    retired: str = ""
    told_of_memory: bool = False
    prepared: bool = False
    """Whether one of its workers has been through `prepare`."""
    fallback: bool = False
    """Only for what no other device can do, while there is one."""

    @property
    def is_cpu(self) -> bool:
        return self.device.name == "cpu"

    @property
    def device_bytes(self) -> int:
        return sum(worker.device_bytes for worker in self.workers)

    @property
    def host_bytes(self) -> int:
        return sum(worker.host_bytes for worker in self.workers)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU that is still used."""
        return not (self.is_cpu or self.retired)

    @property
    def working(self) -> list[Worker[K, T]]:
        """Those of its workers that have something to do."""
        return [worker for worker in self.workers if worker.tickets]

    @property
    def free_slots(self) -> int:
        return self.device.slots - len(self.working)

    def is_open_to(self, task: Task[K, T]) -> bool:
        """Whether a worker may be waiting for it."""
        return self.free_slots > 0 and not (task.large and self.has_its_large) and task.group not in self.gathered

    @property
    def gathered(self) -> set[Hashable]:
        """The groups of which a worker waits for more: others leave them to it."""
        return {worker.gathers for worker in self.workers} - {None}

    def in_work(self, group: Hashable) -> int:
        """How many tasks of a group are worked on here."""
        return sum(ticket.task.group == group for worker in self.workers for ticket in worker.tickets)

    def state(self) -> DeviceState[K]:
        """What there is to tell of it."""
        return DeviceState(
            name=self.device.name,
            working=tuple(ticket.task.key for worker in self.workers for ticket in worker.tickets),
            done=self.done,
            device_bytes=self.device_bytes,
            retired=self.retired,
        )

    @property
    def large(self) -> int:
        """How many groups of large tasks are under way here."""
        return sum(worker.tickets[0].task.large for worker in self.working)

    @property
    def has_its_large(self) -> bool:
        """Whether it is a GPU whose other slots are for small tasks."""
        return self.is_gpu and self.large >= max(1, self.device.slots - 1)

    def leaves(self, task: Task[K, T], waiting: int, gpus: Sequence[Place[K, T]]) -> bool:
        """Whether such a task, of whose group so many wait, is for another GPU, or for later.

        A GPU begins one more group of large ones where there are whole ones for all of `gpus` to have as many under
        way; with fewer, a second one where no other GPU should have it. A third one, which is only to be ready in time,
        takes all the memory of a whole one or none.
        """
        large = self.large if task.large else 0
        if not large:
            return False
        if self.has_its_large:
            return True
        lacking = sum(max(0, large + 1 - gpu.large) for gpu in gpus)
        scarce = task.group is None or waiting < lacking * task.most
        if large > 1:
            return scarce or not self._holds(task, task.most)
        return scarce and any(gpu.wants(task, large) for gpu in gpus)

    def wants(self, task: Task[K, T], large: int) -> bool:
        """Whether it should have such a task before a GPU where so many are under way."""
        return (self.prepared and self.large < large) or task.group in self.gathered

    def has_room(self, ticket: Ticket[K, T]) -> bool:
        """Whether there are slots for it, and a GPU's memory."""
        working = self.working
        if len(working) >= self.device.slots:
            return False
        if self.is_cpu or not working:
            return True
        if ticket.alone or any(worker.tickets[0].alone for worker in working):
            return False
        return not self.device_bytes or self._holds(ticket.task, 1)

    def _holds(self, task: Task[K, T], count: int) -> bool:
        """Whether the GPU's memory holds so many such tasks beside what is there."""
        needed = count * task.device_bytes + min(count * task.passing_bytes, task.passing_most)
        return self.device_bytes + needed <= self.device.budget


@dataclass(slots=True, eq=False)
class Worker(Generic[K, T]):
    """One slot: its thread, and what it works on."""

    place: Place[K, T]
    tickets: list[Ticket[K, T]] = field(default_factory=list)
    device_bytes: int = 0
    _own_bytes: int = 0
    _passing_bytes: int = 0
    _passing_most: int = 0
    host_bytes: int = 0
    """Tasks that are solved together are read one after the other, so the largest of them counts."""
    gathers: Hashable = None
    """The group of which it waits for more."""
    since: float = 0.0
    """When it began what it works on, or to prepare."""
    preparing: bool = True
    abandoned: bool = False

    @property
    def allowed(self) -> float:
        """Seconds after which what it does counts as hung."""
        if self.preparing:
            return PREPARE_SECONDS
        tasks = [ticket.task for ticket in self.tickets]
        if not tasks:
            return math.inf
        slow = self.place.is_cpu
        work = [task.deadline if slow or task.gpu_deadline is None else task.gpu_deadline for task in tasks]
        return max(task.patience for task in tasks) + sum(work)

    def device_bytes_with(self, task: Task[K, T]) -> int:
        """Memory of a GPU that its tasks take together with one more."""
        passing = min(self._passing_bytes + task.passing_bytes, max(self._passing_most, task.passing_most))
        return self._own_bytes + task.device_bytes + passing

    def add(self, ticket: Ticket[K, T]) -> None:
        task = ticket.task
        self.tickets.append(ticket)
        self.device_bytes = self.device_bytes_with(task)
        self._own_bytes += task.device_bytes
        self._passing_bytes += task.passing_bytes
        self._passing_most = max(self._passing_most, task.passing_most)
        self.host_bytes = max(self.host_bytes, task.host_bytes)

    def clear(self) -> list[Ticket[K, T]]:
        """Lets go of its tickets; gives them."""
        tickets, self.tickets = self.tickets, []
        self.device_bytes = self._own_bytes = self._passing_bytes = self._passing_most = 0
        self.host_bytes = 0
        return tickets
