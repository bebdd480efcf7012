"""A model layer by layer: its matrices, or with ``--stats`` all tensors, under a line that sums up each layer."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from shardesd.records import ROW_COLUMNS, Row
from shardesd.show.columns import TABLE, fitted
from shardesd.show.text import DASH, Lines, count, fit, number, printable, shorten

if TYPE_CHECKING:
    import polars as pl

_STATS: tuple[tuple[str, int, str, int], ...] = (
    ("mean", 9, "mean", 5),
    ("std", 8, "std", 4),
    ("min", 8, "min", 3),
    ("max", 8, "max", 3),
    ("zeros", 6, "sparsity", 3),
    ("rank", 6, "rank_ratio", 3),
    ("90 %", 6, "svd_90_percent_ratio", 3),
)
"""Head, width, column of the statistics, decimals."""
_SHAPE = 14
_LEAST_NAME = 16
_MOST_NAME = 60


def layers_view(layers: pl.DataFrame, stats: pl.DataFrame | None = None, width: int | None = None) -> RenderableType:
    """Rows of `layers`, or of `stats` where there are any, grouped by layer in numeric order.

    Stacks that each count their layers from 0 (encoder and decoder, towers) are told apart by what stands before the
    number. What lies outside all layers comes last.
    """

    def build(width: int, height: int, alpha: str) -> Iterator[Text]:
        if stats is None:
            rows = [
                Row(**{name: value for name, value in row.items() if value is not None})
                for row in layers.select(ROW_COLUMNS).iter_rows(named=True)
            ]
            columns = fitted(TABLE, rows, width, alpha)
            yield columns.head()
            for title, members in _groups(rows, [row.longname for row in rows], [row.layer_index for row in rows]):
                yield _title(title, _of_matrices(members, alpha))
                yield from map(columns.line, members)
            return
        tensors = list(stats.iter_rows(named=True))
        room = width - _SHAPE - sum(size + 1 for _, size, _, _ in _STATS) - 1
        name_width = max(_LEAST_NAME, min(_MOST_NAME, room))
        heads = "".join(f" {fit(head, size, right=True)}" for head, size, _, _ in _STATS)
        yield Text(f"{fit('tensor', name_width)} {fit('shape', _SHAPE, right=True)}{heads}", style="dim")
        names = [tensor["tensor"] for tensor in tensors]
        for title, members in _groups(tensors, names, [tensor["layer_index"] for tensor in tensors]):
            yield _title(title, _of_tensors(members))
            for tensor in members:
                yield _line(tensor, name_width)

    return Lines(build, width)


def _groups(
    rows: Sequence[Any], names: Iterable[str], indices: Iterable[int | None]
) -> Iterator[tuple[str, list[Any]]]:
    found: dict[tuple[bool, str, int], list[Any]] = {}
    for row, name, index in zip(rows, names, indices, strict=True):
        stack = "" if index is None else re.split(rf"(?<![0-9])0*{index}(?![0-9])", name, maxsplit=1)[0].rstrip(".")
        found.setdefault((index is None, stack, index or 0), []).append(row)
    several = len({stack for outside, stack, _ in found if not outside}) > 1
    for outside, stack, index in sorted(found):
        title = "outside the layers" if outside else f"layer {index}" + (f" of {printable(stack)}" if several else "")
        yield title, found[outside, stack, index]


def _title(title: str, summary: str) -> Text:
    return Text(title, style="bold").append(f"  {summary}", style="dim")


def _of_matrices(rows: Sequence[Row], alpha: str) -> str:
    fits = [row.alpha for row in rows if row.status == "ok" and row.alpha is not None and row.alpha > 0]
    median = f", {alpha} median {statistics.median(fits):.2f}" if fits else ""
    return f"{count(len(rows), 'matrix', 'matrices')}, {count(sum(row.params for row in rows), 'parameter')}{median}"


def _of_tensors(tensors: Sequence[dict[str, Any]]) -> str:
    elements = sum(tensor["numel"] for tensor in tensors)
    known = [tensor for tensor in tensors if tensor["sparsity"] is not None]
    ranked = [tensor for tensor in tensors if tensor["design_rank"]]
    text = f"{count(len(tensors), 'tensor')}, {count(elements, 'element')}"
    if total := sum(tensor["numel"] for tensor in known):
        text += f", zeros {sum(tensor['sparsity'] * tensor['numel'] for tensor in known) / total:.1%}"
    if ranked:
        design = sum(tensor["design_rank"] for tensor in ranked)
        text += f", rank {sum(tensor['actual_rank'] for tensor in ranked) / design:.1%}"
    return text


def _line(tensor: dict[str, Any], name_width: int) -> Text:
    name = fit(shorten(printable(tensor["tensor"]), name_width), name_width)
    cells = [number(tensor[column], decimals, size) for _, size, column, decimals in _STATS]
    values = "".join(f" {fit(cell, size, right=True)}" for cell, (_, size, _, _) in zip(cells, _STATS, strict=True))
    return Text(f"{name} {fit(tensor['shape'] or DASH, _SHAPE, right=True)}{values}")
