"""The live picture of a scan: a pure function of a `View`, a width and a height."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from shardesd.events import ScanStarted
from shardesd.show.alpha import RANGES
from shardesd.show.columns import FAILED_STYLE, LIVE, layout
from shardesd.show.progress import LAST_ROWS, View
from shardesd.show.text import DASH, bar, clock, fit, printable, shorten, size, size_of

MOST_WIDTH = 160
_LABEL, _COUNT, _AMOUNT, _RATE = 8, 11, 13, 10


def picture(view: View, width: int, height: int, alpha: str = "α") -> list[Text]:
    """The lines of the display, at most `height` − 1 of them and, from 20 cells on, none wider than `width`."""
    width = min(width, MOST_WIDTH)
    if view.started is None:
        return [Text(fit("opening …", width), style="dim")]
    top = [*_title(view.started, width), Text(), *_bars(view, width), _status(view, width), *_devices(view, width)]
    bottom = [_now(view, width), _ranges(view, width, alpha)]
    # One line stays free: a terminal scrolls, and flickers, when the last one is written.
    room = min(LAST_ROWS, height - 1 - len(top) - len(bottom) - 2)
    if room < 1:
        return top[: max(1, height - 1)]
    columns = layout(LIVE, width, alpha)
    rows = [columns.line(row) for row in view.rows[-room:]]
    return [*top, Text(), columns.head(), *rows, *bottom]


def devices(started: ScanStarted) -> str:
    names = [printable(name) for name in started.devices]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)} devices)"


def place(started: ScanStarted) -> str:
    """``org/name@revision abcdef0``"""
    text = printable(started.model_id)
    if started.revision and started.revision != started.commit:
        text += f"@{printable(started.revision)}"
    return text


def _title(started: ScanStarted, width: int) -> list[Text]:
    right = devices(started)
    commit = (started.commit or "")[:7]
    room = width - (len(commit) + 2 if commit else 0) - cell_len(right) - 2
    if room < 16:
        room, right = width - (len(commit) + 2 if commit else 0), ""
    name = shorten(place(started), room)
    title = Text(name, style="bold")
    if commit:
        title.append(f"  {commit}", style="not bold dim")
    title.append(" " * (width - cell_len(title.plain) - cell_len(right)) + right, style="not bold")
    lines = [title]
    if started.out:
        lines.append(Text(fit(f"→ {printable(started.out)}", width), style="dim"))
    return lines


def _bars(view: View, width: int) -> list[Text]:
    fraction = view.bytes_done / view.total_bytes if view.total_bytes else _ratio(view.shards_done, view.shards)
    lines = [
        _bar_line(
            "shards",
            f"{view.shards_done}/{view.shards}",
            1.0 if view.shards and view.shards_done == view.shards else fraction,
            size_of(view.bytes_done, view.total_bytes),
            _per_second(view.bytes_per_second),
            width,
        )
    ]
    if fetched := view.fetched:
        share = _ratio(view.fetched_bytes, view.needed_bytes)
        lines.append(
            _bar_line(
                "download",
                DASH if share is None else f"{100 * share:.0f} %",
                share,
                size_of(view.fetched_bytes, view.needed_bytes),
                _per_second(fetched.per_second) if fetched.active else "ready",
                width,
            )
        )
    share = _ratio(view.matrices_done, view.matrices)
    total = "?" if view.matrices is None else f"{'' if view.exact else '≈'}{view.matrices}"
    lines.append(
        _bar_line(
            "matrices",
            f"{view.matrices_done}/{total}",
            share,
            DASH if share is None else f"{100 * share:.0f} %",
            f"ETA {clock(view.eta)}",
            width,
        )
    )
    return lines


def _bar_line(label: str, number: str, share: float | None, amount: str, rate: str, width: int) -> Text:
    text = Text().append(fit(label, _LABEL), style="dim").append(" " + fit(number, _COUNT, right=True))
    rest = width - _LABEL - _COUNT - 1
    # Short of cells, the rate outlives the amount and the bar.
    with_amount = rest >= _AMOUNT + _RATE + 2
    used = _RATE + 1 + (_AMOUNT + 1 if with_amount else 0)
    if rest - used >= 8:
        text.append("  ").append(bar(share, rest - used - 2))
        rest = used
    if with_amount:
        text.append(" " + fit(amount, _AMOUNT, right=True))
        rest -= _AMOUNT + 1
    if rest >= _RATE + 1:
        text.append(" " + fit(rate, _RATE, right=True))
    return text


def _status(view: View, width: int) -> Text:
    pieces = [
        (f"elapsed {clock(view.elapsed)}", ""),
        (f"memory {size(view.memory.rss)}, peak {size(view.memory.peak)}", ""),
        (f"{view.kept} kept from before", ""),
        (f"{view.skipped} skipped", ""),
        (f"{view.failed} failed", FAILED_STYLE),
    ]
    if view.engine and view.engine.ready:
        pieces.insert(2, (f"{view.engine.ready} ready, {size(view.engine.bytes_in_flight)} in flight", ""))
    if view.started and view.started.resumed:
        pieces.append((f"{view.started.resumed} from before", ""))
    text = Text()
    for words, style in pieces:
        if words[:2] == "0 ":
            continue
        gap = " · " if text.plain else ""
        if cell_len(text.plain + gap + words) <= width:
            text.append(gap, style="dim").append(words, style=style)
    return text


def _devices(view: View, width: int) -> list[Text]:
    """A line for each GPU; none where only the CPU works, of which the line on what is under way says enough."""
    reports = view.engine.devices if view.engine else ()
    if all(report.name == "cpu" for report in reports):
        return []
    lines = []
    for report in reports:
        text = Text().append(fit(report.name, _LABEL), style="dim")
        text.append(" " + fit(f"{report.done} done", _COUNT, right=True))
        if report.retired:
            text.append("  " + fit(f"retired: {printable(report.retired)}", width - len(text) - 2), style=FAILED_STYLE)
        else:
            text.append(" " + fit(size(report.memory) if report.memory else DASH, _AMOUNT, right=True))
            if report.working and width - len(text) > 16:
                more = f" and {len(report.working) - 1} more" if len(report.working) > 1 else ""
                name = shorten(printable(report.working[0]), width - len(text) - 2 - len(more))
                text.append(f"  {name}{more}")
        lines.append(text)
    return lines


def _now(view: View, width: int) -> Text:
    running = view.running
    if running is None or running.seconds < 1:
        return Text()
    right = f"  {printable(running.device)}  {clock(running.seconds)}"
    if running.others:
        right += f"  and {running.others} more"
    name = shorten(printable(running.longname), max(1, width - cell_len(right) - 4))
    return Text(fit(f"now {name}{right}", width), style="dim")


def _ranges(view: View, width: int, alpha: str) -> Text:
    """The legend of the letters beside α, with how many rows each has so far."""
    shown = [entry for entry in RANGES if entry.mark != "-" or view.ranges.get(entry.name)]
    text = Text().append(f"{alpha} ", style="dim")
    for form in ("{mark} {name} {n}", "{mark} {n}"):
        words = [form.format(mark=e.mark, name=e.name, n=view.ranges.get(e.name, 0)) for e in shown]
        if sum(len(word) + 3 for word in words) + len(alpha) <= width:
            for i, (entry, word) in enumerate(zip(shown, words, strict=True)):
                text.append("   " if i else " ").append(
                    word, style=entry.style if view.ranges.get(entry.name) else "dim"
                )
            break
    return text


def _ratio(done: int, total: int | None) -> float | None:
    return done / total if total else None


def _per_second(value: float | None) -> str:
    return DASH if value is None else f"{size(value)}/s"
