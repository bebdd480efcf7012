"""The arguments and options that several commands share, each in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from shardesd.options import (
    FETCHES,
    FIX_FINGERS,
    FORMATS,
    IO_METHODS,
    LOG_LEVELS,
    PRECISIONS,
    SOLVERS,
    SPLITS,
    VIEWS,
    GpuOptions,
    ScanOptions,
    parse_bytes,
    parse_gpus,
    parse_size,
)

MAX_CACHE = f"{ScanOptions().max_cache / 1e9:g}GB"
"""The default of ``--max-cache``."""

Repo = Annotated[
    str | None,
    typer.Argument(
        metavar="REPO",
        show_default=False,
        help="A folder or file, org/name, org/name@revision or hf://org/name@revision; a model or an adapter.",
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub repo.")]
Base = Annotated[
    str | None, typer.Option("--base", metavar="REPO", help="Base of an adapter, in place of what its config names.")
]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Where tables go.")]
Format = Annotated[str, typer.Option("--format", metavar="|".join(FORMATS), help="Of the tables.")]
Delta = Annotated[bool, typer.Option("--delta", help="Analyse what adapters add, not the merged weights.")]
RoundToBase = Annotated[
    bool, typer.Option("--round-to-base-dtype", help="Round merged weights to the base's element type.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, or a list such as cuda:0,cuda:2.")]
FixFingers = Annotated[
    str, typer.Option("--fix-fingers", metavar="|".join(FIX_FINGERS), help="How the power law's start is found.")
]
Thresh = Annotated[float, typer.Option("--evals-thresh", metavar="X", help="Eigenvalues at or below it are dropped.")]
FilterZeros = Annotated[
    bool, typer.Option("--filter-zeros/--no-filter-zeros", help="Drop them, or keep every eigenvalue.")
]
Bins = Annotated[int, typer.Option("--bins", metavar="N", help="Histogram bins of xmin_peak.")]
Solver = Annotated[str, typer.Option("--solver", metavar="|".join(SOLVERS), help="How eigenvalues are computed.")]
Precision = Annotated[str, typer.Option("--precision", metavar="|".join(PRECISIONS), help="Of Gram and eigensolve.")]
MaxAspect = Annotated[
    float, typer.Option("--max-aspect", metavar="X", help="Skip 2-D matrices this elongated (0: none is).")
]
Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="GLOB", help="Only longnames that match; repeatable.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="No longnames that match; repeatable.")
]
Embeddings = Annotated[bool, typer.Option("--embeddings", help="Analyse token and position embeddings too.")]
Split = Annotated[
    str, typer.Option("--split", metavar="|".join(SPLITS), help="Fused tensors: as the model does, whole, or in three.")
]
LayoutFile = Annotated[
    str | None, typer.Option("--layout", metavar="FILE", help="Layouts of fused tensors, TOML or JSON.")
]
PerHead = Annotated[bool, typer.Option("--per-head", help="Analyse q, k, v and o head by head.")]
Stats = Annotated[bool, typer.Option("--stats", help="Statistics of every tensor's elements too.")]
View = Annotated[str, typer.Option("--view", metavar="|".join(VIEWS), help="How rows are shown on screen.")]
MaxMemory = Annotated[
    str, typer.Option("--max-memory", metavar="SIZE", help="Of weights and work arrays together: 2GB, 512MiB, auto.")
]
GpuFraction = Annotated[
    float, typer.Option("--gpu-memory-fraction", metavar="X", help="Of a GPU's free memory, how much may be taken.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read .bin and .pt files where there is no safetensors.")
]
Io = Annotated[str, typer.Option("--io", metavar="|".join(IO_METHODS), help="How local files are read.")]
Fetch = Annotated[
    str, typer.Option("--fetch", metavar="|".join(FETCHES), help="Whole shards of a Hub repo, or ranges of them.")
]
Evict = Annotated[bool, typer.Option("--evict", help="Remove shards that this scan downloaded once they are analysed.")]
MaxDisk = Annotated[
    str, typer.Option("--max-disk", metavar="SIZE", help="Of the shards that a scan downloads: 20GB, auto.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither take eigenvalues from the cache nor put any there.")]
CacheDir = Annotated[
    str | None,
    typer.Option("--cache-dir", metavar="DIR", help="Where they are kept; else in the user's cache folder."),
]
MaxCache = Annotated[str, typer.Option("--max-cache", metavar="SIZE", help="Of all that is kept: 10GB, 512MiB.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Compute again what is already there.")]
ShowSkipped = Annotated[bool, typer.Option("--show-skipped", help="Put skipped tensors into the table too.")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on stdout, a row each.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no report.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More progress, and tracebacks of errors.")]
Gpus = Annotated[str | None, typer.Option("--gpus", metavar="LIST", help="Only these, such as 0,2 or 0-3.")]
MaxGpus = Annotated[int | None, typer.Option("--max-gpus", metavar="N", help="At most so many at once.")]
GpusPerJob = Annotated[int, typer.Option("--gpus-per-job", metavar="N", help="A job starts when so many are free.")]
GpuMemThreshold = Annotated[
    float, typer.Option("--gpu-mem-threshold", metavar="MB", help="Others may hold so much on a free GPU.")
]
MaxChecks = Annotated[
    int, typer.Option("--max-checks", metavar="N", help="Checks in a row under the threshold that make a GPU free.")
]
CheckEvery = Annotated[float, typer.Option("--check-every", metavar="SECONDS", help="Between two checks.")]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="|".join(LOG_LEVELS), help="Of the log file.")]


def scan_options(given: Mapping[str, Any]) -> ScanOptions:
    """The options among a command's own arguments, by name; of those that it doesn't have, the defaults."""
    found = {field.name: given[field.name] for field in fields(ScanOptions) if field.name in given}
    for name, convert in _CONVERTED.items():
        if name in found:
            found[name] = convert(found[name])
    if "no_cache" in given:
        found["cache"] = not given["no_cache"]
    return ScanOptions(**found)


def gpu_options(given: Mapping[str, Any]) -> GpuOptions:
    """See `scan_options`."""
    return GpuOptions(
        gpus=parse_gpus(given["gpus"]),
        max_gpus=given["max_gpus"],
        per_job=given["gpus_per_job"],
        mem_threshold=given["gpu_mem_threshold"],
        max_checks=given["max_checks"],
        check_every=given["check_every"],
    )


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "include": lambda globs: tuple(globs or ()),
    "exclude": lambda globs: tuple(globs or ()),
    "layout": lambda file: file or "",
    "max_memory": parse_size,
    "max_disk": parse_size,
    "max_cache": parse_bytes,
}
"""What the command line gives in another form."""
