"""The listener that shows a batch's events on stderr while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardesd.events import BatchEvent, BatchFinished, BatchStarted, ModelDone, ModelFailed, Notice
from shardesd.show.batch_live import batch_picture
from shardesd.show.batch_plain import batch_lines
from shardesd.show.batch_progress import BatchProgress
from shardesd.show.display import PER_SECOND, is_live, on_stderr, writer
from shardesd.show.text import Lines, encodable

BatchListener = Callable[[BatchEvent], None]


@contextmanager
def batch_display(
    *, quiet: bool = False, verbose: bool = False, console: Console | None = None
) -> Iterator[BatchListener]:
    """A listener for a batch's events: a live picture on a terminal, plain lines elsewhere, failures with `quiet`.

    Of the picture, failures and notes stay as lines above it, and the end's lines in its place. The listener may be
    called from several threads.
    """
    live = is_live(console) and not quiet
    console = console or on_stderr()
    if live:
        with _live(console) as listener:
            yield listener
    else:
        yield _plain(console, quiet=quiet, verbose=verbose)


def _plain(console: Console, *, quiet: bool, verbose: bool) -> BatchListener:
    lock, write = threading.Lock(), writer(console)
    models = ended = 0

    def listen(event: BatchEvent) -> None:
        nonlocal models, ended
        with lock:
            if isinstance(event, BatchStarted):
                models, ended = event.models, event.models - event.left
            elif models and (
                isinstance(event, ModelDone) or (isinstance(event, ModelFailed) and event.again_in is None)
            ):
                ended += 1
            if not quiet or isinstance(event, ModelFailed):
                write(batch_lines(event, ended, models, verbose=verbose))

    return listen


@contextmanager
def _live(console: Console) -> Iterator[BatchListener]:
    progress = BatchProgress()
    lines = Lines(lambda width, height, alpha: batch_picture(progress.view(), width, height))
    ended: list[BatchFinished] = []

    def listen(event: BatchEvent) -> None:
        progress.add(event)
        if isinstance(event, BatchFinished):
            ended.append(event)
        elif isinstance(event, ModelFailed | Notice):
            # Outside of the progress's lock: the screen's own thread takes both, in the other order.
            _keep(console, batch_lines(event, 0, 0))

    with Live(
        console=console,
        get_renderable=lambda: lines,
        refresh_per_second=PER_SECOND,
        transient=True,
        redirect_stdout=False,
    ):
        yield listen
    for event in ended:
        _keep(console, batch_lines(event, 0, 0))


def _keep(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(Text(encodable(line, console.encoding)), highlight=False, soft_wrap=True)
