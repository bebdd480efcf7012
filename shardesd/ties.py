"""Which tensors repeat another one, among those that ``--include`` and ``--exclude`` leave.

What the globs leave out is no original: else its copy would be lost with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from shardesd import matrices
from shardesd.checkpoint import Checkpoint, Shard
from shardesd.records import TensorRef

_COMPARED_BYTES = 16_000_000  # read at a time from each of two tensors that may be tied …
_FIRST_COMPARED_BYTES = 4096  # … and at first: those that differ do so at once, and may have to be fetched


def among_left(checkpoint: Checkpoint, context: matrices.Context) -> dict[str, str]:
    """`Checkpoint.ties` without what is left out; where that is the original, the first of the others stands for it."""
    groups: dict[str, list[str]] = {}
    for name, original in checkpoint.ties.items():
        groups.setdefault(original, [original]).append(name)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors()} if groups else {}
    ties = {}
    for group in groups.values():
        left = [name for name in group if not matrices.is_excluded(tensors[name], context)]
        ties.update(dict.fromkeys(left[1:], left[0]) if left else {})
    return ties


def candidates(
    tensors: Iterable[tuple[TensorRef, Shard]], checkpoint: Checkpoint, context: matrices.Context
) -> list[tuple[TensorRef, Shard]]:
    """The embeddings and heads among `tensors` of which one may be a copy of another."""
    return [
        (tensor, shard)
        for tensor, shard in tensors
        if matrices.may_be_tied(tensor.name)
        and tensor.name not in checkpoint.distinct
        and not matrices.is_excluded(tensor, context)
    ]


def twin(tensor: TensorRef, shard: Shard, among: Iterable[tuple[TensorRef, Shard]]) -> TensorRef | None:
    """The embedding that `tensor` repeats byte for byte, if it is a head or a second embedding that does."""
    mine = matrices.tie_order(tensor.name)
    for other, other_shard in among:
        alike = (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        if alike and matrices.tie_order(other.name) < mine and _equal(tensor, shard, other, other_shard):
            return other
    return None


def _equal(a: TensorRef, a_shard: Shard, b: TensorRef, b_shard: Shard) -> bool:
    start, size = 0, _FIRST_COMPARED_BYTES
    while start < a.nbytes:
        size = min(size, a.nbytes - start)
        parts = (
            replace(tensor, dtype="U8", shape=(size,), start=tensor.start + start, end=tensor.start + start + size)
            for tensor in (a, b)
        )
        with a_shard.read(next(parts)) as x, b_shard.read(next(parts)) as y:
            if not np.array_equal(x, y):
                return False
        start, size = start + size, min(4 * size, _COMPARED_BYTES)
    return True
