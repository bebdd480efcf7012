"""What the engine carries: tasks in, outcomes out, and the state that it can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from shardesd.frozen import record

T = TypeVar("T")
K = TypeVar("K")

Trouble = Literal["task", "memory", "device"]
"""What an exception of a task means: the task itself is at fault; there was no memory; the device is lost."""


@record(frozen=True, slots=True, kw_only=True)
class Task(Generic[K, T]):
    """One piece of work, which any device can do."""

    key: K
    run: Callable[[str], T]
    """``run(device name)``."""
    host_bytes: int = 0
    """Host memory that it takes while it runs."""
    device_bytes: int = 0
    """Memory of a GPU that it takes while it runs there."""
    passing_bytes: int = 0
    passing_most: int = 0
    """And for what is on its way through that memory: of each, but never more than that of all solved together."""
    cost: float = 0.0
    """How long it takes, in any unit: the longest of what is ready goes first."""
    deadline: float = float("inf")
    """Seconds of work after which it counts as hung."""
    gpu_deadline: float | None = None
    """The same on a GPU, where it differs."""
    patience: float = 0.0
    """Seconds more, which tasks that are solved together are given once: for what isn't work."""
    group: Hashable = None
    """Tasks of one group may be solved together on a GPU; None: never."""
    most: int = 1
    """How many of its group are solved together at best."""
    large: bool = False
    """Of large ones a GPU leaves a slot to others: three groups run where it has four."""
    aside: bool = False
    """Little work, for a CPU: done by a thread of its own, whose waits for disks and locks cost the devices nothing."""


@record(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[K, T]):
    """What became of a task: a value, or the exception that ended it."""

    key: K
    value: T | None = None
    error: Exception | None = None
    device: str = ""
    seconds: float = 0.0
    """Wall-clock; of tasks that were solved together, each one's share."""


@record(frozen=True, slots=True, kw_only=True)
class DeviceState(Generic[K]):
    """One device at one moment."""

    name: str
    working: tuple[K, ...] = ()
    done: int = 0
    device_bytes: int = 0
    retired: str = ""
    """Why it is used no more."""


@record(frozen=True, slots=True, kw_only=True)
class State(Generic[K]):
    """The engine at one moment."""

    devices: tuple[DeviceState[K], ...] = ()
    ready: int = 0
    """Tasks that wait for a device."""
    host_bytes: int = 0
    """Host memory of the tasks that run."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[K, T]):
    """A task on its way through the engine: how often it was tried, and where it may still go."""

    task: Task[K, T]
    number: int
    alone: bool = False
    """Had no memory beside others: is tried once more with the device to itself."""
    cpu_only: bool = False
    passed_over: int = 0
    delivered: bool = field(default=False)


@record(frozen=True, slots=True)
class FeedError:
    """The caller's iterator of tasks raised: its exception ends `map`, after the tasks before it."""

    error: BaseException
