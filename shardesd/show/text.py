"""Numbers, sizes, times and names as short text, and text that any terminal can take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

DASH = "–"
BLOCKS = "▁▂▃▄▅▆▇█"

# One character for one, so that columns stay where they are.
_ASCII = str.maketrans(
    {"…": "~", "×": "x", "≈": "~", "–": "-", "—": "-", "−": "-", "·": "-", "→": ">", "✗": "x", "━": "=", "╸": "-"}
    | {"─": "-", "α": "a", "λ": "l", "≤": "<", "≥": ">", "▌": "#"}
    | dict(zip(BLOCKS, ".:-=+*%#", strict=True))
)


def size(nbytes: float) -> str:
    """``412 MB``, ``1.2 GB``: decimal units, at most three digits and a point."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    unit = units.pop(0)
    while value >= 999.5 and units:
        value, unit = value / 1000, units.pop(0)
    return f"{_short(value, unit)} {unit}"


def size_of(done: float, total: float | None) -> str:
    """``4.1/15.2 GB``: both in the unit of the total."""
    if total is None:
        return size(done)
    number, unit = size(total).split(" ")
    scale = 1000 ** ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    return f"{_short(done / scale, unit)}/{number} {unit}"


def _short(value: float, unit: str) -> str:
    return f"{value:.1f}" if value < 99.95 and unit != "B" else f"{value:.0f}"


def clock(seconds: float | None) -> str:
    """``0:08``, ``4:12``, ``1:04:12``, ``3 d 04:12``; a dash where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, sec = divmod(int(max(0.0, seconds) + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{sec:02}" if hours else f"{minutes}:{sec:02}"


def duration(seconds: float) -> str:
    """``0.42 s``, ``9.2 s``, then as `clock`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    return clock(seconds)


def count(n: int, noun: str, plural: str | None = None) -> str:
    """``1 matrix``, ``1,204 matrices``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def number(value: float | None, decimals: int, width: int) -> str:
    """`value` with so many decimals; with fewer, then with an exponent, where it would be wider than `width`.

    Small values that the decimals would show as 0 get an exponent too.
    """
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0 or abs(value) >= 0.5 * 10.0**-decimals:
        for places in range(decimals, -1, -1):
            text = f"{value:.{places}f}"
            if len(text) <= width:
                return text
    mantissa, exponent = f"{value:.1e}".split("e")
    text = f"{mantissa}e{int(exponent)}"
    return text if len(text) <= width else f"{value:.0e}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")


def printable(text: str) -> str:
    """`text` on one line and without control characters: names come out of files that nobody vouches for."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def encodable(text: str, encoding: str) -> str:
    """`text` with a stand-in for every character that `encoding` lacks, as many characters as before."""
    if encoding.lower().startswith("utf"):
        return text
    return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """`text` in exactly `width` cells, with an ellipsis where it was cut."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        return set_cell_size(set_cell_size(text, width - 1).rstrip() + "…", width)
    return " " * (width - length) + text if right else text + " " * (width - length)


def shorten(name: str, width: int) -> str:
    """A longname in at most `width` cells, cut so that its numbers and its last parts stay.

    ``encoder.layer.0.attention.self.query`` in 24 cells: ``e…0.attention.self.query``. Of what stands before the first
    number the first letter stays and no more, whatever the room: names under each other are cut alike.
    """
    if cell_len(name) <= width:
        return name
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if first is not None:
        (index, *rest), start = parts[first:], f"{name[:1]}…" if first else ""
        if cell_len(whole := start + ".".join([index, *rest])) <= width:
            return whole
        for dropped in range(1, len(rest)):
            if rest[dropped - 1].isdigit():
                break
            tail = f"…{'.'.join(rest[dropped:])}"
            room = width - cell_len(start + index + tail)
            if room >= 0:
                # Of what is dropped, as much of its beginning as there is room for.
                begun = f".{'.'.join(rest[:dropped])}"
                return start + index + set_cell_size(begun, min(room, cell_len(begun))).rstrip(". ") + tail
    kept = max(0, width - 1)
    left = kept // 3
    tail = name
    while tail and cell_len(tail) > kept - left:
        tail = tail[1:]
    return f"{set_cell_size(name, left).rstrip()}…{tail}" if width > 0 else ""


def bar(fraction: float | None, width: int) -> Text:
    """A thin bar `width` cells wide; empty where the fraction is unknown."""
    halves = round(max(0.0, min(1.0, fraction or 0.0)) * 2 * width)
    full, half = divmod(halves, 2)
    text = Text("━" * full + "╸" * half, style="color(31)")
    # Without colours the rest must not look like the bar itself.
    return text.append("─" * (width - full - half), style="dim")


def histogram(counts: Iterable[int]) -> str:
    """A block for each count, its height relative to the greatest; a space for none."""
    heights = list(counts)
    top = max(heights, default=0)
    return "".join(BLOCKS[math.ceil(8 * n / top) - 1] if n else " " for n in heights)


class Lines:
    """A renderable of lines that are made for the console at hand and never wrap."""

    def __init__(self, build: Callable[[int, int, str], Iterable[Text]], width: int | None = None) -> None:
        """`build` gets the width and height in cells and the word for α (``alpha`` where the encoding lacks it)."""
        self._build = build
        self._width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, self._width or options.max_width)
        yield from self._prepared(width, options)

    def _prepared(self, width: int, options: ConsoleOptions) -> Iterator[Text]:
        for line in self._build(width, options.size.height, "alpha" if options.ascii_only else "α"):
            line.plain = encodable(line.plain, options.encoding)
            line.rstrip()
            line.no_wrap, line.overflow = True, "crop"
            line.truncate(width, overflow="crop")
            yield line
