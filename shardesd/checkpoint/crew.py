"""Threads that read the parts of a long range, at as few turns of the interpreter's lock as can be.

A card is fed some thirty gigabytes a second, in parts of a millisecond each; with a `ThreadPoolExecutor`, whose futures
take several turns of that lock a part, four threads that feed two cards wait a fifth longer (docs/performance.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_MOST = 16


class _Job:
    """Items, each of which one of several threads takes. What is known of it is nothing once it has ended."""

    def __init__(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        self._work: Callable[[Any], None] | None = work
        self._left = list(reversed(items))
        self._changed = threading.Condition()
        self._helping = 0
        self._errors: list[BaseException] = []  # of the helpers

    def take(self) -> None:
        """Works on items until none is left. What one raises leaves none for the others."""
        try:
            while True:
                try:
                    item = self._left.pop()  # no two threads get the same: a list's own methods are not interrupted
                except IndexError:
                    return
                assert self._work is not None, "what has ended has no items left"
                self._work(item)
        except BaseException:
            self._left.clear()
            raise

    def help(self) -> None:
        """As `take`, in a thread of the crew."""
        with self._changed:
            self._helping += 1
        try:
            self.take()
        except BaseException as error:
            self._errors.append(error)
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()

    def end(self) -> BaseException | None:
        """Returns what one of the helpers raised, when nobody works on it any more, whatever happens; then raises what
        Ctrl-C, say, raised meanwhile."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    while self._helping:
                        self._changed.wait()
                break
            except BaseException as error:
                self._left.clear()
                interrupted = error
        # A helper that comes late, or never, keeps none of the caller's memory; nor do an error and its frames.
        self._work = None
        errors, self._errors = self._errors, []
        if interrupted is not None:
            raise interrupted
        return errors[0] if errors else None


class Crew:
    """As many of `size` threads as can be had. They live as long as the process, but don't keep it from ending."""

    def __init__(self, size: int) -> None:
        self.size = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        with suppress(RuntimeError):  # the system allows no more
            for number in range(size):
                threading.Thread(target=self._serve, name=f"shardesd-reader-{number}", daemon=True).start()
                self.size += 1

    def _serve(self) -> None:
        while True:
            self._jobs.get().help()

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """``work(item)`` of every item, by the calling thread and those of the crew.

        Returns when none is worked on any more; raises what one of them raised, after which none is begun.
        """
        job = _Job(work, items)
        try:
            for _ in range(min(len(items) - 1, self.size)):
                self._jobs.put(job)
            job.take()
        finally:
            error = job.end()
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it and this frame would keep each other


_making = threading.Lock()
_crews: list[Crew] = []


def readers() -> Crew:
    """Of this process: as many as there are cores, sixteen at most, and none where one core does all."""
    if not _crews:
        with _making:
            if not _crews:
                _crews.append(Crew(_size()))
    return _crews[0]


def _size() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST, cores) if cores > 1 and hasattr(os, "preadv") else 0


if hasattr(os, "register_at_fork"):
    # A fork has none of these threads, and takes the lock as it is.
    os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)
    os.register_at_fork(after_in_child=_crews.clear)
