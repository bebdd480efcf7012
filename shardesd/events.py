"""What a scan or a batch tells to whoever listens (the live screen, a log, a test). Nothing waits for a listener."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from shardesd.frozen import record
from shardesd.records import Row


@record(frozen=True, slots=True, kw_only=True)
class ScanStarted:
    model_id: str
    revision: str | None
    commit: str | None
    shards: int
    total_bytes: int | None
    """Of all shards, where they are known."""
    matrices: int | None
    """How many matrices there will be; None while unknown."""
    exact: bool
    """False where `matrices` is an estimate from names, since not all headers are here yet."""
    devices: tuple[str, ...]
    out: str | None
    resumed: int = 0
    """Rows that an earlier, unfinished run left and that are not computed again."""


@record(frozen=True, slots=True, kw_only=True)
class Fetching:
    """A shard's download has begun, or has got further."""

    shard: str
    done: int
    total: int | None


@record(frozen=True, slots=True, kw_only=True)
class ShardOpened:
    """A shard's header has been read; its matrices follow."""

    shard: str
    number: int
    """From 1."""
    nbytes: int
    matrices: int | None
    """Of the whole scan, as far as is known by now."""
    exact: bool


@record(frozen=True, slots=True, kw_only=True)
class ShardDone:
    shard: str
    number: int


@record(frozen=True, slots=True, kw_only=True)
class MatrixStarted:
    longname: str
    device: str


@record(frozen=True, slots=True, kw_only=True)
class RowDone:
    """A row is final: analysed, skipped or failed."""

    row: Row
    nbytes: int = 0
    """Bytes of weights that were read for it."""
    kept: bool = False
    """Its λ were not computed but taken from those that are kept."""


@record(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device at one moment."""

    name: str
    working: tuple[str, ...] = ()
    """Longnames of what it works on."""
    done: int = 0
    """Matrices so far."""
    memory: int = 0
    """Bytes that this scan takes of it (a GPU)."""
    retired: str = ""
    """Why it is used no more; empty while it is."""


@record(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What the engine does at one moment; comes several times a second."""

    devices: tuple[DeviceReport, ...]
    ready: int
    """Matrices that wait for a device."""
    bytes_in_flight: int
    """Host memory of those in work."""


@record(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that a user should know and that changes no number."""

    message: str


@record(frozen=True, slots=True, kw_only=True)
class ScanFinished:
    model_id: str
    analysed: int
    failed: int
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → how many."""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    interrupted: bool = False


Event = (
    ScanStarted | Fetching | ShardOpened | ShardDone | MatrixStarted | RowDone | EngineReport | Notice | ScanFinished
)


# Of a batch, beside the events of its scans

JobState = Literal["done", "failed", "killed", "timeout"]
GpuState = Literal["ours", "free", "waiting", "busy", "gone"]
"""In use by us; free and not needed; not free for long enough yet; in use by others; not to be seen any more."""


@record(frozen=True, slots=True, kw_only=True)
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


@record(frozen=True, slots=True, kw_only=True)
class ModelStarted:
    model: str
    """The name that all of its events carry: ``org/name`` or ``org/name@revision``."""
    nbytes: int | None
    attempt: int


@record(frozen=True, slots=True, kw_only=True)
class ModelEvent:
    """An event of one model's scan."""

    model: str
    event: Event


@record(frozen=True, slots=True, kw_only=True)
class ModelDone:
    model: str
    analysed: int
    failed: int
    """Rows that could not be analysed."""
    seconds: float
    by_other: bool = False
    """Another process did it."""


@record(frozen=True, slots=True, kw_only=True)
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


@record(frozen=True, slots=True, kw_only=True)
class GpuChanged:
    gpu: str
    """``cuda:0``"""
    state: GpuState
    others_bytes: int | None = None
    """Memory that others hold on it, where it can be told."""
    why: str = ""


@record(frozen=True, slots=True, kw_only=True)
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


@record(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """A command of `shardesd run` has been started."""

    number: int
    """From 1, in the order of the file."""
    command: str
    gpus: tuple[str, ...]
    """As its CUDA_VISIBLE_DEVICES calls them."""
    pid: int


@record(frozen=True, slots=True, kw_only=True)
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
    "results": "the output folder can't be written, or what it holds can't be read",
    "unexpected": "an error that shardesd did not foresee",
}
"""Reasons of failures that don't pass; their models are tried again only when it is asked for."""

FAILURES: tuple[str, ...] = (*PASSING, *LASTING)
