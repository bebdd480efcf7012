"""The options of a scan: frozen, checked where they are made, and the only place that holds defaults."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from shardesd.errors import OptionError

FIX_FINGERS = ("xmin_mid", "xmin_peak", "DKS")
SOLVERS = ("auto", "gram", "svd")
PRECISIONS = ("auto", "float32", "float64")
FETCHES = ("auto", "shards", "ranges")
IO_METHODS = ("auto", "mmap", "pread")
FORMATS = ("csv", "parquet", "jsonl")
MOST_BINS = 1_000_000
SPLITS = ("auto", "off", "thirds")
VIEWS = ("table", "layers")
LOG_LEVELS = ("debug", "info", "warning", "error")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_MOST_BYTES = 10**18


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """What is analysed and how. Raises `OptionError` for a value that is not one of its choices.

    Taken too, and turned into what the fields say: a `torch.device`, a size such as ``"2GB"`` for `max_memory`, one
    glob or any iterable of them, None for no globs, numpy's numbers.
    """

    fix_fingers: str = "xmin_mid"
    """How the power law's start is found: ``xmin_mid``, ``xmin_peak`` or ``DKS``."""
    evals_thresh: float = 1e-5
    """λ at or below it are dropped before anything is computed from them."""
    filter_zeros: bool = True
    """False keeps every λ, whatever `evals_thresh` says."""
    bins: int = 100
    """Bins of log10 λ in which ``xmin_peak`` looks for the peak."""
    solver: str = "auto"
    """``gram`` (eigenvalues of the shorter side's Gram matrix), ``svd``, or ``auto``: Gram, and SVD where it fails."""
    precision: str = "auto"
    """``float64``, ``float32``, or ``auto``: float64 wherever it is fast."""
    max_aspect: float = 8.0
    """A 2-D matrix whose longer side is this many times its shorter one, or more, is skipped; 0: none is."""
    include: tuple[str, ...] = ()
    """Globs on longnames; when there are any, only what matches one is analysed."""
    exclude: tuple[str, ...] = ()
    """Globs on longnames; what matches one is left out."""
    embeddings: bool = False
    """Analyse token and position embeddings too."""
    delta: bool = False
    """Analyse what adapters add, ΔW, instead of the merged weights."""
    round_to_base_dtype: bool = False
    """Round merged weights to the base's element type, as peft's own merge does."""
    split: str = "auto"
    """Fused tensors: ``auto`` cuts them as the model does, ``off`` leaves them whole, ``thirds`` cuts a fused qkv that
    is three times as long as wide in three, as the Model-Zoo pipeline does."""
    layout: str = ""
    """A TOML or JSON file of layouts that come before the built-in ones (docs/layouts.md)."""
    per_head: bool = False
    """Analyse q, k, v and o head by head."""
    stats: bool = False
    """Statistics of every tensor's elements too."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, or a list such as ``cuda:0,cuda:2``."""
    max_memory: int | None = None
    """Bytes that weights and work arrays may take together; None: chosen from what is free."""
    gpu_memory_fraction: float = 0.8
    """Of a GPU's memory that is free when a scan begins, how much it may take: others may use the card too."""
    allow_pickle: bool = False
    """Read PyTorch's pickled files (``.bin``, ``.pt``) where there is no safetensors: tensors, nothing else."""
    io: str = "auto"
    """How local bytes are read: ``mmap``, ``pread``, or ``auto`` (pread, which is faster)."""
    fetch: str = "auto"
    """How weights come from the Hub: ``shards`` (whole, into its cache), ``ranges`` (only the tensors that are needed,
    into memory), or ``auto``: shards where most of their bytes are needed and the disk has room."""
    evict: bool = False
    """Remove shards that this scan has downloaded from the Hub cache once they are analysed."""
    max_disk: int | None = None
    """Bytes that the shards which this scan downloads may take on the disk at once; None: what is free."""
    cache: bool = True
    """Keep every λ by its content, and take those that are kept instead of computing them."""
    cache_dir: str | None = None
    """Where they are kept; None: shardesd's folder among the user's caches."""
    max_cache: int = 10 * 10**9
    """Bytes that they may take; what was used least recently goes first."""

    def __post_init__(self) -> None:
        _choice("fix-fingers", self.fix_fingers, FIX_FINGERS)
        _choice("solver", self.solver, SOLVERS)
        _choice("precision", self.precision, PRECISIONS)
        _choice("io", self.io, IO_METHODS)
        _choice("split", self.split, SPLITS)
        _choice("fetch", self.fetch, FETCHES)
        set_ = partial(object.__setattr__, self)
        set_("device", str(self.device))
        set_("layout", _path("layout", self.layout))
        if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", self.device):
            raise OptionError(
                f"--device '{self.device}' is invalid (expected auto, cpu, cuda, or a list such as cuda:0,cuda:2)"
            )
        for name in (
            *("filter_zeros", "embeddings", "delta", "round_to_base_dtype", "allow_pickle", "per_head", "stats"),
            *("evict", "cache"),
        ):
            _yes_or_no(name, getattr(self, name))
        set_("evals_thresh", float(_at_least("evals-thresh", self.evals_thresh, 0)))
        set_("bins", _whole("bins", self.bins, 1, MOST_BINS))
        set_("max_aspect", float(_at_least("max-aspect", self.max_aspect, 0)))
        set_("gpu_memory_fraction", float(_at_least("gpu-memory-fraction", self.gpu_memory_fraction, 0)))
        if not 0 < self.gpu_memory_fraction <= 1:
            raise OptionError(f"--gpu-memory-fraction {self.gpu_memory_fraction} is invalid (expected above 0, to 1)")
        if isinstance(self.max_memory, str):
            set_("max_memory", parse_size(self.max_memory))
        if self.max_memory is not None:
            set_("max_memory", int(_at_least("max-memory", self.max_memory, 1)))
        for name in ("max_disk", "max_cache"):
            if isinstance(getattr(self, name), str):
                set_(name, parse_size(getattr(self, name)))
        if self.max_disk is not None:
            set_("max_disk", int(_at_least("max-disk", self.max_disk, 0)))
        set_("max_cache", int(_at_least("max-cache", self.max_cache, 0)))
        if self.cache_dir is not None:
            set_("cache_dir", os.fspath(self.cache_dir))
        for name in ("include", "exclude"):
            set_(name, _globs(name, getattr(self, name)))

    @property
    def resolve(self) -> float:
        """The least λ that must be told from zero; 0 where all λ are kept, whatever they are."""
        return max(self.evals_thresh, sys.float_info.min) if self.filter_zeros else 0.0

    def numbers(self) -> dict[str, Any]:
        """The options that change a table's numbers or rows: what a finished result is compared by.

        A layout file counts by its content. Raises `OptionError` where it can't be read.
        """
        kept = asdict(self)
        for name in (
            "device",
            "max_memory",
            "gpu_memory_fraction",
            "io",
            "allow_pickle",
            "fetch",
            "evict",
            "max_disk",
            "cache",
            "cache_dir",
            "max_cache",
        ):
            del kept[name]
        kept["layout"] = _digest(self.layout) if self.layout else ""
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where results go."""

    out: str = "results"
    """Folder of the tables; made when it isn't there."""
    format: str = "csv"
    """``csv``, ``parquet`` or ``jsonl``."""
    overwrite: bool = False
    """Compute again what is already there."""
    show_skipped: bool = False
    """Put skipped tensors into the table too."""
    view: str = "table"
    """On screen: ``table``, or ``layers`` (rows grouped by layer)."""

    def __post_init__(self) -> None:
        out = os.fspath(self.out) if isinstance(self.out, os.PathLike) else self.out
        if not isinstance(out, str) or not out or "\0" in out:
            raise OptionError(f"--out {out!r} is invalid (expected the path of a folder)")
        out = os.path.expanduser(out)  # which shells don't do to `--out=~/results`
        # POSIX lets `//` mean something else than `/`; to all systems at hand it doesn't, and users see the path.
        object.__setattr__(self, "out", f"/{out.lstrip('/')}" if os.sep == "/" and out.startswith("//") else out)
        _choice("format", self.format, FORMATS)
        for name in ("overwrite", "show_skipped"):
            _yes_or_no(name, getattr(self, name))
        _choice("view", self.view, VIEWS)

    @property
    def folder(self) -> Path:
        """`out`."""
        return Path(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """Which GPUs may be used beside other people's work, and when one of them counts as free."""

    gpus: tuple[int, ...] = ()
    """Numbers among the visible ones (those of CUDA_VISIBLE_DEVICES, where that is set); none: all of them."""
    max_gpus: int | None = None
    """At most so many at once."""
    per_job: int = 1
    """A job starts only when so many are free."""
    mem_threshold: float = 500.0
    """MB that others may hold on a GPU that still counts as free."""
    max_checks: int = 10
    """Checks in a row under the threshold that make a GPU free."""
    check_every: float = 1.0
    """Seconds between two checks."""

    def __post_init__(self) -> None:
        if any(gpu < 0 for gpu in self.gpus):
            raise OptionError(f"--gpus {','.join(map(str, self.gpus))} is invalid (expected numbers such as 0,2)")
        if self.max_gpus is not None:
            _at_least("max-gpus", self.max_gpus, 1)
        _at_least("gpus-per-job", self.per_job, 1)
        _at_least("gpu-mem-threshold", self.mem_threshold, 0)
        _at_least("max-checks", self.max_checks, 1)
        _at_least("check-every", self.check_every, 0)
        for most, said in ((self.max_gpus, "--max-gpus"), (len(self.gpus) or None, "--gpus")):
            if most is not None and self.per_job > most:
                raise OptionError(f"--gpus-per-job {self.per_job} is more than {said} allows ({most})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a list of models is worked through."""

    limit: int | None = None
    """Only the first so many models, counted after `only` and `shuffle`."""
    only: tuple[str, ...] = ()
    """Globs on model ids; when there are any, only what matches one is scanned."""
    shuffle: int | None = None
    """Seed of another order than the list's."""
    workers: int = 1
    """Models side by side."""
    retries: int = 2
    """Further tries in one run of a model whose failure may pass."""
    backoff: float = 30.0
    """Seconds before the first of them; each one waits twice as long as the one before."""
    retry_failed: bool = False
    """Try again what failed for a reason that does not pass by itself."""
    gpu: GpuOptions = field(default_factory=GpuOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", (self.only,) if isinstance(self.only, str) else tuple(self.only))
        if self.limit is not None:
            _at_least("limit", self.limit, 0)
        _at_least("workers", self.workers, 1)
        _at_least("retries", self.retries, 0)
        _at_least("backoff", self.backoff, 0)


def parse_gpus(text: str | None) -> tuple[int, ...]:
    """GPU numbers in a text such as ``0,2,5`` or ``0-3``; none for None."""
    numbers: list[int] = []
    for part in (text or "").split(",") if text is not None else ():
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise OptionError(f"--gpus '{text}' is invalid (expected numbers such as 0,2 or 0-3)")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(numbers))


def parse_bytes(text: str) -> int:
    """As `parse_size`, for a size that must be said."""
    size = parse_size(text)
    if size is None:
        raise OptionError(f"size '{text}' is invalid here (expected something like 2GB or 512MiB)")
    return size


def parse_size(text: str) -> int | None:
    """Bytes in a text such as ``2GB``, ``512 MiB`` or ``1e9``; None for ``auto``. GB is 10⁹, GiB is 2³⁰."""
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]I?)?B?\s*", text.upper().replace("E", "e"))
    if not match:
        raise OptionError(f"size '{text}' is invalid (expected something like 2GB, 512MiB or auto)")
    nbytes = float(match[1]) * _UNITS[match[2] or ""]
    if nbytes > _MOST_BYTES:
        raise OptionError(f"size '{text}' is invalid (more than any machine has)")
    return int(nbytes)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise OptionError(f"--layout {path}: can't be read: {(error.strerror or str(error)).lower()}") from None


def size_text(nbytes: float) -> str:
    """``412 MB``, ``1.05 GB``, ``640 B``: decimal units, three digits."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def _choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"--{name} '{value}' is invalid (expected one of: {', '.join(choices)})")


def _path(name: str, value: Any) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or "\0" in path:
        raise OptionError(f"--{name} {path!r} is invalid (expected the path of a file)")
    return os.path.expanduser(path)


def _yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is invalid (expected True or False)")


def _at_least(name: str, value: Any, least: float) -> Any:
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= float(value) < math.inf:
        raise OptionError(f"--{name} {value} is invalid (expected a finite number of {least} or more)")
    return value


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise OptionError(f"--{name} {value} is invalid (expected a whole number, {least} or more, at most {most:,})")
    return int(value)


def _globs(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    globs = () if value is None else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(glob, str) for glob in globs):
        raise OptionError(f"--{name} {value!r} is invalid (expected a glob such as '*.q_proj', or several)")
    if "" in globs:
        raise OptionError(f"--{name} '' is empty and matches nothing (expected a glob such as '*.q_proj')")
    return globs
