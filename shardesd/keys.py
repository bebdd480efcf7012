"""What the pipeline hands to the engine, and what comes back: keys of tasks, open shards, rows, reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardesd import spectra
from shardesd.checkpoint import Shard
from shardesd.engine import State
from shardesd.errors import MatrixError, SourceError
from shardesd.events import DeviceReport, EngineReport
from shardesd.frozen import record
from shardesd.records import NO_ANSWER, NO_DEVICE, NO_MEMORY, MatrixRef, Row, Skip, Spectrum, TensorRef

_PATIENCE = 120.0  # seconds
_NETWORK_PATIENCE = 1800.0  # five waits for a rate limit, of the longest (`source.patience`)


@record(frozen=True, slots=True, kw_only=True)
class Analysed:
    """A final row, its spectrum (None for a failed one) and the bytes of weights that were read for it."""

    row: Row
    spectrum: Spectrum | None
    nbytes: int
    kept: bool = False
    """Whether the λ were taken from those that are kept."""

    @property
    def eigs(self) -> np.ndarray | None:
        """Its λ."""
        return None if self.spectrum is None else self.spectrum.eigs


@dataclass(slots=True)
class OpenShard:
    """A shard that tasks read from."""

    shard: Shard
    number: int
    left: int = 0
    """Tasks that are not done yet."""
    planned: bool = False
    kept: bool = False
    """It holds tensors, or parts of some, that are looked at last, and stays open for them."""
    later: Shard | None = None
    """What those tensors are read from instead, where its file is evicted."""


@record(frozen=True, slots=True)
class Count:
    """Ranges of tensors that are read for their statistics alone."""

    tensors: tuple[TensorRef, ...]


@record(frozen=True, slots=True)
class Key:
    """What a task of the engine is about."""

    item: MatrixRef | Skip | Count
    shard: str
    kept: bool = False
    """Its λ are here already: nothing is read and nothing solved."""


def sides(item: MatrixRef | Skip) -> tuple[int, int]:
    """M and N of a matrix, or of a tensor that was left out."""
    if isinstance(item, MatrixRef):
        return item.M, item.N
    shape = item.tensor.shape
    return (shape[0], shape[1]) if len(shape) >= 2 else (shape[0] if shape else 1, 1)


@lru_cache(maxsize=1024)
def needs(M: int, N: int, slices: int, solver: str) -> dict[str, Any]:
    """What a `Task` says of matrices of one size, of experts there are thousands; its cost in flops."""
    n = min(M, N)
    return {
        "device_bytes": spectra.device_bytes(M, N, 4, solver=solver),
        "passing_bytes": spectra.passing_bytes(M, N, solver=solver),
        "passing_most": spectra.PASSING_BYTES,
        "cost": slices * n * n * (max(M, N) + 4 / 3 * n),
        "most": spectra.batch_size(n),
        "large": spectra.is_large(n),
    }


def limits(cost: float, nbytes: int, shard: Shard) -> dict[str, Any]:
    """What a `Task` says of when it counts as hung: a hundred times what slow machines take.

    A gigaflop a second on a CPU, ten on a GPU; a megabyte a second; two minutes besides; and as long as a server may
    have one wait.
    """
    reading = nbytes / 1e6
    return {
        "deadline": reading + cost / 1e9,
        "gpu_deadline": reading + cost / 1e10,
        "patience": _PATIENCE + (_NETWORK_PATIENCE if shard.on_server else 0.0),
    }


def fail(reason: str) -> Callable[[str], Any]:
    """A task that fails for this reason."""

    def run(device: str) -> Any:
        raise MatrixError(reason)

    return run


def not_counted(count: Count, shard: str, error: Exception) -> SourceError:
    """Of what was to be read for statistics alone, which has no row that could say so."""
    more = len(count.tensors) - 1
    names = f"'{count.tensors[0].name}'" + (f" and {more} more" if more else "")
    again = "run again to have them counted, what is done stays"
    return SourceError(f"the statistics of {names} in {shard} can't be had: {reason_of(error)}; {again}")


def engine_report(state: State[Key]) -> EngineReport:
    """What the engine does, as an event."""
    devices = tuple(
        DeviceReport(
            name=device.name,
            working=tuple(key.item.longname for key in device.working if not isinstance(key.item, Count)),
            done=device.done,
            memory=device.device_bytes,
            retired=device.retired,
        )
        for device in state.devices
    )
    return EngineReport(devices=devices, ready=state.ready, bytes_in_flight=state.host_bytes)


def reason_of(error: Exception | None) -> str:
    """Why a matrix failed, in one line; `records.may_pass` knows the reasons that begin with its words."""
    if isinstance(error, MatrixError) or error is None:
        return str(error)
    trouble = "no answer" if isinstance(error, TimeoutError) else spectra.trouble(error)
    words = {"memory": NO_MEMORY, "no answer": NO_ANSWER, "device": NO_DEVICE}.get(trouble, "")
    return " ".join(f"{words}{type(error).__name__}: {error}".split())
