"""A batch in plain lines, and its plan as a table: for logs, pipes and dumb terminals."""

from __future__ import annotations

from collections.abc import Sequence

from shardesd.events import (
    BatchEvent,
    BatchFinished,
    BatchStarted,
    GpuChanged,
    ModelDone,
    ModelEvent,
    ModelFailed,
    ModelStarted,
    Notice,
    RowDone,
)
from shardesd.show.plain import failed_line
from shardesd.show.text import clock, count, duration, printable, size

GPU_WORDS = {
    "ours": "taken",
    "free": "free",
    "waiting": "not free for long enough yet",
    "busy": "in use by others",
    "gone": "can't be asked",
}


def batch_lines(event: BatchEvent, number: int, models: int, *, verbose: bool = False) -> list[str]:
    """The lines to write for an event; `number` of `models` have ended so far."""
    match event:
        case BatchStarted():
            return [started_line(event)]
        case ModelStarted() if verbose or event.attempt > 1:
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            nbytes = f" ({size(event.nbytes)}{again})" if event.nbytes is not None else ""
            return [f"{printable(event.model)}: started{nbytes}"]
        case ModelDone():
            return [f"{number}/{models} {done_line(event)}"]
        case ModelFailed():
            return [f"{'' if event.again_in or not models else f'{number}/{models} '}{model_failed_line(event)}"]
        case ModelEvent(model=model, event=inner) if verbose and isinstance(inner, RowDone):
            return [f"{printable(model)}: {failed_line(inner.row)}"] if inner.row.status == "failed" else []
        case GpuChanged():
            return [gpu_line(event)]
        case Notice():
            return [f"note: {printable(event.message)}"]
        case BatchFinished():
            return finished_lines(event)
        case _:
            return []


def started_line(event: BatchStarted) -> str:
    parts = [f"{count(event.models, 'model')}: {event.done:,} done, {event.failed:,} failed, {event.left:,} left"]
    if event.left and event.total_bytes is not None:
        parts.append(size(event.total_bytes))
        if event.rate:
            parts.append(f"about {clock(event.total_bytes / event.rate)}")
    return f"{', '.join(parts)}, to {printable(event.out)}"


def done_line(event: ModelDone) -> str:
    other = " by another process" if event.by_other else ""
    failed = f", {event.failed:,} failed" if event.failed else ""
    return (
        f"{printable(event.model)}: done{other}, {count(event.analysed, 'matrix', 'matrices')}{failed}, "
        f"{duration(event.seconds)}"
    )


def model_failed_line(event: ModelFailed) -> str:
    again = "" if event.again_in is None else f" (again in {duration(event.again_in)})"
    other = " in another process" if event.by_other else ""
    return f"{printable(event.model)}: failed{other}: {printable(event.message)} [{event.reason}]{again}"


def gpu_line(event: GpuChanged) -> str:
    held = f", {size(event.others_bytes)} used" if event.state == "busy" and event.others_bytes else ""
    return f"{event.gpu}: {GPU_WORDS[event.state]}{held}{f' ({printable(event.why)})' if event.why else ''}"


def finished_lines(event: BatchFinished) -> list[str]:
    parts = [f"{event.done:,} done"]
    if event.failed_rows:
        parts[0] += f" ({event.failed_rows:,} of them with failed matrices)"
    parts.append(f"{event.failed:,} failed")
    if event.left:
        parts.append(f"{event.left:,} left")
    lines = [f"{'interrupted: ' if event.interrupted else ''}{', '.join(parts)} in {duration(event.seconds)}"]
    if event.interrupted:
        lines[0] += "; run the same command again to continue"
    return lines + [f"written {printable(file)}" for file in event.files]


def plan_lines(rows: Sequence[tuple[str, str, int | None, str]], total: int | None, eta: float | None) -> list[str]:
    """A plan: (model, state, bytes, why) per model, and the sum of the bytes that are left."""
    width = min(60, max((len(row[0]) for row in rows), default=0))
    lines = []
    for model, state, nbytes, why in rows:
        amount = "" if nbytes is None else size(nbytes)
        lines.append(f"{printable(model):<{width}}  {state:<10}  {amount:>8}  {printable(why)}".rstrip())
    states = [row[1] for row in rows]
    counts = ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))
    amount = "" if total is None else f", {size(total)} to read"
    time = "" if eta is None else f", about {clock(eta)}"
    return [*lines, f"{count(len(rows), 'model')}{f': {counts}' if counts else ''}{amount}{time}"]
