"""The live picture of a batch: a pure function of a `BatchView`, a width and a height."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from shardesd.show.batch_plain import GPU_WORDS, model_failed_line
from shardesd.show.batch_progress import BatchView, Current, Gpu
from shardesd.show.columns import FAILED_STYLE
from shardesd.show.live import MOST_WIDTH
from shardesd.show.text import bar, clock, count, fit, printable, shorten, size, size_of

_STARTS = 5.0
"""Seconds that the first model may take to begin."""
_GPU_STYLE = {"ours": "green", "busy": "yellow", "gone": FAILED_STYLE}


def batch_picture(view: BatchView, width: int, height: int) -> list[Text]:
    """The lines of the display, at most `height` − 1 of them and none wider than `width`."""
    width = min(width, MOST_WIDTH)
    if view.started is None:
        return [Text(fit("planning …", width), style="dim")]
    top = [*_head(view, width), Text()]
    gpus = _gpus(view.gpus, width)
    # One line stays free: a terminal scrolls, and flickers, when the last one is written.
    room = height - 1 - len(top)
    gpus = gpus[: max(0, room - 2)]
    room -= len(gpus)
    failures = [
        Text(fit(model_failed_line(failure), width), style=FAILED_STYLE)
        for failure in view.failures[-max(0, min(len(view.failures), room // 3)) :]
        if room >= 3
    ]
    room -= len(failures) + (1 if failures else 0)
    current = [_model(model, view.now, width) for model in view.current[: max(0, room)]]
    if len(view.current) > len(current) > 0:
        current[-1] = Text(fit(f"and {len(view.current) - len(current) + 1} more", width), style="dim")
    if not current and room > 0:
        current = [Text(fit(_idle(view), width), style="dim")]
    return [*top, *current, *gpus, *([Text()] if failures else []), *failures][: max(1, height - 1)]


def _head(view: BatchView, width: int) -> list[Text]:
    started = view.started
    assert started is not None
    total = started.models
    ended = total - view.left
    left = f"{ended:,}/{total:,} models"
    eta = f"ETA {clock(view.eta)}"
    line = Text(left, style="bold")
    room = width - cell_len(left) - cell_len(eta) - 4
    if room >= 8:
        line.append("  ").append(bar(ended / total if total else 1.0, room)).append("  ")
        line.append(eta, style="not bold")
    pieces = [f"{view.done:,} done", f"{view.failed:,} failed", f"{view.left:,} left"]
    if view.waiting:
        pieces.append(f"{view.waiting:,} to be tried again")
    amount = size(view.bytes_done) if started.total_bytes is None else size_of(view.bytes_done, started.total_bytes)
    pieces += [f"{amount} read", f"elapsed {clock(view.elapsed)}"]
    pieces.append(f"memory {size(view.memory.rss)}, peak {size(view.memory.peak)}")
    pieces.append(f"→ {printable(started.out)}")
    status = Text()
    for piece in pieces:
        gap = " · " if status.plain else ""
        if cell_len(status.plain + gap + piece) <= width:
            style = FAILED_STYLE if piece.endswith(" failed") and view.failed else ""
            status.append(gap, style="dim").append(piece, style=style)
    return [line, status]


def _model(model: Current, now: float, width: int) -> Text:
    total = "?" if model.matrices is None else str(model.matrices)
    pieces = []
    if model.fetched is not None and model.fetched[0] != model.fetched[1]:
        pieces.append(f"downloading {size_of(*model.fetched)}")
    pieces.append(f"shards {model.shards_done}/{model.shards}" if model.shards else "opening")
    pieces.append(f"matrices {model.matrices_done}/{total}")
    if model.failed:
        pieces.append(f"{model.failed} failed")
    pieces.append(clock(now - model.since))
    right = "  ".join(pieces)
    while pieces and cell_len(right) > width - 16:
        right = "  ".join(pieces := pieces[1:])
    name_width = max(8, min(40, width - cell_len(right) - 2))
    line = Text(fit(shorten(printable(model.model), name_width), name_width))
    room = min(30, width - name_width - cell_len(right) - 4)
    if room >= 8:
        line.append("  ").append(bar(model.matrices_done / model.matrices if model.matrices else None, room))
    return line.append("  " + right, style="dim")


def _gpus(gpus: tuple[Gpu, ...], width: int) -> list[Text]:
    lines = []
    for gpu in gpus:
        words = "taken" if gpu.state == "ours" else GPU_WORDS[gpu.state]
        if gpu.state == "ours" and gpu.working:
            words = f"{count(gpu.working, 'matrix', 'matrices')} in work, {size(gpu.memory)}"
        elif gpu.state == "busy" and gpu.others_bytes:
            words += f", {size(gpu.others_bytes)}"
        lines.append(Text(fit(f"{gpu.name:<8} {words}", width), style=_GPU_STYLE.get(gpu.state, "dim")))
    return lines


def _idle(view: BatchView) -> str:
    if view.gpus and not any(gpu.state == "ours" for gpu in view.gpus):
        return "waiting for a free GPU"
    if view.left and view.elapsed < _STARTS and not view.waiting:
        return "starting …"
    if view.left:
        return "waiting for other processes, or for what is to be tried again"
    return "putting everything away"
