"""`shardesd batch`: many models from a list."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shardesd.cli.arguments import (
    MAX_CACHE,
    AllowPickle,
    Bins,
    CacheDir,
    CheckEvery,
    Delta,
    Device,
    Embeddings,
    Evict,
    Exclude,
    Fetch,
    FilterZeros,
    FixFingers,
    Format,
    GpuFraction,
    GpuMemThreshold,
    Gpus,
    GpusPerJob,
    Include,
    Io,
    Json,
    LayoutFile,
    LogLevel,
    MaxAspect,
    MaxCache,
    MaxChecks,
    MaxDisk,
    MaxGpus,
    MaxMemory,
    NoCache,
    Out,
    Overwrite,
    PerHead,
    Precision,
    Quiet,
    RoundToBase,
    ShowSkipped,
    Solver,
    Split,
    Stats,
    Thresh,
    Verbose,
    gpu_options,
    scan_options,
)
from shardesd.cli.session import at_once, errors, interruptible, keep_what_is_loaded, on_hangup, say, tell
from shardesd.options import (
    BatchOptions,
    GpuOptions,
    OutputOptions,
    ScanOptions,
)

if TYPE_CHECKING:
    from shardesd.batch import ModelList, Plan
    from shardesd.events import BatchEvent, BatchFinished

_SCAN = ScanOptions()
_OUTPUT = OutputOptions()
_BATCH = BatchOptions()
_GPU = GpuOptions()


def batch(
    models: Annotated[
        str, typer.Argument(metavar="LIST", help="CSV, TSV, Parquet, JSON lines, or a text file of ids.")
    ],
    out: Out = _OUTPUT.out,
    format: Format = _OUTPUT.format,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N models.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="Only models whose id matches.")] = (
        None
    ),
    shuffle: Annotated[int | None, typer.Option("--shuffle", metavar="SEED", help="In another order.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is to do.")] = False,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Models side by side.")] = _BATCH.workers,
    retries: Annotated[
        int, typer.Option("--retries", metavar="N", help="Further tries of what failed and may pass.")
    ] = _BATCH.retries,
    backoff: Annotated[
        float, typer.Option("--backoff", metavar="SECONDS", help="Before the first of them; each waits twice as long.")
    ] = _BATCH.backoff,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed for good, too.")
    ] = _BATCH.retry_failed,
    device: Device = _SCAN.device,
    gpus: Gpus = None,
    max_gpus: MaxGpus = None,
    gpus_per_job: GpusPerJob = _GPU.per_job,
    gpu_mem_threshold: GpuMemThreshold = _GPU.mem_threshold,
    max_checks: MaxChecks = _GPU.max_checks,
    check_every: CheckEvery = _GPU.check_every,
    fix_fingers: FixFingers = _SCAN.fix_fingers,
    evals_thresh: Thresh = _SCAN.evals_thresh,
    filter_zeros: FilterZeros = _SCAN.filter_zeros,
    bins: Bins = _SCAN.bins,
    solver: Solver = _SCAN.solver,
    precision: Precision = _SCAN.precision,
    max_aspect: MaxAspect = _SCAN.max_aspect,
    include: Include = None,
    exclude: Exclude = None,
    embeddings: Embeddings = _SCAN.embeddings,
    delta: Delta = _SCAN.delta,
    round_to_base_dtype: RoundToBase = _SCAN.round_to_base_dtype,
    split: Split = _SCAN.split,
    layout: LayoutFile = None,
    per_head: PerHead = _SCAN.per_head,
    stats: Stats = _SCAN.stats,
    max_memory: MaxMemory = "auto",
    gpu_memory_fraction: GpuFraction = _SCAN.gpu_memory_fraction,
    allow_pickle: AllowPickle = _SCAN.allow_pickle,
    io: Io = _SCAN.io,
    fetch: Fetch = _SCAN.fetch,
    evict: Evict = _SCAN.evict,
    max_disk: MaxDisk = "auto",
    no_cache: NoCache = not _SCAN.cache,
    cache_dir: CacheDir = _SCAN.cache_dir,
    max_cache: MaxCache = MAX_CACHE,
    overwrite: Overwrite = _OUTPUT.overwrite,
    show_skipped: ShowSkipped = _OUTPUT.show_skipped,
    log_level: LogLevel = "info",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Work through a list of models; interrupt it, kill it, run it again or several times at once."""
    with errors(verbose):
        options = scan_options(locals())
        output = OutputOptions(out=out, format=format, overwrite=overwrite, show_skipped=show_skipped)
        how = BatchOptions(
            limit=limit,
            only=tuple(only or ()),
            shuffle=shuffle,
            workers=workers,
            retries=retries,
            backoff=backoff,
            retry_failed=retry_failed,
            gpu=gpu_options(locals()),
        )
        from shardesd.batch import read_list

        listed = read_list(models)
        if dry_run:
            _dry_run(listed, output, options, how)
        _run(listed, output, options, how, log_level=log_level, json=json, quiet=quiet, verbose=verbose)


def _dry_run(listed: ModelList, output: OutputOptions, options: ScanOptions, how: BatchOptions) -> NoReturn:
    from shardesd.batch import Batch
    from shardesd.show import plan_lines

    _say_problems(listed, how)
    with at_once():
        plan = Batch(listed, output=output, scan=options, batch=how).plan()
    rows = []
    for model in plan.models:
        kind = "adapter" if model.adapter else ""
        why = model.failure.message if model.failure else f"on {model.row.base}" if model.row.base else kind
        rows.append((model.row.name, model.state, model.nbytes, why))
    for line in plan_lines(rows, plan.left_bytes, plan.eta):
        tell(line)
    raise typer.Exit(3 if _hopeless(plan) or any(not problem.repeats for problem in listed.problems) else 0)


def _hopeless(plan: Plan) -> bool:
    return plan.count("failed", "impossible") > 0


def _say_problems(listed: ModelList, how: BatchOptions) -> None:
    from shardesd.batch import unmet

    for problem in listed.problems:
        say(f"{'note' if problem.repeats else 'left out'}: {problem}")
    for glob in unmet(listed, how):
        say(f"note: --only '{glob}' matches no model of the list")


def _run(
    listed: ModelList,
    output: OutputOptions,
    options: ScanOptions,
    how: BatchOptions,
    *,
    log_level: str,
    json: bool,
    quiet: bool,
    verbose: bool,
) -> NoReturn:
    from json import dumps

    from shardesd.batch import Batch, log_file
    from shardesd.events import BatchFinished, ModelStarted
    from shardesd.results import load_result
    from shardesd.show import batch_display

    finished: list[BatchFinished] = []
    if not quiet:
        _say_problems(listed, how)
    with (
        log_file(output.folder, log_level) as log,
        batch_display(quiet=quiet, verbose=verbose) as show,
        interruptible(show) as stop,
    ):

        def listen(event: BatchEvent) -> None:
            if isinstance(event, ModelStarted):
                keep_what_is_loaded()
            if isinstance(event, BatchFinished):
                finished.append(event)
            log(event)
            show(event)

        work = Batch(listed, output=output, scan=options, batch=how, on_event=listen, stop=stop)
        # Whoever reads stdout may leave (`head`, say): then the work stops, and what is left is told.
        with on_hangup(work.reconfigure), suppress(BrokenPipeError), closing(work.run()) as rows:
            for row in rows:
                if json:
                    result = load_result(work.out, row.model_id, row.revision)
                    tell(dumps(result.summary))
    raise typer.Exit(exit_code(finished[-1]))


def exit_code(finished: BatchFinished) -> int:
    return 3 if finished.failed or finished.failed_rows or finished.left or finished.interrupted else 0
