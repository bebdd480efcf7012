"""One stored tensor → the matrices whose spectra are computed, or why there are none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from shardesd.matrices import eligible
from shardesd.matrices.layouts import Part, find_layout, is_stack, promised_experts, promised_parts
from shardesd.matrices.names import Name, parse_name
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
    renamed: Mapping[str, str] = field(init=False)
    """See `matrices.unique`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "renamed", renamed(self.names or ()))


def plan(tensor: TensorRef, context: Context) -> list[MatrixRef | Skip]:
    """The matrices in `tensor`, and what of it is left out; never empty.

    A tensor whose elements can't be analysed (packed codes that can't be decoded) gives one `Skip` with status
    ``failed``, where it would have given a matrix.
    """
    found = _plan(tensor, context)
    instead = context.renamed.get(tensor.name)
    if instead is None:
        return found
    own = parse_name(tensor.name).longname
    return [replace(item, longname=instead + item.longname.removeprefix(own)) for item in found]


def is_excluded(tensor: TensorRef, context: Context) -> bool:
    """Whether ``--include`` and ``--exclude`` leave out all of a tensor, whatever else would be said of it."""
    return all(eligible.is_excluded(item.longname, context.options) for item in plan(tensor, context))


def _plan(tensor: TensorRef, context: Context) -> list[MatrixRef | Skip]:
    name = _name(tensor.name, context)
    reason = eligible.reason_by_name(
        tensor.name, name.block_type, len(tensor.shape), context.names or frozenset(), context.options
    )
    if tensor.problem and not reason:
        if eligible.is_excluded(name.longname, context.options):
            return [_skip(name, tensor, eligible.EXCLUDED)]
        return [replace(_skip(name, tensor, tensor.problem), status="failed")]
    reason = reason or eligible.reason_by_shape(tensor)
    if reason:
        return [_skip(name, tensor, reason)]
    if tensor.dtype in eligible.INTEGERS:
        if not eligible.is_quantised(tensor, context.names, context.config):
            return [_skip(name, tensor, eligible.INTEGER)]
        if eligible.is_excluded(name.longname, context.options):
            return [_skip(name, tensor, eligible.EXCLUDED)]
        return [replace(_skip(name, tensor, eligible.QUANTISED), status="failed")]
    found = list(_matrices(tensor, name, context))
    if tensor.dtype not in eligible.FLOATS and any(isinstance(item, MatrixRef) for item in found):
        return [replace(_skip(name, tensor, eligible.unsupported(tensor.dtype)), status="failed")]
    return found


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


def tied(tensor: TensorRef, original: TensorRef | str) -> Skip:
    """The skip of a tensor that repeats the embedding `original` (a tensor, or its name) byte for byte."""
    of = original if isinstance(original, str) else original.name
    return _skip(parse_name(tensor.name), tensor, f"{eligible.TIED} of {parse_name(of).longname}")


def _matrices(tensor: TensorRef, name: Name, context: Context) -> Iterator[MatrixRef | Skip]:
    if len(tensor.shape) == 2:
        yield from _linear(tensor, name, name.longname, context)
    elif len(tensor.shape) == 3 and is_stack(name.longname):
        for i, expert in enumerate(_experts(tensor)):
            numbered = name._replace(longname=f"{name.longname}.experts.{i}", block_type="expert")
            yield from _linear(expert, numbered, name.longname, context, whole=False)
    elif eligible.is_conv(tensor, context.hints.get(tensor.name)):
        yield _conv(tensor, name._replace(block_type="conv"), context)
    else:
        yield _skip(name, tensor, eligible.UNKNOWN_LAYOUT)


def _linear(
    tensor: TensorRef, name: Name, stored_name: str, context: Context, *, whole: bool = True
) -> Iterator[MatrixRef | Skip]:
    """The matrices of a 2-D tensor; `stored_name` is the longname that layouts know it by."""
    layout, fold = find_layout(stored_name, tensor.shape, context.config)
    if name.block_type == "conv":  # SigLIP 2 embeds its patches with a linear layer
        name = name._replace(block_type="other")
    if not layout.parts:
        matrix = MatrixRef(
            longname=name.longname,
            tensor=tensor,
            M=tensor.shape[0],
            N=tensor.shape[1],
            block_type=name.block_type,
            layer_index=name.layer_index,
            whole=whole,
            note=layout.note,
        )
        yield _checked(matrix, context)
    for part in layout.parts:
        M, N = _part_shape(fold, part)
        matrix = MatrixRef(
            longname=name.longname + part.suffix,
            tensor=tensor,
            M=M,
            N=N,
            block_type="expert" if name.block_type == "expert" else part.block_type,
            layer_index=name.layer_index,
            fold=fold,
            pick=part.pick,
            whole=False,
        )
        yield _checked(matrix, context)


def _conv(tensor: TensorRef, name: Name, context: Context) -> MatrixRef | Skip:
    M, N = tensor.shape[:2]
    if eligible.is_excluded(name.longname, context.options):
        return _skip(name, tensor, eligible.EXCLUDED)
    if min(M, N) == 1:
        return _skip(name, tensor, eligible.DEPTHWISE if N == 1 else eligible.ONE_OUTPUT)
    return MatrixRef(
        longname=name.longname,
        tensor=tensor,
        M=M,
        N=N,
        block_type=name.block_type,
        layer_index=name.layer_index,
        slices=prod(tensor.shape[2:]),
        scale=CONV_SCALE,
    )


def _checked(matrix: MatrixRef, context: Context) -> MatrixRef | Skip:
    """`matrix`, or why it is left out after all."""
    M, N, options = matrix.M, matrix.N, context.options
    if eligible.is_excluded(matrix.longname, options):
        reason = eligible.EXCLUDED
    elif min(M, N) == 1:
        reason = eligible.ONE_ROW
    # Whoever asks for embeddings means them, and nearly all are elongated.
    elif matrix.block_type not in ("embedding", "position") and eligible.is_elongated(M, N, options):
        reason = eligible.ASPECT
    else:
        return matrix
    return _skip(Name(matrix.longname, matrix.layer_index, matrix.block_type), matrix.tensor, reason)


def _experts(tensor: TensorRef) -> Iterator[TensorRef]:
    size = tensor.nbytes // tensor.shape[0]
    for i in range(tensor.shape[0]):
        start = tensor.start + i * size
        yield replace(tensor, shape=tensor.shape[1:], start=start, end=start + size)


def _part_shape(fold: tuple[int, ...], part: Part) -> tuple[int, int]:
    shape = np.broadcast_to(np.int8(0), fold)[part.pick].shape
    return prod(shape[:-1]), shape[-1]


def _skip(name: Name, tensor: TensorRef, reason: str) -> Skip:
    return Skip(
        longname=name.longname, reason=reason, tensor=tensor, block_type=name.block_type, layer_index=name.layer_index
    )


def _name(tensor_name: str, context: Context) -> Name:
    """What the name tells, corrected by what the live module is."""
    name = parse_name(tensor_name)
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
    return promised_parts(name.longname, context.config) * (promised_experts(context.config) if stack else 1)


def _passes(block_type: str, context: Context) -> bool:
    """Whether a matrix known to be elongated in most models will not be skipped for it."""
    vocab, hidden = (context.config.get(key) for key in ("vocab_size", "hidden_size"))
    if block_type == "lm_head" and isinstance(vocab, int) and isinstance(hidden, int):
        return not eligible.is_elongated(vocab, hidden, context.options)
    return context.options.max_aspect == 0
