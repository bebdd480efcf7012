"""Columns of rows: which of them fit a width, and the cells of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from shardesd.records import Row
from shardesd.show.alpha import NO_FIT, alpha_range
from shardesd.show.text import DASH, fit, number, printable, shorten

FAILED_STYLE = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column beside the longname."""

    head: str
    width: int
    cell: Callable[[Row], str]
    room: int
    """The column gives way where the longname would be left with fewer cells than this."""
    left: bool = False
    long_head: str = ""
    """Where there is room enough."""


def _shape(row: Row) -> str:
    text = f"{row.M}×{row.N}"
    if len(text) <= 11:
        return text
    return "×".join(f"{side / 1000:.0f}k" if side >= 10_000 else str(side) for side in (row.M, row.N))


def alpha_cell(row: Row) -> str:
    """α and the letter of its range, 7 cells."""
    reading = alpha_range(row.alpha)
    return reading.name if reading is NO_FIT else f"{number(row.alpha, 2, 5)} {reading.mark}"


def _whole(value: int | None) -> str:
    return DASH if value is None else str(value)


TYPE = Column(head="type", width=9, cell=lambda row: printable(row.block_type), room=15, left=True)
SHAPE = Column(head="M×N", width=11, cell=_shape, room=16)
M = Column(head="M", width=6, cell=lambda row: str(row.M), room=16)
N = Column(head="N", width=6, cell=lambda row: str(row.N), room=16)
ALPHA = Column(head="α  ", width=7, cell=alpha_cell, room=10)
D = Column(head="D", width=5, cell=lambda row: number(row.D, 3, 5), room=18)
LAMBDA_MAX = Column(head="λmax", width=7, cell=lambda row: number(row.spectral_norm, 2, 7), room=20)
STABLE_RANK = Column(
    head="srank", width=6, cell=lambda row: number(row.stable_rank, 1, 6), room=20, long_head="stable rank"
)
SECONDS = Column(head="sec", width=5, cell=lambda row: number(row.seconds, 2, 5), room=20, long_head="seconds")
N_TAIL = Column(head="n_tail", width=6, cell=lambda row: _whole(row.n_tail), room=20)
ENTROPY = Column(head="entr.", width=5, cell=lambda row: number(row.entropy, 3, 5), room=20, long_head="entropy")
DTYPE = Column(
    # Without the groups of a quantised one: fp8_e4m3[128x128].
    head="dtype",
    width=8,
    cell=lambda row: printable(row.dtype.partition("[")[0]),
    room=40,
    left=True,
)
DEVICE = Column(head="device", width=7, cell=lambda row: printable(row.device or DASH), room=40, left=True)

LIVE = (
    TYPE,
    SHAPE,
    ALPHA,
    D,
    LAMBDA_MAX,
    STABLE_RANK,
    replace(N_TAIL, room=36),
    replace(ENTROPY, room=36),
    DTYPE,
    DEVICE,
    SECONDS,
)
TABLE = (TYPE, M, N, ALPHA, D, N_TAIL, LAMBDA_MAX, STABLE_RANK, ENTROPY)

# Where there is not room for all of them, the first ones here stay.
_PRECEDENCE = (ALPHA, TYPE, SHAPE, M, N, LAMBDA_MAX, STABLE_RANK, D, SECONDS, N_TAIL, ENTROPY, DTYPE, DEVICE)
_MOST_NAME = 72
_WIDE = 100


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns that fit, and how wide the longname is beside them."""

    columns: tuple[Column, ...]
    name_width: int
    gap: int
    alpha: str
    """The word for α that the console can show."""

    @property
    def width(self) -> int:
        return self.name_width + sum(column.width + self.gap for column in self.columns)

    def head(self) -> Text:
        cells = [fit("matrix", self.name_width)]
        for column in self.columns:
            cells.append(fit(_head(column, self.alpha), column.width, right=not column.left))
        return Text((" " * self.gap).join(cells), style="dim")

    def line(self, row: Row) -> Text:
        """One row: its numbers, or the reason why it has none."""
        gap = " " * self.gap
        name = fit(shorten(printable(row.longname), self.name_width), self.name_width)
        if row.status != "ok":
            text = Text(name, style=FAILED_STYLE if row.status == "failed" else "dim")
            if self.columns and self.columns[0].cell is TYPE.cell:
                text.append(gap + fit(TYPE.cell(row), self.columns[0].width))
            mark = "✗ " if row.status == "failed" else ""
            reason = f"{mark}{row.status}: {printable(row.reason)}"
            return text.append(gap + fit(reason, max(0, self.width - cell_len(text.plain) - self.gap)))
        text = Text(name)
        for column in self.columns:
            style = alpha_range(row.alpha).style if column.cell is alpha_cell else ""
            text.append(gap).append(fit(column.cell(row), column.width, right=not column.left), style=style)
        return text


def _head(column: Column, alpha: str) -> str:
    return column.head if alpha == "α" else column.head.replace("α  ", "alpha").replace("λmax", "eigmax")


def _headed(columns: Sequence[Column], width: int) -> list[Column]:
    if width < _WIDE:
        return list(columns)
    return [
        replace(column, head=column.long_head, width=max(column.width, len(column.long_head)))
        if column.long_head
        else column
        for column in columns
    ]


def layout(columns: Sequence[Column], width: int, alpha: str, longest_name: int = _MOST_NAME) -> Layout:
    """The columns of `columns` that fit `width`, in their order, and the rest of the width for the longname."""
    gap = 1 if width < _WIDE else 2
    columns = _headed(columns, width)
    cells = {column.cell: i for i, column in enumerate(_PRECEDENCE)}
    left, kept = width, set()
    for column in sorted(columns, key=lambda column: cells.get(column.cell, len(cells))):
        if left - column.width - gap >= min(column.room, longest_name):
            left -= column.width + gap
            kept.add(column.cell)
    lone = [column for column in columns if column.cell in kept & {M.cell, N.cell}]
    if len(lone) == 1:  # one side says little
        kept.remove(lone[0].cell)
        left += lone[0].width + gap
    chosen = tuple(column for column in columns if column.cell in kept)
    return Layout(chosen, max(1, min(left, longest_name, _MOST_NAME)), gap, alpha)


def fitted(columns: Sequence[Column], rows: Iterable[Row], width: int, alpha: str) -> Layout:
    """As `layout`, every column as wide as these rows need."""
    rows = list(rows)
    analysed = [row for row in rows if row.status == "ok"]
    sized = [
        replace(column, width=max([cell_len(_head(column, alpha)), *(cell_len(column.cell(row)) for row in analysed)]))
        for column in columns
    ]
    longest = max([6, *(cell_len(printable(row.longname)) for row in rows)])
    return layout(sized, width, alpha, longest)
