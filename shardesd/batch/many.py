"""`scan_many`: a batch for Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shardesd.batch.listing import as_list, read_list
from shardesd.batch.model import ListRow
from shardesd.batch.runner import Batch
from shardesd.engine import close_at_exit
from shardesd.errors import OptionError
from shardesd.events import BatchEvent
from shardesd.options import BatchOptions, OutputOptions, ScanOptions
from shardesd.results import Result, load_result


def scan_many(
    models: str | os.PathLike[str] | Iterable[str | Mapping[str, Any] | ListRow],
    *,
    out: str | os.PathLike[str],
    format: str = "csv",
    overwrite: bool = False,
    show_skipped: bool = False,
    options: ScanOptions | None = None,
    batch: BatchOptions | None = None,
    on_event: Callable[[BatchEvent], None] | None = None,
    stop: threading.Event | None = None,
    **changes: Any,
) -> Iterator[Result]:
    """The results of many models, each as soon as it is done; those that earlier runs have done come first.

    `models` is the path of a list (see `read_list`), or ids and mappings with a list's columns (``full_name``,
    ``revision``, ``source_model``, ``base_model_relation``, and any others). Everything is kept in `out` as by the
    command line, with which it shares claims and resuming. A model that fails has no result: `on_event` is told
    (`events.ModelFailed`), and ``out/failed_models.csv`` says why. `changes` are fields of `ScanOptions` and of
    `BatchOptions` (``fix_fingers="DKS"``, ``workers=2``). Closing the iterator, or `stop`, ends the work after the
    matrices in flight. Raises `ShardesdError` for what concerns all models.
    """
    scan_names = {field.name for field in fields(ScanOptions)}
    batch_names = {field.name for field in fields(BatchOptions)}
    for name in changes:
        if name not in scan_names | batch_names:
            known = ", ".join(sorted(scan_names | batch_names))
            raise OptionError(f"option '{name}' is unknown (expected one of: {known})")
    listed = read_list(models) if isinstance(models, str | os.PathLike) else as_list(models)
    work = Batch(
        listed,
        output=OutputOptions(out=os.fspath(out), format=format, overwrite=overwrite, show_skipped=show_skipped),
        scan=replace(options or ScanOptions(), **{k: v for k, v in changes.items() if k in scan_names}),
        batch=replace(batch or BatchOptions(), **{k: v for k, v in changes.items() if k in batch_names}),
        on_event=on_event or (lambda event: None),
        stop=stop,
    )

    def results() -> Generator[Result, None, None]:
        for row in work.run():
            yield load_result(Path(out), row.model_id, row.revision, show_skipped=show_skipped)

    found = results()
    close_at_exit(found)
    return found
