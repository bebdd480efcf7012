"""The tasks that wait for a device: the longest first, those of one group together, none passed over for ever."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from shardesd.engine.places import Place, Worker
from shardesd.engine.work import Task, Ticket

T = TypeVar("T")
K = TypeVar("K")

MOST_PASSED_OVER = 32
"""After so many smaller tasks went before it for want of memory, a task is waited for."""
_LEAST_SHARE = 4  # of the best size of a group, the part that is not divided among GPUs


def share(left: int, most: int, here: int, others: Sequence[int]) -> int:
    """How many of the `left` tasks of a group a GPU takes at once, `most` being the best size.

    So many that each GPU has as many in work, where `here` are in work on this one and `others` on each other one:
    slots of one GPU don't divide them, since two small groups at once take longer than one.
    """
    even = -(-(left + here + sum(others)) // (1 + len(others)))
    return min(most, max(even - here, most // _LEAST_SHARE, 1))


def _order(ticket: Ticket[K, T]) -> tuple[float, int]:
    return -ticket.task.cost, ticket.number


class Ready(Generic[K, T]):
    """Not thread-safe: the engine holds its lock."""

    def __init__(self) -> None:
        self._tickets: list[Ticket[K, T]] = []  # the longest first
        self._groups = Counter[Hashable]()
        self._large = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket[K, T]]:
        return iter(self._tickets)

    def add(self, ticket: Ticket[K, T]) -> None:
        """Sorts it in: longest first, and of equally long ones the earliest."""
        if not self._tickets or _order(self._tickets[-1]) < _order(ticket):  # as it is among thousands of experts
            self._tickets.append(ticket)
        else:
            insort(self._tickets, ticket, key=_order)
        self._count(ticket, 1)

    def _count(self, ticket: Ticket[K, T], more: int) -> None:
        self._groups[ticket.task.group] += more
        self._large += more * ticket.task.large

    @property
    def all_large(self) -> bool:
        """Whether there are no small ones."""
        return self._large == len(self._tickets)

    def count(self, group: Hashable) -> int:
        """How many of a group there are."""
        return self._groups[group]

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
                self._count(ticket, -1)
                return ticket
            if ticket.passed_over >= MOST_PASSED_OVER:
                return None
            passed.append(ticket)
        return None

    def longest(
        self, place: Place[K, T], gpus: Sequence[Place[K, T]], fits: Callable[[Ticket[K, T]], bool], *, aside: bool
    ) -> Ticket[K, T] | None:
        """What is for this place now, of what is done aside or of all else; `gpus` are those that are still used."""
        gathered, choosy, only = place.gathered, place.is_gpu and place.large > 0, place.fallback and bool(gpus)
        left: dict[tuple[Hashable, int], bool] = {}

        def suits(ticket: Ticket[K, T]) -> bool:
            task = ticket.task
            if task.aside != aside or task.group in gathered:
                return False
            if choosy and task.large:
                kind = task.group, task.device_bytes
                if kind not in left:
                    left[kind] = place.leaves(task, self.count(task.group), gpus)
                if left[kind]:
                    return False
            return ticket.cpu_only if only else place.is_cpu or not ticket.cpu_only

        return self.take(fits, suits)

    def has_best(self, first: Task[K, T], here: Place[K, T], gpus: Sequence[Place[K, T]]) -> bool:
        """Whether a GPU that has taken the first of a group would now get as many as are solved together at best."""
        return self._groups[first.group] + 1 >= first.most and self._share(first, here, gpus) == first.most

    def _share(self, first: Task[K, T], here: Place[K, T], gpus: Sequence[Place[K, T]]) -> int:
        others = [gpu.in_work(first.group) for gpu in gpus if gpu is not here]
        return share(self._groups[first.group] + 1, first.most, here.in_work(first.group) - 1, others)

    def gather(self, worker: Worker[K, T], gpus: Sequence[Place[K, T]], host_bytes: float, device_bytes: float) -> None:
        """Gives a worker more tickets of its first one's group: its GPU's share of those that wait for `gpus`.

        They take no more than so much memory: on the host each, since one is read after the other, on the device
        together.
        """
        first, here = worker.tickets[0].task, worker.place
        most = self._share(first, here, gpus)
        kept: list[Ticket[K, T]] = []
        for at, ticket in enumerate(self._tickets):
            if len(worker.tickets) >= most:
                kept += self._tickets[at:]
                break
            task = ticket.task
            if (
                task.group == first.group
                and not (ticket.alone or ticket.cpu_only)
                and task.host_bytes <= host_bytes
                and worker.device_bytes_with(task) <= device_bytes
            ):
                worker.add(ticket)
                self._count(ticket, -1)
            else:
                kept.append(ticket)
        self._tickets = kept
