"""Tasks on a device: an outcome of each, whatever is raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardesd.engine.devices import Device
from shardesd.engine.work import Outcome, Task, Trouble
from shardesd.errors import bare

T = TypeVar("T")
K = TypeVar("K")

_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds after which a thread that had no memory to begin with tries again."""

RunMany = Callable[[Sequence[Task[K, T]], str], "Sequence[Outcome[K, T]]"]
"""Solves several together."""


def attempt(tasks: Sequence[Task[K, T]], device: str, run_many: RunMany[K, T] | None) -> Sequence[Outcome[K, T]]:
    """Several by `run_many`, which must be there then; what it raises, each of them has raised."""
    if len(tasks) > 1 and run_many is not None:
        try:
            return run_many(tasks, device)
        except Exception as error:
            return [Outcome(key=task.key, error=bare(error), device=device) for task in tasks]
    (task,) = tasks
    started = time.perf_counter()
    try:
        value = task.run(device)
    except Exception as error:
        return [Outcome(key=task.key, error=bare(error), device=device, seconds=time.perf_counter() - started)]
    return [Outcome(key=task.key, value=value, device=device, seconds=time.perf_counter() - started)]


def prepared(
    prepare: Callable[[Device], None], device: Device, classify: Callable[[Exception], Trouble]
) -> Exception | None:
    """Makes the calling thread ready for a device, with patience where others have its memory for a moment; gives what
    `prepare` raised in the end."""
    pauses = iter(_PAUSES)
    while True:
        try:
            prepare(device)
        except Exception as error:
            pause = next(pauses, None)
            if pause is None or device.name == "cpu" or classify(error) != "memory":
                return bare(error)
            time.sleep(pause)
        else:
            return None
