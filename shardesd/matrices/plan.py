"""One stored tensor → the matrices whose spectra are computed, or why there are none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from shardesd.matrices import eligible
from shardesd.matrices.expressions import Unknown
from shardesd.matrices.layouts import (
    Layout,
    Piece,
    Table,
    expert_count,
    find_layout,
    flattens,
    head_count,
    headed,
    promised,
)
from shardesd.matrices.names import Name, is_stack, parse_name
from shardesd.matrices.table import BUILT_IN
from shardesd.matrices.towers import Values
from shardesd.matrices.unique import renamed
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, Skip, TensorRef

CONV_SCALE = 0.5
"""Every λ of a convolution is multiplied by it, as the Model-Zoo pipeline and WeightWatcher do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What else is known when a tensor is planned."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, or empty."""
    names: frozenset[str] | None = None
    """Names of all tensors of the checkpoint, where they are known."""
    options: ScanOptions = field(default_factory=ScanOptions)
    hints: Mapping[str, str] = field(default_factory=dict)
    """Tensor name → what its module is, where that is known: ``embedding``, ``norm``, ``conv`` (a convolution),
    ``conv1d`` (a 1-D one or transformers' Conv1D; dimensions tell which)."""
    table: Table = BUILT_IN
    """Which tensors are fused or stacked, and how."""
    renamed: Mapping[str, str] = field(init=False)
    """See `matrices.unique`."""
    _cuts: dict[tuple[str, tuple[int, ...], bool], tuple[Layout, list[Piece]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _experts: dict[tuple[str, tuple[int, ...]], int] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """By stem and shape: thousands of tensors have a few dozen."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "renamed", renamed(self.names or ()))

    def cut(self, stored_name: str, shape: tuple[int, ...], *, stacked: bool = False) -> tuple[Layout, list[Piece]]:
        """The layout of a tensor, or of each of a stack, and its pieces; of a convolution's kernel, its channels'."""
        key = self.table.stem(stored_name), shape, stacked
        found = self._cuts.get(key)
        if found is None:
            sides, conv = (shape[0], shape[1]), len(shape) > 2
            found = self._cuts[key] = find_layout(
                key[0], sides, self.config, self.table, self.options.split, conv=conv, stacked=stacked
            )
        return found

    def experts(self, longname: str, shape: tuple[int, ...]) -> int:
        """How many matrices the table says are stacked along the first axis; 0 where it says nothing."""
        key = self.table.stem(longname), shape
        found = self._experts.get(key)
        if found is None:
            found = self._experts[key] = expert_count(key[0], shape, self.config, self.table)
        return found


def plan(tensor: TensorRef, context: Context) -> list[MatrixRef | Skip]:
    """The matrices in `tensor`, and what of it is left out; never empty.

    A tensor whose elements can't be analysed (packed codes that can't be decoded) gives one `Skip` with status
    ``failed``, where it would have given a matrix.
    """
    found = _plan(tensor, context)
    # While the other names aren't known, what no tensor may be called is.
    instead = (context.renamed if context.names is not None else renamed([tensor.name])).get(tensor.name)
    if instead is None:
        return found
    own = parse_name(tensor.name).longname
    return [replace(item, longname=instead + item.longname.removeprefix(own)) for item in found]


def stacked(tensor: TensorRef, context: Context) -> int:
    """How many matrices `plan` gives of a stack of experts, found from the first one alone; 0 for what is no such
    stack, or one whose experts need not all be alike, since globs may pick among them."""
    if context.options.include or context.options.exclude or tensor.dtype not in eligible.FLOATS:
        return 0
    name = _name(tensor.name, context)
    stack = _stack(tensor, name, context)
    if stack is None or _left_out(tensor, name, context) is not None:
        return 0
    first = _experts(stack, name, context, range(1))
    return stack.shape[0] * sum(isinstance(item, MatrixRef) for item in first)


def is_excluded(tensor: TensorRef, context: Context) -> bool:
    """Whether ``--include`` and ``--exclude`` leave out all of a tensor, whatever else would be said of it."""
    return all(eligible.is_excluded(item.longname, context.options) for item in plan(tensor, context))


def _plan(tensor: TensorRef, context: Context) -> list[MatrixRef | Skip]:
    name = _name(tensor.name, context)
    whole = _left_out(tensor, name, context)
    if whole is not None:
        return [whole]
    found = list(_matrices(tensor, name, context))
    if tensor.dtype not in eligible.FLOATS and any(isinstance(item, MatrixRef) for item in found):
        return [replace(_skip(name, tensor, eligible.unsupported(tensor.dtype)), status="failed")]
    return found


def _left_out(tensor: TensorRef, name: Name, context: Context) -> Skip | None:
    """What stands for a tensor that holds no matrix, or whose elements can't be had; None where it must be cut up."""
    reason = eligible.reason_by_name(
        tensor.name, name.block_type, len(tensor.shape), context.names or frozenset(), context.options
    )
    if tensor.problem and not reason:
        if eligible.is_excluded(name.longname, context.options):
            return _skip(name, tensor, eligible.EXCLUDED)
        return replace(_skip(name, tensor, tensor.problem), status="failed")
    reason = reason or eligible.reason_by_shape(tensor)
    if reason:
        return _skip(name, tensor, reason)
    if tensor.dtype in eligible.INTEGERS:
        if not eligible.is_quantised(tensor, context.names, context.config):
            return _skip(name, tensor, eligible.INTEGER)
        if eligible.is_excluded(name.longname, context.options):
            return _skip(name, tensor, eligible.EXCLUDED)
        return replace(_skip(name, tensor, eligible.QUANTISED), status="failed")
    return None


def estimate(names: Iterable[str], context: Context) -> int:
    """How many matrices `names` alone promise, before any shape is known: for a progress bar's total.

    Adds up over any division of the names. Routers and vocabulary heads, most of them too elongated, count where the
    options and config.json say that they pass.
    """
    names = list(names)
    siblings = context.names or frozenset(names)
    return sum(_promised(name, siblings, context) for name in names)


def slices(matrix: MatrixRef, raw: np.ndarray) -> list[np.ndarray]:
    """The 2-D views (M × N) of `raw`, the elements of `matrix.tensor` in its shape, that make up `matrix`.

    One for a linear layer, one per kernel position for a convolution. Nothing is copied unless a fold needs it.
    """
    picked = raw if matrix.fold is None else raw.reshape(matrix.fold)
    if matrix.pick is not None:
        picked = picked[matrix.pick]
    stack = picked.reshape(matrix.M, matrix.N, matrix.slices)
    return [stack[:, :, k] for k in range(matrix.slices)]


def holds_codes(item: MatrixRef | Skip) -> bool:
    """Whether a tensor was left out since its elements are codes, which mean nothing by themselves."""
    return isinstance(item, Skip) and item.reason == eligible.QUANTISED


def tied(tensor: TensorRef, original: TensorRef | str) -> Skip:
    """The skip of a tensor that repeats the embedding `original` (a tensor, or its name) byte for byte."""
    of = original if isinstance(original, str) else original.name
    return _skip(parse_name(tensor.name), tensor, f"{eligible.TIED} of {parse_name(of).longname}")


def _matrices(tensor: TensorRef, name: Name, context: Context) -> Iterator[MatrixRef | Skip]:
    shape = tensor.shape
    stack = _stack(tensor, name, context)
    if stack is not None:
        yield from _experts(stack, name, context, range(stack.shape[0]))
    elif len(shape) == 2:
        if name.block_type == "conv":  # SigLIP 2 embeds its patches with a linear layer
            name = name._replace(block_type="other")
        yield from _linear(tensor, name, name.longname, context.cut(name.longname, shape), context)
    elif context.options.split == "auto" and flattens(name.longname, shape, context.config, context.table):
        yield _flat(tensor, name, context)
    elif eligible.is_conv(tensor, context.hints.get(tensor.name)):
        yield from _conv(tensor, name._replace(block_type="conv"), context)
    else:
        yield _skip(name, tensor, eligible.UNKNOWN_LAYOUT)


def _stack(tensor: TensorRef, name: Name, context: Context) -> TensorRef | None:
    """A tensor of stacked experts as experts × rows × columns; None for any other."""
    shape = tensor.shape
    experts = 0
    if len(shape) in (2, 3) and context.options.split == "auto":
        experts = context.experts(name.longname, shape)
    if len(shape) == 3 and (experts or is_stack(name.longname)):
        return tensor
    return replace(tensor, shape=(experts, shape[0] // experts, shape[1])) if experts else None


def _experts(stack: TensorRef, name: Name, context: Context, which: range) -> Iterator[MatrixRef | Skip]:
    shape = stack.shape[1:]
    size = stack.nbytes // stack.shape[0]
    cut = context.cut(name.longname, shape, stacked=True)
    for i in which:
        start = stack.start + i * size
        expert = stack.part(shape, start, start + size)
        numbered = Name(f"{name.longname}.experts.{i}", name.layer_index, "expert")
        yield from _linear(expert, numbered, name.longname, cut, context, whole=False)


def _linear(
    tensor: TensorRef,
    name: Name,
    stored_name: str,
    cut: tuple[Layout, list[Piece]],
    context: Context,
    *,
    whole: bool = True,
) -> Iterator[MatrixRef | Skip]:
    """The matrices of a 2-D tensor; `stored_name` is the longname that layouts know it by."""
    row, pieces = cut
    for piece in pieces:
        kind = piece.block_type if piece.suffix and name.block_type != "expert" else name.block_type
        matrix = _piece(tensor, name, kind, piece, row, whole=whole)
        if context.options.per_head:
            yield from _heads(matrix, headed(piece, _stored(row, tensor, context), kind), row, stored_name, context)
        else:
            yield _checked(matrix, context)


def _piece(
    tensor: TensorRef, name: Name, block_type: str, piece: Piece, row: Layout, *, whole: bool = True
) -> MatrixRef:
    """One matrix of a tensor, or all of it; `whole`: whether that is all that is stored under its name."""
    M, N = piece.sides
    return MatrixRef(
        longname=name.longname + piece.suffix,
        tensor=tensor,
        M=M,
        N=N,
        block_type=block_type,
        layer_index=name.layer_index,
        fold=piece.fold if piece.suffix else None,
        pick=piece.pick if piece.suffix else None,
        whole=whole and not piece.suffix,
        note=row.note,
    )


def _stored(row: Layout, tensor: TensorRef, context: Context) -> Layout:
    """`row`, told by a live model that the tensor is a Conv1D's, inputs × outputs."""
    return replace(row, transposed=True) if context.hints.get(tensor.name) == "conv1d" else row


def _heads(
    matrix: MatrixRef, piece: Piece, row: Layout, stored_name: str, context: Context
) -> Iterator[MatrixRef | Skip]:
    """The heads of `matrix`, or all of it where it has none, or where it can't be told how they lie."""
    try:
        count = head_count(piece, row, stored_name, context.config)
        cuts = [piece.head(i, count) for i in range(count)] if count > 1 else []
    except Unknown as unknown:
        note = f"{matrix.note}; " if matrix.note else ""
        matrix, cuts = replace(matrix, note=f"{note}heads analysed together: {unknown}"), []
    if not cuts:
        yield _checked(matrix, context)
    for i, (pick, (M, N)) in enumerate(cuts):
        one = replace(matrix, longname=f"{matrix.longname}.head.{i}", M=M, N=N, fold=piece.fold, pick=pick, whole=False)
        yield _checked(one, context, is_head=True)


def _flat(tensor: TensorRef, name: Name, context: Context) -> MatrixRef | Skip:
    """All but the first dimension taken together."""
    M, N = tensor.shape[0], prod(tensor.shape[1:])
    matrix = MatrixRef(
        longname=name.longname,
        tensor=tensor,
        M=M,
        N=N,
        block_type=name.block_type,
        layer_index=name.layer_index,
        fold=(M, N),
    )
    return _checked(matrix, context)


def _conv(tensor: TensorRef, name: Name, context: Context) -> Iterator[MatrixRef | Skip]:
    kernel = tensor.shape[2:]
    row, pieces = context.cut(name.longname, tensor.shape)
    for piece in pieces:
        one = _piece(tensor, name, name.block_type, piece, row)
        fold = None if one.fold is None else (*one.fold, *kernel)
        pooled = replace(one, fold=fold, slices=prod(kernel), scale=CONV_SCALE)
        yield _checked(pooled, context, is_pooled=True)


def _checked(
    matrix: MatrixRef, context: Context, *, is_head: bool = False, is_pooled: bool = False
) -> MatrixRef | Skip:
    """`matrix`, or why it is left out after all. Heads are elongated, and whoever asks for them means them; what is
    pooled from a kernel's positions may be, too."""
    M, N, options = matrix.M, matrix.N, context.options
    if eligible.is_excluded(matrix.longname, options):
        reason = eligible.EXCLUDED
    elif min(M, N) == 1 and is_pooled:
        reason = eligible.ONE_INPUT if N == 1 else eligible.ONE_OUTPUT
    elif min(M, N) == 1:
        reason = eligible.ONE_ROW
    elif is_head or is_pooled:
        return matrix
    # Whoever asks for embeddings means them, and nearly all are elongated.
    elif matrix.block_type not in ("embedding", "position") and eligible.is_elongated(M, N, options):
        reason = eligible.ASPECT
    else:
        return matrix
    return _skip(Name(matrix.longname, matrix.layer_index, matrix.block_type), matrix.tensor, reason)


def _skip(name: Name, tensor: TensorRef, reason: str) -> Skip:
    return Skip(
        longname=name.longname, reason=reason, tensor=tensor, block_type=name.block_type, layer_index=name.layer_index
    )


def _name(tensor_name: str, context: Context) -> Name:
    """What the name tells, corrected by what the model and the live module are."""
    name = parse_name(tensor_name)
    if name.block_type == "lm_head" and "_class_name" in context.config:  # diffusers' proj_out: no vocabulary
        name = name._replace(block_type="other")
    hint = context.hints.get(tensor_name)
    if hint == "norm" or (hint == "embedding" and name.block_type not in ("position", "lm_head")):
        return name._replace(block_type=hint)
    return name


def _promised(tensor_name: str, siblings: frozenset[str], context: Context) -> int:
    name = _name(tensor_name, context)
    if eligible.reason_by_name(tensor_name, name.block_type, None, siblings, context.options):
        return 0
    stack = is_stack(name.longname)
    if not (stack or tensor_name.endswith(("weight", "proj", "projection"))):
        return 0
    if eligible.is_excluded(name.longname, context.options):
        return 0
    if name.block_type in ("lm_head", "router") and not _passes(name.block_type, context):
        return 0
    count = 1
    if context.options.split == "auto":
        count = promised(name.longname, context.config, context.table, per_head=context.options.per_head)
    experts = Values(name.longname, context.config)("experts") if stack else 1
    return count * (experts or 1)


def _passes(block_type: str, context: Context) -> bool:
    """Whether a matrix known to be elongated in most models will not be skipped for it."""
    vocab, hidden = (context.config.get(key) for key in ("vocab_size", "hidden_size"))
    if block_type == "lm_head" and isinstance(vocab, int) and isinstance(hidden, int):
        return not eligible.is_elongated(vocab, hidden, context.options)
    return context.options.max_aspect == 0
