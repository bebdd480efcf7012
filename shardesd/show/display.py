"""The listener that puts a scan's events on the screen while it runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardesd.events import Event, Notice, RowDone, ScanFinished
from shardesd.show.live import picture
from shardesd.show.plain import PlainLines, failed_line, finished_line, skipped_line
from shardesd.show.progress import Progress
from shardesd.show.text import Lines, encodable, printable
from shardesd.show.unfailing import Unfailing

Listener = Callable[[Event], None]

PER_SECOND = 4


def on_stderr() -> Console:
    """What is shown there may be lost; no work depends on it."""
    return Console(file=cast(TextIO, Unfailing(sys.stderr)))


@contextmanager
def display(
    *, quiet: bool = False, verbose: bool = False, json: bool = False, console: Console | None = None
) -> Iterator[Listener]:
    """A listener for a scan's events, which shows them on stderr (or on `console`) until the context ends.

    A live picture on a terminal, plain lines elsewhere; nothing but failed matrices with `quiet`. With `verbose` every
    skipped tensor has its line too, and in plain lines every row. The live picture is gone when the context ends; a
    line that sums the scan up stays in its place where no report for a person follows on the same screen (with `json`,
    or where stdout is not a terminal). The listener may be called from several threads.
    """
    live = is_live(console)
    console = console or on_stderr()
    if quiet:
        yield _quiet(console)
    elif live:
        with _live(console, verbose=verbose, sum_up=json or not _isatty(sys.stdout)) as listener:
            yield listener
    else:
        yield _plain(console, verbose=verbose)


def _isatty(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    try:
        return bool(isatty and isatty())
    except ValueError:
        # A stream that is closed.
        return False


def is_live(console: Console | None) -> bool:
    if console is not None:
        return console.is_interactive
    # rich takes FORCE_COLOR as a terminal; a picture that redraws itself needs a real one.
    return _isatty(sys.stderr) and Console(stderr=True).is_interactive


def writer(console: Console) -> Callable[[list[str]], None]:
    """Writes plain lines past rich: nothing is wrapped, coloured or taken for markup."""

    def write(lines: list[str]) -> None:
        for line in lines:
            console.file.write(encodable(line, console.encoding) + "\n")
        if lines:
            console.file.flush()

    return write


def _quiet(console: Console) -> Listener:
    lock, write = threading.Lock(), writer(console)

    def listen(event: Event) -> None:
        if isinstance(event, RowDone) and event.row.status == "failed":
            with lock:
                write([failed_line(event.row)])

    return listen


def _plain(console: Console, *, verbose: bool) -> Listener:
    lock, write = threading.Lock(), writer(console)
    progress, plain = Progress(), PlainLines(verbose=verbose)

    def listen(event: Event) -> None:
        with lock:
            progress.add(event)
            write(plain.lines(event, progress.view))

    return listen


@contextmanager
def _live(console: Console, *, verbose: bool, sum_up: bool) -> Iterator[Listener]:
    progress = Progress()
    lines = Lines(lambda width, height, alpha: picture(progress.view(), width, height, alpha))

    def keep(text: str, style: str = "") -> None:
        """A line that stays, above the picture."""
        console.print(Text(encodable(text, console.encoding), style=style), highlight=False)

    def listen(event: Event) -> None:
        progress.add(event)
        # Printed outside of the progress's lock: the screen's own thread takes both, in the other order.
        match event:
            case Notice(message=message):
                keep(f"note: {printable(message)}")
            case RowDone(row=row) if verbose and row.status == "skipped":
                keep(skipped_line(row), "dim")
            case ScanFinished() if sum_up:
                keep(finished_line(event))
            case _:
                pass

    # stdout is not redirected: what is written to it is the result, and may go to a pipe.
    with Live(
        console=console,
        get_renderable=lambda: lines,
        refresh_per_second=PER_SECOND,
        transient=True,
        redirect_stdout=False,
    ):
        yield listen
