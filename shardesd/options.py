"""The options of a scan: frozen, checked where they are made, and the only place that holds defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shardesd.errors import OptionError

FIX_FINGERS = ("xmin_mid", "xmin_peak", "DKS")
SOLVERS = ("auto", "gram", "svd")
PRECISIONS = ("auto", "float32", "float64")
IO_METHODS = ("auto", "mmap", "pread")
FORMATS = ("csv", "parquet", "jsonl")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """What is analysed and how. Raises `OptionError` for a value that is not one of its choices."""

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
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, or a list such as ``cuda:0,cuda:2``."""
    max_memory: int | None = None
    """Bytes that weights and work arrays may take together; None: chosen from what is free."""
    gpu_memory_fraction: float = 0.8
    """Of a GPU's memory that is free when a scan begins, how much it may take: others may use the card too."""
    allow_pickle: bool = False
    """Read PyTorch's pickled files (``.bin``, ``.pt``) where there is no safetensors: tensors, nothing else."""
    io: str = "auto"
    """How local bytes are read: ``mmap``, ``pread``, or ``auto`` (mmap, and pread on network filesystems)."""

    def __post_init__(self) -> None:
        _choice("fix-fingers", self.fix_fingers, FIX_FINGERS)
        _choice("solver", self.solver, SOLVERS)
        _choice("precision", self.precision, PRECISIONS)
        _choice("io", self.io, IO_METHODS)
        if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", self.device):
            raise OptionError(
                f"--device '{self.device}' is invalid (expected auto, cpu, cuda, or a list such as cuda:0,cuda:2)"
            )
        _at_least("evals-thresh", self.evals_thresh, 0)
        _at_least("bins", self.bins, 1)
        _at_least("max-aspect", self.max_aspect, 0)
        if not 0 < self.gpu_memory_fraction <= 1:
            raise OptionError(f"--gpu-memory-fraction {self.gpu_memory_fraction} is invalid (expected above 0, to 1)")
        if self.max_memory is not None:
            _at_least("max-memory", self.max_memory, 1)
        for name in ("include", "exclude"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    def numbers(self) -> dict[str, Any]:
        """The options that change a table's numbers or rows: what a finished result is compared by."""
        kept = asdict(self)
        for name in ("device", "max_memory", "gpu_memory_fraction", "io", "allow_pickle"):
            del kept[name]
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

    def __post_init__(self) -> None:
        _choice("format", self.format, FORMATS)


def parse_size(text: str) -> int | None:
    """Bytes in a text such as ``2GB``, ``512 MiB`` or ``1e9``; None for ``auto``. GB is 10⁹, GiB is 2³⁰."""
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]I?)?B?\s*", text.upper().replace("E", "e"))
    if not match:
        raise OptionError(f"size '{text}' is invalid (expected something like 2GB, 512MiB or auto)")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise OptionError(f"--{name} '{value}' is invalid (expected one of: {', '.join(choices)})")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least or value == float("inf"):
        raise OptionError(f"--{name} {value} is invalid (expected a finite number of {least} or more)")
