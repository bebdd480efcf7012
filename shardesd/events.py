"""What a batch tells to whoever listens (the live screen, the log file, a test), beside the events of its scans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardesd.records import Event, Notice

JobState = Literal["done", "failed", "killed", "timeout"]
GpuState = Literal["ours", "free", "waiting", "busy", "gone"]
"""In use by us; free and not needed; not free for long enough yet; in use by others; not to be seen any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStarted:
    """The plan is made, and the work begins."""

    models: int
    """In the list, without repetitions; what earlier runs have done and lines that name no model included."""
    done: int
    """Done by earlier runs."""
    failed: int
    """Failed in earlier runs, or can't work, and not tried again."""
    left: int
    total_bytes: int | None
    """Of the models that are left, where it is known of all of them."""
    out: str
    rate: float | None = None
    """Bytes of weights a second in earlier runs, where there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStarted:
    model: str
    """The name that all of its events carry: ``org/name`` or ``org/name@revision``."""
    nbytes: int | None
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvent:
    """An event of one model's scan."""

    model: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDone:
    model: str
    analysed: int
    failed: int
    """Rows that could not be analysed."""
    seconds: float
    by_other: bool = False
    """Another process did it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFailed:
    model: str
    stage: str
    reason: str
    """One of `FAILURES`."""
    message: str
    attempts: int
    again_in: float | None = None
    """Seconds until it is tried again in this run; None where it isn't."""
    by_other: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChanged:
    gpu: str
    """``cuda:0``"""
    state: GpuState
    others_bytes: int | None = None
    """Memory that others hold on it, where it can be told."""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinished:
    done: int
    failed: int
    left: int
    """Neither done nor failed: interrupted."""
    failed_rows: int
    """Models that are done, but with matrices that failed."""
    seconds: float
    files: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """A command of `shardesd run` has been started."""

    number: int
    """From 1, in the order of the file."""
    command: str
    gpus: tuple[str, ...]
    """As its CUDA_VISIBLE_DEVICES calls them."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    number: int
    command: str
    state: JobState
    """``killed``: by a signal that did not come from us."""
    exit_code: int
    """The command's; minus the signal's number where one ended it."""
    seconds: float
    log: str


BatchEvent = BatchStarted | ModelStarted | ModelEvent | ModelDone | ModelFailed | GpuChanged | Notice | BatchFinished

PASSING = {
    "network": "the Hub can't be reached, or the connection keeps breaking off",
    "rate_limited": "the Hub limits the rate of requests (429)",
    "server_error": "the Hub keeps failing (5xx)",
    "out_of_memory": "not enough memory on the GPU or the host",
    "no_space": "no room on the disk",
    "changed": "a file changed while it was read",
}
"""Reasons of failures that may pass by themselves; their models are tried again."""

LASTING = {
    "bad_row": "the line of the list names no model that could be looked for",
    "not_found": "no such folder, repo, revision or file",
    "access_denied": "gated, private, or the token is missing or refused",
    "no_safetensors": "there are no safetensors in it",
    "malformed": "the checkpoint's files are not what the format says",
    "adapter": "the adapter can't be merged into its base",
    "other_options": "results made with other options are there (--overwrite replaces them)",
    "refused": "the source answered with something that will not pass",
    "results": "the output folder can't be written",
    "unexpected": "an error that shardesd did not foresee",
}
"""Reasons of failures that don't pass; their models are tried again only when it is asked for."""

FAILURES: tuple[str, ...] = (*PASSING, *LASTING)
