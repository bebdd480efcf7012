"""Threads that read the parts of a long range, at as few turns of the interpreter's lock as can be.

A card is fed some thirty gigabytes a second, in parts of a millisecond each; with a `ThreadPoolExecutor`, whose futures
take several turns of that lock a part, four threads that feed two cards wait a fifth longer (docs/performance.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any

_MOST = 16


class _Job:
    """Items, each of which one of several threads takes."""

    def __init__(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        self._work = work
        self._left = list(reversed(items))
        self._count = len(items)
        self._ended: list[BaseException | None] = []  # of every item that is done: what it raised
        self._all_ended = threading.Event()

    def help(self) -> None:
        """Takes items until none is left."""
        while True:
            try:
                item = self._left.pop()  # no two threads get the same: a list's own methods are not interrupted
            except IndexError:
                return
            raised: BaseException | None = None
            try:
                self._work(item)
            except BaseException as error:
                raised = error
            self._ended.append(raised)
            if len(self._ended) == self._count:
                self._all_ended.set()

    def finish(self) -> None:
        """Helps, and waits for the other threads; whatever happens. Raises what one of them, or Ctrl-C, raised."""
        raised: BaseException | None = None
        while len(self._ended) < self._count:
            try:
                self.help()
                self._all_ended.wait()
            except BaseException as error:
                raised = error
        for ended in self._ended:
            raised = raised or ended
        if raised is not None:
            raise raised


class Crew:
    """`size` threads that live as long as the process, but don't keep it from ending."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        for number in range(size):
            threading.Thread(target=self._serve, name=f"shardesd-reader-{number}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._jobs.get().help()

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """``work(item)`` of every item, by the calling thread and those of the crew.

        Returns when none is worked on any more; raises what one of them raised.
        """
        job = _Job(work, items)
        for _ in range(min(len(items) - 1, self._size)):
            self._jobs.put(job)
        job.finish()


@cache
def readers() -> Crew | None:
    """Of this process; None where there can be no two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 or not hasattr(os, "preadv"):
        return None
    return Crew(min(_MOST, cores))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=readers.cache_clear)  # a fork has none of these threads
