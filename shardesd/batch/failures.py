"""Why a model failed, in a fixed vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardesd.errors import (
    AccessDenied,
    AdapterError,
    CheckpointError,
    MadeOtherwise,
    NoSpace,
    NotFound,
    NoWeights,
    Offline,
    OptionError,
    ResultsError,
    ShardChanged,
    SourceError,
)
from shardesd.events import PASSING
from shardesd.source import fault_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What stood in a model's way."""

    stage: str
    """``list``, ``plan``, ``source``, ``checkpoint``, ``adapter``, ``analysis`` or ``results``."""
    reason: str
    """One of `events.FAILURES`."""
    message: str
    attempts: int = 1

    @property
    def passing(self) -> bool:
        return self.reason in PASSING


def classify(error: BaseException, *, out_of_memory: Callable[[Exception], bool], stage: str = "source") -> Failure:
    """What an exception that ended a model's scan means. `stage` is where an error of the source came up."""
    reason, where = _sorted(error, out_of_memory, stage)
    message = " ".join(str(error).split()) or type(error).__name__
    return Failure(
        stage=where, reason=reason, message=f"{type(error).__name__}: {message}" if reason == "unexpected" else message
    )


def _sorted(error: BaseException, out_of_memory: Callable[[Exception], bool], stage: str) -> tuple[str, str]:
    if isinstance(error, MemoryError) or (isinstance(error, Exception) and out_of_memory(error)):
        return "out_of_memory", "analysis"
    kinds: tuple[tuple[type[BaseException], str, str], ...] = (
        (NotFound, "not_found", stage),
        (AccessDenied, "access_denied", stage),
        (NoSpace, "no_space", stage),
        (NoWeights, "no_safetensors", "checkpoint"),
        (ShardChanged, "changed", "analysis"),
        (CheckpointError, "malformed", "checkpoint"),
        (AdapterError, "adapter", "adapter"),
        (MadeOtherwise, "other_options", "results"),
        (ResultsError, "results", "results"),
        (OptionError, "bad_row", "list"),
    )
    for kind, reason, where in kinds:
        if isinstance(error, kind):
            return reason, where
    if not isinstance(error, SourceError):
        return "unexpected", "analysis"
    fault = fault_of(error)
    if fault.status == 429:
        return "rate_limited", stage
    if fault.status is not None and fault.status >= 500:
        return "server_error", stage
    passing = isinstance(error, Offline) or fault.passing or fault.kind == "stalled"
    return ("network" if passing else "refused"), stage
