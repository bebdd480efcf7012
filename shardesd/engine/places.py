"""The devices in use, and the threads that work there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardesd.engine.devices import Device
from shardesd.engine.work import Ticket

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class Place(Generic[K, T]):
    """A device in use."""

    device: Device
    workers: list[Worker[K, T]] = field(default_factory=list)
    done: int = 0
    retired: str = ""
    told_of_memory: bool = False
    fallback: bool = False
    """Only for what no other device can do, while there is one."""

    @property
    def is_cpu(self) -> bool:
        return self.device.name == "cpu"

    @property
    def device_bytes(self) -> int:
        return sum(ticket.task.device_bytes for worker in self.workers for ticket in worker.tickets)

    @property
    def host_bytes(self) -> int:
        """Tasks that are solved together are read one after the other, so the largest of them counts."""
        working = (worker.tickets for worker in self.workers if worker.tickets)
        return sum(max(ticket.task.host_bytes for ticket in tickets) for tickets in working)


@dataclass(slots=True, eq=False)
class Worker(Generic[K, T]):
    """One slot: its thread, and what it works on."""

    place: Place[K, T]
    tickets: list[Ticket[K, T]] = field(default_factory=list)
    since: float = 0.0
    abandoned: bool = False
