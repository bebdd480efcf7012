"""In which order a shard's tensors are best begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardesd.matrices.names import parse_name
from shardesd.matrices.plan import Context
from shardesd.records import MatrixRef, Skip, TensorRef


def largest_first(
    tensors: Sequence[TensorRef], plans: Mapping[TensorRef, Sequence[MatrixRef | Skip]], context: Context
) -> Sequence[TensorRef]:
    """Those of the largest matrices first: what takes longest is not to be begun last.

    `plans` are those of all of them but stacks of experts. Where one's longname is another's too, who is first has it:
    then they stay as they are, in whatever way the shard comes.
    """
    longnames = [item.longname for tensor in tensors for item in plans.get(tensor, ())]
    stacks = tuple(f"{_own(tensor.name, context)}." for tensor in tensors if tensor not in plans)
    if len(set(longnames)) < len(longnames) or (stacks and any(name.startswith(stacks) for name in longnames)):
        return tensors
    return sorted(tensors, key=lambda tensor: -min(tensor.shape[-2:]) if len(tensor.shape) > 1 else 0)


def _own(name: str, context: Context) -> str:
    return context.renamed.get(name) or parse_name(name).longname
