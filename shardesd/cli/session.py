"""What every command does around its work: errors as one line and an exit code, and an orderly end on Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import typer

from shardesd.errors import ResultsError, ShardesdError


@cache
def keep_what_is_loaded() -> None:
    """Once the first scan starts, the collector of cycles leaves alone what has been imported: to look through torch
    takes it a tenth of a second, several times in a scan of thousands of matrices (docs/performance.md)."""
    gc.freeze()


@contextmanager
def errors(verbose: bool) -> Iterator[None]:
    """One line on stderr and exit code 1 for what a user can mend; a traceback only when it is asked for."""
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except ShardesdError as error:
        _fail(str(error), verbose)
    except BrokenPipeError:
        # The reader of stdout (`head`, say) has gone: nothing is left to say to it.
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        _fail("interrupted", verbose)
    except Exception as error:
        _fail(f"unexpected {type(error).__name__}: {error} (--verbose shows where; please report it)", verbose)


def tell(line: str) -> None:
    """On stdout, at once. Raises as `on_stdout` does."""
    with on_stdout():
        typer.echo(line)


@contextmanager
def on_stdout(more: str = "") -> Iterator[None]:
    """Raises `ResultsError`, with `more` words, where stdout takes nothing; BrokenPipeError where nobody reads it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(error, more) from error


def unwritable(error: OSError, more: str = "") -> ResultsError:
    """What is said where stdout takes nothing."""
    return ResultsError(f"can't write to stdout: {(error.strerror or str(error)).lower()}{more}")


def say(line: str) -> None:
    """On stderr; lost where that takes nothing, since no work may depend on it."""
    with suppress(OSError):
        typer.echo(line, err=True)


def _fail(message: str, verbose: bool) -> NoReturn:
    if verbose:
        import traceback

        with suppress(OSError):
            traceback.print_exc()
    say(f"error: {' '.join(message.split())}")
    raise typer.Exit(1)


@contextmanager
def interruptible(
    show: Callable[[Any], None], now: Callable[[], None] = lambda: None, words: str = "the matrices in flight are done"
) -> Iterator[threading.Event]:
    """SIGINT or SIGTERM once: finish what is in flight and keep it. Twice: `now`, and stop."""
    stop = threading.Event()
    from shardesd.events import Notice

    notice = Notice(message=f"stopping when {words} (Ctrl-C again: now)")

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            now()
            os._exit(128 + number)
        stop.set()
        # In a thread, since the interrupted one may hold the display's lock.
        threading.Thread(target=show, args=(notice,), daemon=True).start()

    signals = (signal.SIGINT, signal.SIGTERM)
    before: list[Callable[[int, FrameType | None], Any] | int | None] = [signal.signal(s, handle) for s in signals]
    try:
        yield stop
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def at_once() -> Iterator[None]:
    """Ctrl-C ends the process at once, where nothing is written: its threads may wait for a server for long."""

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"error: interrupted\n")
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def on_hangup(action: Callable[[], None]) -> Iterator[None]:
    """`action` in a thread of its own whenever SIGHUP comes, where the system has it."""
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None:
        yield
        return
    before = signal.signal(hangup, lambda number, frame: threading.Thread(target=action, daemon=True).start())
    try:
        yield
    finally:
        signal.signal(hangup, before)
