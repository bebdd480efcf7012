"""Threads that don't keep the interpreter alive, but are waited for when it exits; and what is closed before that.

A daemon thread that is within torch when the interpreter goes takes the whole process down (SIGABRT).
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_EXIT_SECONDS = 60.0  # a matrix in work is waited for so long


class Closable(Protocol):
    """What ends its threads when it is closed."""

    def close(self) -> None: ...


_started: set[threading.Thread] = set()
_open: list[weakref.ref[Closable]] = []
_registered: list[object] = []


def start(target: Callable[..., None], name: str, *args: object) -> None:
    """Starts a thread that `_wait` waits for."""
    _register()
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    # Those that have ended are found here: when its target is done a thread hasn't, and what is local to it, a GPU's
    # buffers too, goes then.
    _started.difference_update([one for one in list(_started) if not one.is_alive()])
    thread.start()
    _started.add(thread)


def close_at_exit(what: Closable) -> None:
    """Has `what` closed at exit, if it is still there, in the order of these calls: a generator left open, say.

    Else it would be closed when there are no threads any more, and wait for them for ever.
    """
    _register()
    _open[:] = [one for one in list(_open) if one() is not None]
    _open.append(weakref.ref(what))


def _register() -> None:
    if not _registered:
        _registered.append(atexit.register(_wait))


def _wait() -> None:
    for one in list(_open):
        if (what := one()) is not None:
            with suppress(Exception):  # such as of a generator that another thread is in: nobody listens
                what.close()
    until = time.monotonic() + _EXIT_SECONDS
    for thread in list(_started):
        thread.join(max(0.0, until - time.monotonic()))
