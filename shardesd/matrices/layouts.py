"""How one stored tensor holds several matrices: what a row of the table says, and how a tensor is cut by it.

A row cuts the side of the outputs (rows of nn.Linear, columns where the tensor is stored as inputs × outputs) into
`groups` equal groups, and each group into the same consecutive parts; one matrix is the same part of all groups.
``query_key_value`` of GPT-NeoX has a group per head with the parts q, k, v; thirds are one group of three parts;
interleaved gate and up are groups of one column each. The rows themselves: `matrices.table`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from shardesd.matrices.expressions import Unknown, holds, size
from shardesd.matrices.names import ends_with, parse_name, role, unnumbered, unwrapped
from shardesd.matrices.towers import Values

ALL = slice(None)

BLOCK_TYPE_OF_SUFFIX: Mapping[str, str] = {
    **{"q": "q_proj", "k": "k_proj", "v": "v_proj", "kv": "kv", "z": "gate_proj", "gate": "gate_proj", "up": "up_proj"},
    "input": "up_proj",
}
_HEADS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads", "o_proj": "heads"}
"""Block types that ``--per-head`` cuts, and how many heads they have where the row doesn't say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One matrix inside a fused tensor. Sizes are expressions (`matrices.expressions`)."""

    suffix: str
    """Added to the longname, after an underscore."""
    block_type: str
    size: str = ""
    """Rows in each group; empty: an equal share of what the others leave."""
    heads: str = ""
    """How many heads it has; empty: by its block type. 1: it is never cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A row of the table: for tensors whose name, model and sizes match."""

    names: str
    """Rule for the end of the longname (see `matrices.names`)."""
    models: tuple[str, ...] = ()
    """Globs on the ``model_type`` of the tensor's tower; empty: any, or none."""
    when: str = ""
    """A condition, also on ``rows``, ``columns`` (of one expert) and ``kernel``; what it lacks makes it false."""
    transposed: bool = False
    """Stored as inputs × outputs. Spectra don't care; the side that is cut does."""
    experts: str = ""
    """How many matrices are stacked along the first axis, of a 3-D tensor or (as many rows each) of a 2-D one."""
    groups: str = "1"
    parts: tuple[Part, ...] = ()
    """Empty: the tensor is analysed whole."""
    heads: str = ""
    """Of a tensor that is not cut into parts, as `Part.heads`."""
    flatten: bool = False
    """A tensor of three dimensions or more that is one matrix (first × product of the others): a convolution's kernel
    that steps by its own size, or a linear layer's weight whose heads have a dimension of their own."""
    conv: bool = False
    """For a convolution's kernel, whose output channels are cut, at every kernel position."""
    note: str = ""
    """What a user should know of a tensor that is analysed whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One matrix of a tensor M × N, cut along one side: ``start … start + size`` of each of `groups` groups."""

    shape: tuple[int, int]
    """Of the tensor, or of one expert of it."""
    axis: int
    """0: rows are cut, 1: columns."""
    groups: int
    start: int
    size: int
    suffix: str = ""
    block_type: str = ""
    heads: str = ""

    @property
    def fold(self) -> tuple[int, ...]:
        """The tensor's shape with its groups told apart."""
        M, N = self.shape
        return (self.groups, M // self.groups, N) if self.axis == 0 else (M, self.groups, N // self.groups)

    @property
    def pick(self) -> tuple[int | slice, ...]:
        """Index into the folded tensor."""
        part = slice(self.start, self.start + self.size)
        return (ALL, part) if self.axis == 0 else (ALL, ALL, part)

    @property
    def sides(self) -> tuple[int, int]:
        """M × N of the matrix."""
        length = self.groups * self.size
        return (length, self.shape[1]) if self.axis == 0 else (self.shape[0], length)

    def head(self, i: int, count: int) -> tuple[tuple[int | slice, ...], tuple[int, int]]:
        """`pick` and M × N of head `i` of `count`. Raises `Unknown` where heads don't lie side by side."""
        width, left = divmod(self.groups * self.size, count)
        if left or self.size % width:
            raise Unknown(f"{self.groups * self.size} don't make {count} heads")
        group, j = divmod(i, self.size // width)
        part = slice(self.start + j * width, self.start + (j + 1) * width)
        if self.axis == 0:
            return (group, part), (width, self.shape[1])
        return (ALL, group, part), (self.shape[0], width)


class Table:
    """Rows, asked from the top; a user's come before the built-in ones."""

    def __init__(self, rows: Iterable[Layout], *, numbers: bool = True, own: int = 0) -> None:
        """`numbers`: whether a row may ask for a certain layer or expert. The first `own` rows are a user's."""
        self.rows = tuple(rows)
        self._own = self.rows[:own]
        self._numbers = numbers
        self._found = lru_cache(maxsize=1024)(self._find)
        self._by_model: dict[str, tuple[tuple[Layout, re.Pattern[str]], ...]] = {}

    def stem(self, longname: str) -> str:
        """What counts of a name: no adapter's wrapper, and no layer's or expert's number where no row asks for one."""
        return unwrapped(longname if self._numbers else unnumbered(longname))

    def named(self, longname: str, model_type: str) -> list[Layout]:
        """The rows for a tensor of this name in such a model, whatever its sizes."""
        return self._found(self.stem(longname), model_type)

    def unmet(self, longnames: Iterable[str], config: Mapping[str, Any]) -> list[Layout]:
        """The user's rows that name none of these tensors, or models of another type."""
        left = list(self._own)
        for longname in longnames:
            met = self.named(longname, Values(longname, config).model_type)
            left = [row for row in left if row not in met]
        return left

    def _find(self, longname: str, model_type: str) -> list[Layout]:
        if model_type not in self._by_model:
            self._by_model[model_type] = tuple(
                (row, ends_with(row.names)) for row in self.rows if not row.models or _is_among(model_type, row.models)
            )
        return [row for row, rule in self._by_model[model_type] if rule.search(longname)]


def _is_among(model_type: str, globs: Collection[str]) -> bool:
    """Few begin as it does: to compile all takes longer than to plan a model."""
    return any(
        model_type.startswith(re.split(r"[*?[]", glob, maxsplit=1)[0]) and fnmatchcase(model_type, glob)
        for glob in globs
    )


def find_layout(
    longname: str,
    shape: tuple[int, int],
    config: Mapping[str, Any],
    table: Table,
    split: str = "auto",
    *,
    conv: bool = False,
    stacked: bool = False,
) -> tuple[Layout, list[Piece]]:
    """How a tensor is cut: the row that says so, and a piece per matrix (one where it is whole).

    `shape` is that of a 2-D tensor, of one expert of those that are `stacked`, or (cout, cin) of a convolution's kernel
    (`conv`). `split` is ``--split``. A fused tensor that no row fits comes whole, with a row that has the reason as its
    `note`.
    """
    part = role(longname)
    fused = part if part in ("qkv", "kv", "gate_up") else ""
    if split == "off":
        return Layout(names="", note=f"fused {fused} analysed whole (--split off)" if fused else ""), [_whole(shape)]
    if split == "thirds":
        axis = _thirds_axis(shape) if fused == "qkv" and not conv else None
        if axis is not None:
            return THIRDS, _cut(THIRDS, shape, axis, _no_values)
        return Layout(names="", note=f"fused {fused} analysed whole (--split thirds)" if fused else ""), [_whole(shape)]
    values = Values(longname, config, {"rows": shape[0], "columns": shape[1]})
    why = ""
    for row in table.named(longname, values.model_type):
        if row.flatten or row.conv != conv:
            continue
        try:
            if row.when and not _holds(row.when, values):
                continue
            if row.experts and not stacked:
                raise Unknown(f"{shape[0]} rows don't make {size(row.experts, values)} experts")
            return row, _cut(row, shape, int(row.transposed), values)
        except Unknown as unknown:
            why = why or f": {unknown}"
    note = f"fused {fused or longname.rpartition('.')[2]} analysed whole{why}" if fused or why else ""
    return Layout(names="", note=note), [_whole(shape)]


def flattens(longname: str, shape: tuple[int, ...], config: Mapping[str, Any], table: Table) -> bool:
    """Whether a tensor of three dimensions or more is one matrix (`Layout.flatten`)."""
    own = {"rows": shape[0], "channels": shape[1]}
    if len(shape) > 3 and shape[-1] == shape[-2]:
        own["kernel"] = shape[-1]
    if len(shape) == 5:
        own["frames"] = shape[2]
    values = Values(longname, config, own)
    return any(
        row.flatten and (not row.when or _holds(row.when, values)) for row in table.named(longname, values.model_type)
    )


def expert_count(longname: str, shape: tuple[int, ...], config: Mapping[str, Any], table: Table) -> int:
    """How many matrices the table says are stacked along the first axis of a tensor; 0 where it says nothing."""
    values = Values(longname, config)
    for row in table.named(longname, values.model_type):
        try:
            count = size(row.experts, values) if row.experts else 0
        except Unknown:
            continue
        if count and (shape[0] == count if len(shape) == 3 else shape[0] % count == 0):
            return count
    return 0


def head_count(piece: Piece, row: Layout, longname: str, config: Mapping[str, Any]) -> int:
    """How many heads a matrix is cut into for ``--per-head``; 1 for one that has none. Raises `Unknown`."""
    told = piece.heads or row.heads
    if not told and piece.block_type not in _HEADS:
        return 1
    values = Values(longname, config, layer=parse_name(longname).layer_index)
    count = size(told or _HEADS[piece.block_type], values)
    length = piece.groups * piece.size
    if not told and count * size("head_dim", values) != length:
        raise Unknown(f"{length} are not {count} heads of {size('head_dim', values)}")
    return count


def headed(piece: Piece, row: Layout, block_type: str) -> Piece:
    """`piece`, cut along the side that heads lie on: the outputs, but the inputs of an output projection."""
    if piece.suffix:
        return piece
    axis = int(row.transposed) ^ int(block_type == "o_proj")
    return replace(piece, axis=axis, size=piece.shape[axis], block_type=block_type)


def promised(longname: str, config: Mapping[str, Any], table: Table, *, per_head: bool) -> int:
    """How many matrices the tensor holds, as far as its name and the model tell; `find_layout` has the last word."""
    values = Values(longname, config)
    row = next((row for row in table.named(longname, values.model_type) if _may_hold(row, values)), _PLAIN)
    heads = [part.heads or _HEADS.get(part.block_type, "1") for part in row.parts]
    if not heads:
        heads = [row.heads or _HEADS.get(role(longname), "1")]
    if not per_head:
        return len(heads)
    return sum(_or_one(text, values) for text in heads)


_PLAIN = Layout(names="")
THIRDS = Layout(
    names="",
    parts=tuple(Part(suffix=suffix, block_type=BLOCK_TYPE_OF_SUFFIX[suffix]) for suffix in "qkv"),
)
"""The Model-Zoo pipeline's rule: a fused qkv whose longer side is three times the other is cut in three."""


def _cut(row: Layout, shape: tuple[int, int], axis: int, values: Any) -> list[Piece]:
    if not row.parts:
        return [_whole(shape)]
    groups = size(row.groups, values)
    width, left = divmod(shape[axis], groups)
    given = [size(part.size, values) if part.size else 0 for part in row.parts]
    open_ = given.count(0)
    rest = width - sum(given)
    if left or (rest if not open_ else rest < open_ or rest % open_):
        raise Unknown(f"config.json doesn't fit its shape {shape[0]}×{shape[1]}")
    pieces, start = [], 0
    for part, known in zip(row.parts, given, strict=True):
        length = known or rest // open_
        pieces.append(
            Piece(
                shape=shape,
                axis=axis,
                groups=groups,
                start=start,
                size=length,
                suffix=f"_{part.suffix}",
                block_type=part.block_type,
                heads=part.heads,
            )
        )
        start += length
    return pieces


def _whole(shape: tuple[int, int]) -> Piece:
    return Piece(shape=shape, axis=0, groups=1, start=0, size=shape[0])


def _thirds_axis(shape: tuple[int, int]) -> int | None:
    return next((axis for axis in (0, 1) if shape[axis] == 3 * shape[1 - axis]), None)


def _no_values(name: str) -> None:
    return None


def _holds(when: str, values: Values) -> bool:
    try:
        return holds(when, values)
    except Unknown:
        return False


def _may_hold(row: Layout, values: Values) -> bool:
    try:
        return not row.when or holds(row.when, values)
    except Unknown:
        return True


def _or_one(text: str, values: Values) -> int:
    try:
        return size(text, values)
    except Unknown:
        return 1
