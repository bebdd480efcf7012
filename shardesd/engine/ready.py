"""The tasks that wait for a device: the longest first, those of one group together, none passed over for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from shardesd.engine.places import Worker
from shardesd.engine.work import Ticket

T = TypeVar("T")
K = TypeVar("K")

MOST_PASSED_OVER = 32
"""After so many smaller tasks went before it for want of memory, a task is waited for."""


class Ready(Generic[K, T]):
    """Not thread-safe: the engine holds its lock."""

    def __init__(self) -> None:
        self._tickets: list[Ticket[K, T]] = []  # the longest first

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket[K, T]]:
        return iter(self._tickets)

    def add(self, ticket: Ticket[K, T]) -> None:
        """Sorts it in: longest first, and of equally long ones the earliest."""
        key = (-ticket.task.cost, ticket.number)
        low, high = 0, len(self._tickets)
        while low < high:
            middle = (low + high) // 2
            other = self._tickets[middle]
            if (-other.task.cost, other.number) < key:
                low = middle + 1
            else:
                high = middle
        self._tickets.insert(low, ticket)

    def take(self, fits: Callable[[Ticket[K, T]], bool], suits: Callable[[Ticket[K, T]], bool]) -> Ticket[K, T] | None:
        """The longest ticket that `suits` the device and `fits` into its memory; None where there is none now.

        One that suits but doesn't fit lets smaller ones go before it, up to `MOST_PASSED_OVER` times.
        """
        passed: list[Ticket[K, T]] = []
        for at, ticket in enumerate(self._tickets):
            if not suits(ticket):
                continue
            if fits(ticket):
                for other in passed:
                    other.passed_over += 1
                del self._tickets[at]
                return ticket
            if ticket.passed_over >= MOST_PASSED_OVER:
                return None
            passed.append(ticket)
        return None

    def take_like(self, worker: Worker[K, T], most: int, fits: Callable[[Ticket[K, T]], bool]) -> None:
        """Gives a worker more tickets of its first one's group while they fit beside those, up to `most` in all."""
        group = worker.tickets[0].task.group
        for ticket in list(self._tickets):
            if len(worker.tickets) == most:
                return
            if ticket.task.group == group and not (ticket.alone or ticket.cpu_only) and fits(ticket):
                self._tickets.remove(ticket)
                worker.add(ticket)
