"""The log file of one process of a batch: everything that happens, with times."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from shardesd.errors import OptionError
from shardesd.events import (
    BatchEvent,
    BatchFinished,
    BatchStarted,
    Fetching,
    GpuChanged,
    MatrixStarted,
    ModelDone,
    ModelEvent,
    ModelFailed,
    ModelStarted,
    Notice,
    RowDone,
    ScanFinished,
    ScanStarted,
    ShardDone,
    ShardOpened,
)
from shardesd.options import LOG_LEVELS
from shardesd.results import make_folders

_log = logging.getLogger("shardesd.batch.events")


@contextmanager
def log_file(out: Path, level: str, name: str = "batch") -> Iterator[Callable[[BatchEvent], None]]:
    """A listener that writes to a new file in ``out/logs``, as does whatever shardesd's own loggers say meanwhile.

    `level` is one of `options.LOG_LEVELS`; ``debug`` has every shard and matrix too. The process's other logging stays
    as it is. Raises `OptionError` and `ResultsError`.
    """
    if level not in LOG_LEVELS:
        raise OptionError(f"--log-level '{level}' is invalid (expected one of: {', '.join(LOG_LEVELS)})")
    make_folders([out / "logs"])
    host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "host"
    path = out / "logs" / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{host}-{os.getpid()}.log"
    handler = _Unfailing(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logger = logging.getLogger("shardesd")
    before = logger.level
    handler.setLevel(level.upper())
    logger.addHandler(handler)
    logger.setLevel(min(filter(None, (handler.level, before or logging.WARNING))))
    try:
        yield _note
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


class _Unfailing(logging.FileHandler):
    """A full disk costs the log its lines; nothing of it comes onto the screen, where an error of its own stands."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _note(event: BatchEvent) -> None:
    if isinstance(event, ModelEvent):
        level, text = _inner(event)
        text = f"{event.model}: {text}"
    else:
        level, text = _outer(event)
    if level:
        _log.log(level, "%s", text)


def _outer(event: BatchEvent) -> tuple[int, str]:
    match event:
        case BatchStarted():
            size = "" if event.total_bytes is None else f", {event.total_bytes:,} bytes"
            counts = f"{event.done} done, {event.failed} failed, {event.left} left{size}"
            return logging.INFO, f"process {os.getpid()} begins: {event.models} models, {counts}"
        case ModelStarted():
            again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
            return logging.INFO, f"{event.model}: started{again}"
        case ModelDone():
            other = " by another process" if event.by_other else ""
            return (
                logging.WARNING if event.failed else logging.INFO,
                f"{event.model}: done{other}: {event.analysed} matrices, {event.failed} failed, {event.seconds:.1f} s",
            )
        case ModelFailed():
            again = "" if event.again_in is None else f"; again in {event.again_in:.0f} s"
            other = " in another process" if event.by_other else ""
            what = f"failed{other} ({event.stage}, {event.reason}, attempt {event.attempts})"
            return logging.ERROR, f"{event.model}: {what}: {event.message}{again}"
        case GpuChanged():
            held = "" if event.others_bytes is None else f", others hold {event.others_bytes / 1e6:.0f} MB"
            return logging.INFO, f"{event.gpu}: {event.state}{held}{f' ({event.why})' if event.why else ''}"
        case BatchFinished():
            word = "interrupted" if event.interrupted else "finished"
            return (
                logging.INFO,
                f"{word}: {event.done} done, {event.failed} failed, {event.left} left, {event.seconds:.1f} s",
            )
        case Notice():
            return logging.WARNING, event.message
        case _:
            return logging.DEBUG, str(event)


def _inner(event: ModelEvent) -> tuple[int, str]:
    inner = event.event
    match inner:
        case ScanStarted():
            resumed = f", {inner.resumed} rows from before" if inner.resumed else ""
            commit = f" at {inner.commit}" if inner.commit else ""
            return logging.INFO, f"{inner.shards} shards, {inner.matrices} matrices{commit}{resumed}"
        case Notice():
            return logging.INFO, inner.message
        case RowDone() if inner.row.status == "failed":
            return logging.WARNING, f"{inner.row.longname} failed: {inner.row.reason}"
        case RowDone():
            row = inner.row
            words = f"skipped: {row.reason}" if row.status == "skipped" else f"alpha {row.alpha}, {row.seconds} s"
            return logging.DEBUG, f"{row.longname}: {words}"
        case ShardOpened() | ShardDone():
            return logging.DEBUG, f"shard {inner.number} {inner.shard} {type(inner).__name__[5:].lower()}"
        case MatrixStarted():
            return logging.DEBUG, f"{inner.longname} on {inner.device}"
        case Fetching() if inner.done in (0, inner.total):
            return logging.DEBUG, f"download of {inner.shard}: {inner.done} of {inner.total} bytes"
        case ScanFinished() | Fetching():
            return logging.NOTSET, ""
        case _:
            return logging.DEBUG, str(inner)
