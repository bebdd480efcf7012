"""Composes one model's scan: opens the place, resumes what is there, runs the pipeline, keeps the results."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardesd import matrices, spectra
from shardesd.engine import Device, Engine, available_memory, close_at_exit, cpu_device, discover, peak_memory
from shardesd.errors import OptionError
from shardesd.events import Event, Notice, ScanFinished, ScanStarted
from shardesd.keep import Keep
from shardesd.opening import What, open_what
from shardesd.options import OutputOptions, ScanOptions
from shardesd.pipeline import Pipeline
from shardesd.records import Row, Spectrum, is_of
from shardesd.results import MemoryStore, ModelStore, Result
from shardesd.version import __version__

if TYPE_CHECKING:
    import torch


def scan(
    model: str | os.PathLike[str] | torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
    *,
    revision: str | None = None,
    base: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    minus: str | os.PathLike[str] | None = None,
    lora_alpha: float | None = None,
    allow_residual_base: bool = False,
    out: str | os.PathLike[str] | None = None,
    format: str = "csv",
    overwrite: bool = False,
    show_skipped: bool = False,
    options: ScanOptions | None = None,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
    engine: Engine | None = None,
    **changes: Any,
) -> Result:
    """The spectra and metrics of every weight matrix of `model`.

    `model` is a local folder or file, a Hub repo (``org/name``, ``org/name@revision``, ``hf://…``), a live
    `torch.nn.Module` (a `peft.PeftModel` too) or a state dict. An adapter is merged into its base, which `base` names
    in place of the adapter's own config; `adapter` names one or several to be merged, in order, into `model` or
    `base`. `minus` is a checkpoint to be subtracted. `lora_alpha` is α of LoRA weights without a config;
    `allow_residual_base` says that the base given is the one that an initialisation such as pissa has changed.

    With `out`, tables are written there and an unfinished scan is continued; without it no results are. `changes`
    are fields of `ScanOptions` (``fix_fingers="DKS"``). Once `stop` is set, the matrices in flight are finished and an
    incomplete result is given. `engine` carries the work in place of one made for this scan (`options.device` and
    `max_memory` are its matter then). Raises `ShardesdError`.
    """
    output = None
    if out is not None:
        output = OutputOptions(out=cast(str, out), format=format, overwrite=overwrite, show_skipped=show_skipped)
    what = What(
        model=model,
        revision=revision,
        base=base,
        adapters=_several(adapter),
        minus=minus,
        lora_alpha=lora_alpha,
        allow_residual_base=allow_residual_base,
    )
    run = _Scan(what, _options(options, changes), output, on_event, stop, show_skipped, engine)
    for _ in run.rows():
        pass
    return run.result()


def stream(
    model: str | os.PathLike[str] | torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
    *,
    revision: str | None = None,
    base: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    minus: str | os.PathLike[str] | None = None,
    options: ScanOptions | None = None,
    on_event: Callable[[Event], None] | None = None,
    **changes: Any,
) -> Iterator[Row]:
    """Rows as they come: analysed and failed ones, in the order in which they are done. Nothing is written.

    Arguments as for `scan`. Closing the iterator ends the scan.
    """
    what = What(model=model, revision=revision, base=base, adapters=_several(adapter), minus=minus)
    rows = _Scan(what, _options(options, changes), None, on_event, None).rows()
    close_at_exit(rows)
    return rows


def _several(adapter: Any) -> tuple[Any, ...]:
    return tuple(adapter) if isinstance(adapter, Iterable) and not isinstance(adapter, str) else (adapter,)


def make_engine(options: ScanOptions, devices: tuple[Device, ...], notice: Callable[[str], None]) -> Engine:
    """The engine of a scan with these options, on these devices."""
    return Engine(
        devices,
        budget=options.max_memory or available_memory() // 2,
        fallback=cpu_device(),
        prepare=lambda device: spectra.prepare_worker(device.name, device.threads),
        classify=spectra.trouble,
        notice=notice,
    )


def open_keep(options: ScanOptions, warn: Callable[[str], None] = lambda words: None) -> Keep:
    """Where λ are kept by content, as `options` have it."""
    return Keep(options.cache_dir, options.max_cache, warn)


def _options(options: ScanOptions | None, changes: Mapping[str, Any]) -> ScanOptions:
    if options is not None and not isinstance(options, ScanOptions):
        raise OptionError(f"options={options!r} is invalid (expected ScanOptions)")
    known = [field.name for field in fields(ScanOptions)]
    for name in changes:
        if name not in known:
            raise OptionError(f"option '{name}' is unknown (expected one of: {', '.join(known)})")
    return replace(options or ScanOptions(), **changes)


_told: set[str] = set()
"""GPUs of this process of which it was said that the batched solver is missing there."""
_telling = threading.Lock()


def _first_to_tell(device: str) -> bool:
    with _telling:
        first = device not in _told
        _told.add(device)
    return first


class _Scan:
    def __init__(
        self,
        what: What,
        options: ScanOptions,
        output: OutputOptions | None,
        on_event: Callable[[Event], None] | None,
        stop: threading.Event | None,
        show_skipped: bool = False,
        engine: Engine | None = None,
    ) -> None:
        self._started = time.perf_counter()
        self._options = options
        self._output = output
        self._emit = on_event or (lambda event: None)
        self._stop = stop or threading.Event()
        self._table = matrices.user_table(options.layout)
        self._engine = engine
        opened = self._opened = open_what(what, options)
        self._checkpoint = opened.checkpoint
        self._template = Row(
            model_id=opened.model_id,
            revision=opened.revision,
            is_adapter=opened.is_adapter,
            source_model=opened.source_model,
            longname="",
        )
        self._store: ModelStore | MemoryStore = (
            MemoryStore(opened.model_id, opened.revision, show_skipped=show_skipped)
            if output is None
            else ModelStore(output.out, opened.model_id, opened.revision, output.format, show_skipped=show_skipped)
        )
        self._skipped: dict[str, Row] = {}
        self._files: tuple[Path, ...] = ()
        self._nbytes = 0
        self._resumed = 0
        self._kept = 0
        self._routines = Counter[str]()
        self._recomputed = 0
        self._unbatched: dict[str, str] = {}  # GPU → a note that the batched solver is missing there

    def rows(self) -> Generator[Row, None, None]:
        """Runs the scan. Rows of an earlier run come first."""
        options = self._options
        devices = self._engine.devices if self._engine else discover(options.device, options.gpu_memory_fraction)
        with closing(self._checkpoint), self._store:
            begun = self._store.begin(
                self._fingerprint(), overwrite=self._output is not None and self._output.overwrite
            )
            counts = Counter[str]()
            for row in begun.rows:
                if row.status != "skipped":
                    counts[row.status] += 1
                    yield row
                elif begun.state == "done":  # else they are seen again, and may be called otherwise
                    self._skipped[row.longname] = row
            if begun.state == "done":
                self._done_already(counts, begun.table)
                return
            self._resumed = counts.total()
            engine = self._engine or make_engine(options, devices, lambda text: self._emit(Notice(message=text)))
            done = {row.longname: begun.tensors.get(row.longname) for row in begun.rows if row.status != "skipped"}
            pipeline = Pipeline(
                self._checkpoint,
                self._options,
                engine,
                self._template,
                table=self._table,
                done=done,
                emit=self._emit,
                stop=self._stop,
                skipped=self._skipped,
                keep=open_keep(self._options, self._note) if self._options.cache else None,
            )
            self._announce(pipeline, [device.name for device in devices])
            first = devices[0] if devices else cpu_device()
            with spectra.blas_threads(first.threads, on_cpu=first.name == "cpu"):
                for analysed in pipeline.rows():
                    self._store.append(analysed.row, analysed.eigs, pipeline.owners[analysed.row.longname])
                    counts[analysed.row.status] += 1
                    self._nbytes += analysed.nbytes
                    self._kept += analysed.kept
                    if analysed.spectrum is not None and not analysed.kept:
                        self._note_routine(analysed.spectrum)
                    yield analysed.row
            if not self._stop.is_set():
                owners = pipeline.owners
                self._say_what_met_nothing(owners)
                earlier = [row for row in begun.rows if row.longname in done]
                gone = [row.status for row in earlier if not is_of(done[row.longname], owners.get(row.longname))]
                counts.subtract(gone)
                self._resumed -= len(gone)
                for row in self._skipped.values():
                    self._store.append(row, None)
                self._files = self._store.finish(
                    order=matrices.natural_key,
                    stats=pipeline.statistics.rows(self._template, self._store.eigs) if self._options.stats else None,
                    provenance=self._provenance([device.name for device in devices])
                    | ({"tensors": owners} if pipeline.names_meet() else {}),
                    amend=lambda row: _with_params(row, pipeline.params(row.longname, row.params)),
                    owners=owners,
                )
            self._emit(self._finished(counts, interrupted=self._stop.is_set()))

    def result(self) -> Result:
        """What `rows` has gathered."""
        return self._store.result()

    def _announce(self, pipeline: Pipeline, devices: list[str]) -> None:
        checkpoint = self._checkpoint
        total, exact = pipeline.total()
        sizes = [shard.size for shard in checkpoint.shards]
        self._emit(
            ScanStarted(
                model_id=self._opened.model_id,
                revision=self._opened.revision,
                commit=checkpoint.source.commit,
                shards=len(checkpoint.shards),
                total_bytes=None if None in sizes else sum(size or 0 for size in sizes),
                matrices=total,
                exact=exact,
                devices=tuple(devices),
                out=None if self._output is None else self._output.out,
                resumed=self._resumed,
            )
        )
        for note in (*self._opened.notes, *checkpoint.notes):
            self._note(note)

    def _note(self, message: str) -> None:
        self._emit(Notice(message=message))

    def _note_routine(self, spectrum: Spectrum) -> None:
        """Counts what computed λ, and notes a GPU that has to do without the batched solver; said once in a process."""
        self._routines[spectrum.routine or ""] += 1
        self._recomputed += spectrum.recomputed
        device = spectrum.device
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index or device in self._unbatched:
            return
        if reason := spectra.missing_batched(int(index)):
            words = f"{device}: {reason}; cuSOLVER's own solvers take its place, several times slower"
            self._unbatched[device] = words
            if _first_to_tell(device):
                self._note(words)

    def _say_what_met_nothing(self, owners: Mapping[str, str]) -> None:
        """`owners`: longname → tensor."""
        longnames, layout = owners.keys(), self._options.layout
        # The file may be for others of many models, or for tensors that an adapter leaves alone.
        if layout and longnames and self._engine is None and not self._options.delta:
            tensors = {matrices.parse_name(tensor).longname for tensor in owners.values()}
            for row in self._table.unmet(tensors, self._checkpoint.config):
                models = f" in a model of type {' or '.join(row.models)}" if row.models else ""
                self._note(f"--layout {layout}: names '{row.names}' matches no tensor{models}")
        for glob in self._options.include:
            if longnames and not any(fnmatchcase(longname, glob) for longname in longnames):
                example = min(longnames, key=matrices.natural_key)
                self._note(f"--include '{glob}' matches no longname (such as {example})")

    def _done_already(self, counts: Counter[str], table: Path | None) -> None:
        self._files = self._store.result().files
        asked = self._files[0] if self._files else None
        words = f"taken from {table}" if table == asked else f"{asked} is made from {table}"
        self._emit(Notice(message=f"already done: {words} (--overwrite computes it again)"))
        self._emit(self._finished(counts))

    def _finished(self, counts: Counter[str], *, interrupted: bool = False) -> ScanFinished:
        return ScanFinished(
            model_id=self._opened.model_id,
            analysed=counts["ok"],
            failed=counts["failed"],
            skipped=_reasons(self._skipped.values()),
            seconds=time.perf_counter() - self._started,
            files=tuple(str(path) for path in self._files),
            interrupted=interrupted,
        )

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for earlier rows to be this scan's rows."""
        return {
            "weights": self._checkpoint.identity(),
            "options": self._options.numbers(),
            "shardesd": ".".join(__version__.split(".")[:2]),
        }

    def _provenance(self, devices: list[str]) -> dict[str, Any]:
        checkpoint = self._checkpoint
        return {
            "model_id": self._opened.model_id,
            "revision": self._opened.revision,
            "source_model": self._opened.source_model,
            "commit": checkpoint.source.commit,
            "location": checkpoint.source.location,
            "shards": checkpoint.digests(),
            "notes": [*checkpoint.notes, *self._unbatched.values()],
            "options": asdict(self._options),
            "versions": {"shardesd": __version__, "python": platform.python_version(), **_versions()},
            "platform": platform.platform(),
            "devices": devices,
            "skipped": _reasons(self._skipped.values()),
            "seconds": round(time.perf_counter() - self._started, 3),
            "rows_resumed": self._resumed,
            "rows_kept": self._kept,
            "eigensolvers": dict(self._routines.most_common()),
            "recomputed": self._recomputed,
            "bytes_read": self._nbytes,
            "peak_memory_bytes": peak_memory(),
        }


@cache
def _versions() -> dict[str, str]:
    return {name: _version(name) for name in ("numpy", "polars", "torch", "huggingface_hub")}


def _version(name: str) -> str:
    """As the library itself says, where it has been imported: to look for what is installed takes milliseconds."""
    return getattr(sys.modules.get(name), "__version__", None) or metadata.version(name)


def _with_params(row: Row, params: int) -> Row:
    return row if row.params == params else replace(row, params=params)


def _reasons(rows: Iterable[Row]) -> dict[str, int]:
    return dict(Counter(row.reason for row in rows).most_common())
