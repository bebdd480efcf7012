"""What a finished scan leaves on stdout for a person: the table of rows, and a report of what they say."""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from shardesd.events import ScanFinished
from shardesd.records import ROW_COLUMNS, Row
from shardesd.show.alpha import BINS, NO_FIT, RANGES, AlphaRange, alpha_bins, alpha_range, bin_range
from shardesd.show.columns import FAILED_STYLE, TABLE, fitted
from shardesd.show.layers import layers_view
from shardesd.show.text import (
    DASH,
    Lines,
    count,
    duration,
    fit,
    histogram,
    number,
    printable,
    shorten,
)

if TYPE_CHECKING:
    import polars as pl

MOST_ROWS = 200
"""A table up to this long is shown whole."""
HEAD_ROWS = 40
"""Rows that are shown of a longer one."""
MOST_FAILED = 20
_PIPE_WIDTH = 120
_SCALE = "1 2   4   6   8+"
"""Under the histogram of α: a mark at the bin that begins there."""


def print_report(
    layers: pl.DataFrame,
    finished: ScanFinished,
    console: Console | None = None,
    *,
    view: str = "table",
    stats: pl.DataFrame | None = None,
) -> None:
    """Writes `table` (or `layers_view`) and `report` to stdout (or `console`): in colour on a terminal, else bare."""
    if console is None:
        terminal = sys.stdout.isatty()
        # rich would take FORCE_COLOR for a terminal; what goes to a file or a pipe stays free of escape codes.
        width = None if terminal or os.environ.get("COLUMNS") else _PIPE_WIDTH
        console = Console(width=width, force_terminal=None if terminal else False)
    shown = layers_view(layers, stats) if view == "layers" else table(layers, finished)
    console.print(Group(shown, Text(), report(layers, finished)))


def table(layers: pl.DataFrame, finished: ScanFinished, width: int | None = None) -> RenderableType:
    """One line per row of `layers` (columns `records.ROW_COLUMNS`), as wide as the console or `width`.

    Of more than `MOST_ROWS` rows the first `HEAD_ROWS` are shown, and where the rest is.
    """
    rows = _rows(layers)
    shown = rows if len(rows) <= MOST_ROWS else rows[:HEAD_ROWS]

    def build(width: int, height: int, alpha: str) -> Iterator[Text]:
        if not rows:
            yield Text("no rows", style="dim")
            return
        columns = fitted(TABLE, shown, width, alpha)
        yield columns.head()
        for row in shown:
            yield columns.line(row)
        if len(shown) < len(rows):
            where = f", all in {printable(finished.files[0])}" if finished.files else ""
            yield from _wrapped(f"… and {len(rows) - len(shown):,} more rows{where}", width, style="dim")

    return Lines(build, width)


def report(layers: pl.DataFrame, finished: ScanFinished, width: int | None = None) -> RenderableType:
    """The summary by block type with the distribution of α, what failed or was skipped and why, and the files.

    `layers` has the columns `records.ROW_COLUMNS`; as wide as the console or `width`.
    """
    rows = _rows(layers)
    analysed = [row for row in rows if row.status == "ok"]
    failed = [row for row in rows if row.status == "failed"]

    def build(width: int, height: int, alpha: str) -> Iterator[Text]:
        yield _headline(finished, width)
        if analysed:
            yield Text()
            yield from _block_types(analysed, width, alpha)
            yield Text()
            yield from _shares(analysed, width, alpha)
        if failed:
            yield Text()
            yield from _failures(failed, width)
        for title, counts in (("skipped", finished.skipped), ("noted", _notes(analysed))):
            if counts:
                yield Text()
                yield from _counted(title, counts, width)
        if finished.files or finished.interrupted:
            yield Text()
        for i, file in enumerate(finished.files):
            yield from _wrapped(printable(file), width, lead="written " if i == 0 else " " * 8)
        if finished.interrupted:
            kept = finished.analysed + finished.failed
            yield from _wrapped(
                f"interrupted: {count(kept, 'finished row is', 'finished rows are')} kept; "
                "run the same command again to continue",
                width,
                style="bold",
            )

    return Lines(build, width)


def _rows(layers: pl.DataFrame) -> list[Row]:
    return [Row(**row) for row in layers.select(ROW_COLUMNS).to_dicts()]


def _headline(finished: ScanFinished, width: int) -> Text:
    pieces = [count(finished.analysed, "matrix", "matrices")]
    if finished.failed:
        pieces.append(f"{finished.failed:,} failed")
    if skipped := sum(finished.skipped.values()):
        pieces.append(f"{skipped:,} skipped")
    tail = f"  {', '.join(pieces)}, {duration(finished.seconds)}"
    name = shorten(printable(finished.model_id), max(12, width - cell_len(tail)))
    return Text(name, style="bold").append(tail, style="not bold")


def _block_types(rows: Sequence[Row], width: int, alpha: str) -> Iterator[Text]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.block_type, []).append(row)
    named = [(printable(name), group) for name, group in groups.items()]
    if len(named) > 1:
        named.append(("all", list(rows)))
    name_width = min(max(5, *(cell_len(name) for name, _ in named)), 16)
    cells = (("matrices", 8), (f"{alpha} median", 12), ("min", 8), ("max", 8))
    with_histogram = width >= name_width + sum(w + 1 for _, w in cells) + 2 + len(_SCALE)
    if width < name_width + sum(w + 1 for _, w in cells):
        cells = (("count", 5), (alpha, 6), ("min", 6), ("max", 6))
    head = fit("type", name_width) + "".join(f" {fit(text, w, right=True)}" for text, w in cells)
    yield Text(head + (f"   {_SCALE}" if with_histogram else ""), style="dim")
    for name, group in named:
        # A failed fit (α = −1) has no place among the α; it is counted below.
        alphas = [a for row in group if (a := row.alpha) is not None and alpha_range(a) is not NO_FIT]
        line = Text(fit(name, name_width), style="bold" if name == "all" and group == list(rows) else "")
        line.append(f" {fit(f'{len(group):,}', cells[0][1], right=True)}")
        summary: list[Callable[[Iterable[float]], float]] = [statistics.median, min, max]
        for take, (_, cell_width) in zip(summary, cells[1:], strict=True):
            value = take(alphas) if alphas else None
            style = f"not bold {alpha_range(value).style}"
            line.append(" " + fit(_marked(value), cell_width, right=True), style=style)
        if with_histogram:
            line.append("   ")
            for i, block in enumerate(histogram(alpha_bins(alphas)) if alphas else " " * BINS):
                line.append(block, style=f"not bold {bin_range(i).style}")
        yield line


def _marked(value: float | None) -> str:
    return f"{DASH}  " if value is None else f"{number(value, 2, 5)} {alpha_range(value).mark}"


def _shares(rows: Sequence[Row], width: int, alpha: str) -> Iterator[Text]:
    counts = {entry.name: 0 for entry in RANGES}
    for row in rows:
        counts[alpha_range(row.alpha).name] += 1
    for entry in RANGES:
        n = counts[entry.name]
        if entry is NO_FIT and not n:
            continue
        yield _share(entry, n, len(rows), width, alpha)


def _share(entry: AlphaRange, n: int, total: int, width: int, alpha: str) -> Text:
    bounds = f"{alpha} = -1" if entry is NO_FIT else entry.bounds.replace("α", alpha)
    line = Text(f"{entry.mark} {fit(entry.name, 13)}", style=entry.style if n else "dim")
    if width >= 50:
        line.append("  " + fit(bounds, 10 + 4 * (alpha != "α")), style="not dim")
    line.append(f" {n:>7,} {100 * n / total:>5.0f} %", style="not dim" if n else "")
    room = min(40, width - cell_len(line.plain) - 2)
    if room >= 8 and n:
        line.append("  " + "━" * max(1, round(room * n / total)))
    return line


def _failures(rows: Sequence[Row], width: int) -> Iterator[Text]:
    yield Text(f"failed {len(rows):,}", style=FAILED_STYLE)
    for row in rows[:MOST_FAILED]:
        lead = f"  {shorten(printable(row.longname), max(8, width - 2))}"
        reason = printable(row.reason)
        if cell_len(lead) + 2 + cell_len(reason) <= width:
            yield Text(lead, style=FAILED_STYLE).append(f"  {reason}")
        else:
            yield Text(lead, style=FAILED_STYLE)
            yield from _wrapped(reason, width, lead="    ")
    if len(rows) > MOST_FAILED:
        yield Text(f"  and {len(rows) - MOST_FAILED:,} more")


def _notes(rows: Sequence[Row]) -> dict[str, int]:
    """What is to be known of rows that were analysed all the same; failed fits have their own line."""
    notes = Counter(row.reason for row in rows if row.reason)
    notes.update(f"fit_status {row.fit_status}" for row in rows if row.fit_status not in (None, "ok", "no_valid_fit"))
    return dict(notes)


def _counted(title: str, counts: Mapping[str, int], width: int) -> Iterator[Text]:
    yield Text(f"{title} {sum(counts.values()):,}")
    digits = max(len(f"{n:,}") for n in counts.values())
    for reason, n in sorted(counts.items(), key=lambda item: -item[1]):
        yield from _wrapped(printable(reason), width, lead=f"  {n:>{digits},}  ", style="dim")


def _wrapped(text: str, width: int, *, lead: str = "", style: str = "") -> Iterator[Text]:
    """`text` broken at blanks (within a word only where it must be), the later lines indented as `lead` is."""
    room = max(1, width - cell_len(lead))
    line = ""
    for word in text.split(" "):
        while cell_len(word) > room:
            if line:
                yield Text(lead + line, style=style)
                lead, line = " " * cell_len(lead), ""
            cut = next(i for i in range(len(word), 0, -1) if i == 1 or cell_len(word[:i]) <= room)
            yield Text(lead + word[:cut], style=style)
            lead, word = " " * cell_len(lead), word[cut:]
        if line and cell_len(line) + 1 + cell_len(word) > room:
            yield Text(lead + line, style=style)
            lead, line = " " * cell_len(lead), word
        else:
            line = f"{line} {word}" if line else word
    if line:
        yield Text(lead + line, style=style)
