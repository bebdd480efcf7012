"""Stored tensors → the matrices a researcher means: which there are, what they are called, how they are cut out."""

from __future__ import annotations

from shardesd.matrices.names import BLOCK_TYPES, Name, may_be_tied, natural_key, parse_name, tie_order
from shardesd.matrices.plan import Context, estimate, is_excluded, plan, slices, tied

__all__ = [
    "BLOCK_TYPES",
    "Context",
    "Name",
    "estimate",
    "is_excluded",
    "may_be_tied",
    "natural_key",
    "parse_name",
    "plan",
    "slices",
    "tie_order",
    "tied",
]
