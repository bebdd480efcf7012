"""One model's scan as a part of a batch, whatever comes of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from shardesd import spectra
from shardesd.batch.failures import Failure, classify
from shardesd.batch.model import ListRow
from shardesd.engine import Engine
from shardesd.errors import Held
from shardesd.events import Event, Notice, ScanFinished, ScanStarted
from shardesd.options import OutputOptions, ScanOptions
from shardesd.results import ModelStore, find_finished
from shardesd.scanner import scan

_log = logging.getLogger(__name__)


def as_asked(row: ListRow, output: OutputOptions) -> None:
    """Writes a finished model's table in the format that is asked for, where it is there only in another; asks no
    server. Raises `ResultsError` and `NoSpace`."""
    store = ModelStore(output.out, row.model_id, row.revision, output.format, show_skipped=output.show_skipped)
    if store.table_path.exists() and not output.show_skipped:
        return
    finished = find_finished(store.out, row.model_id, row.revision)
    with suppress(Held), store:  # whoever holds it does the same
        if finished is not None:
            store.begin(finished.fingerprint, overwrite=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came of an attempt."""

    state: Literal["done", "failed", "interrupted", "held"]
    """``held``: another process writes this model's results."""
    analysed: int = 0
    failed: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


def attempt(
    row: ListRow,
    *,
    output: OutputOptions,
    options: ScanOptions,
    engine: Engine | None,
    emit: Callable[[Event], None],
    stop: threading.Event,
    lost: threading.Event,
) -> Ended:
    """Scans one model. Once `lost` is set (another process has the claim), it stops and its failure is nobody's."""
    started = time.monotonic()
    ended: list[ScanFinished] = []
    stage = "source"

    def listen(event: Event) -> None:
        nonlocal stage
        if isinstance(event, ScanStarted):
            stage = "analysis"
        elif isinstance(event, ScanFinished):
            ended.append(event)
        if lost.is_set():
            stop.set()
        emit(event)

    try:
        scan(
            row.model,
            revision=row.revision,
            out=output.out,
            format=output.format,
            overwrite=output.overwrite,
            show_skipped=output.show_skipped,
            options=options,
            on_event=listen,
            stop=stop,
            engine=engine,
            base=row.base,
        )
    except Held as error:
        emit(Notice(message=str(error)))
        return Ended(state="held")
    except Exception as error:
        if lost.is_set():
            return Ended(state="held")
        failure = classify(error, out_of_memory=lambda error: spectra.trouble(error) == "memory", stage=stage)
        level = logging.ERROR if failure.reason == "unexpected" else logging.DEBUG
        _log.log(level, "%s failed", row.name, exc_info=error)
        return Ended(state="failed", failure=failure)
    if ended[-1].interrupted:
        return Ended(state="interrupted")
    return Ended(state="done", analysed=ended[-1].analysed, failed=ended[-1].failed, seconds=time.monotonic() - started)
