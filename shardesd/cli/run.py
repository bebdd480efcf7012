"""`shardesd run`: any commands, started when GPUs come free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardesd.cli.arguments import (
    CheckEvery,
    GpuMemThreshold,
    Gpus,
    GpusPerJob,
    MaxChecks,
    MaxGpus,
    Out,
    Overwrite,
    Quiet,
    Verbose,
    gpu_options,
)
from shardesd.cli.session import errors, interruptible, on_hangup, say
from shardesd.options import GpuOptions, OutputOptions

if TYPE_CHECKING:
    from shardesd.commands import JobEvent
    from shardesd.engine import Neighbours
    from shardesd.events import GpuChanged

_GPU = GpuOptions()
_OUTPUT = OutputOptions()


def run(
    commands: Annotated[str, typer.Argument(metavar="COMMANDS", help="A text file with a command a line.")],
    out: Out = _OUTPUT.out,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="At most so many at once (without GPUs: 1)."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="End a command that runs longer.")
    ] = None,
    gpus: Gpus = None,
    max_gpus: MaxGpus = None,
    gpus_per_job: GpusPerJob = _GPU.per_job,
    gpu_mem_threshold: GpuMemThreshold = _GPU.mem_threshold,
    max_checks: MaxChecks = _GPU.max_checks,
    check_every: CheckEvery = _GPU.check_every,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run any commands, each with its CUDA_VISIBLE_DEVICES, when GPUs come free."""
    with errors(verbose):
        from shardesd.commands import Commands, read_commands
        from shardesd.events import JobEnded

        gpu = gpu_options(locals())
        listed = read_commands(Path(commands))

        def show(event: JobEvent | GpuChanged) -> None:
            line = _line(event, len(listed), verbose)
            if line and not (quiet and not (isinstance(event, JobEnded) and event.state != "done")):
                say(line)

        with _watch(gpu, show) as watch:
            work: Commands | None = None
            with interruptible(
                show, now=lambda: work.kill() if work else None, words="the commands that run are done"
            ) as stop:
                work = Commands(
                    listed,
                    OutputOptions(out=out).folder,
                    gpu=gpu,
                    workers=workers,
                    timeout=timeout,
                    watch=watch,
                    overwrite=overwrite,
                    on_event=show,
                    stop=stop,
                )
                with on_hangup(work.reconfigure):
                    counts = work.run()
        if not quiet:
            before = f" ({counts.before} of them before)" if counts.before else ""
            left = f", {counts.left} left" if counts.left else ""
            say(f"{counts.done} done{before}, {counts.failed} failed{left}; see {out}/commands.csv")
        raise typer.Exit(3 if counts.failed or counts.left else 0)


def _line(event: JobEvent | GpuChanged, total: int, verbose: bool) -> str:
    from shardesd.events import JobEnded, JobStarted, Notice

    if isinstance(event, JobStarted):
        gpus = f" on GPU {','.join(event.gpus)}" if event.gpus else ""
        return f"{event.number}/{total} started{gpus}: {event.command}"
    if isinstance(event, JobEnded):
        code = "" if event.state == "done" else f" (exit code {event.exit_code})"
        return f"{event.number}/{total} {event.state}{code} after {event.seconds:.1f} s, log {event.log}"
    if isinstance(event, Notice):
        return f"note: {event.message}"
    return f"{event.gpu}: {event.state}" if verbose else ""


@contextmanager
def _watch(gpu: GpuOptions, show: object) -> Iterator[Neighbours | None]:
    from shardesd.engine import Neighbours, load_nvml, visible_gpus

    try:
        nvml = load_nvml()
        visible = visible_gpus(nvml)
    except Exception:  # no driver, or none that NVML can speak to: the commands run without GPUs
        visible = []
    if not visible:
        yield None
        return
    watch = Neighbours(nvml, visible, gpu, on_change=show, auto_take=False)  # type: ignore[arg-type]
    watch.start()
    try:
        yield watch
    finally:
        watch.close()
