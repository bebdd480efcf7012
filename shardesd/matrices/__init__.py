"""Stored tensors → the matrices a researcher means: which there are, what they are called, how they are cut out."""

from __future__ import annotations

from shardesd.matrices.layouts import Table
from shardesd.matrices.names import BLOCK_TYPES, Name, may_be_tied, natural_key, parse_name, tie_order
from shardesd.matrices.order import largest_first
from shardesd.matrices.plan import Context, estimate, holds_codes, is_excluded, plan, slices, stacked, tied
from shardesd.matrices.table import BUILT_IN, user_table

__all__ = [
    "BLOCK_TYPES",
    "BUILT_IN",
    "Context",
    "Name",
    "Table",
    "estimate",
    "holds_codes",
    "is_excluded",
    "largest_first",
    "may_be_tied",
    "natural_key",
    "parse_name",
    "plan",
    "slices",
    "stacked",
    "tie_order",
    "tied",
    "user_table",
]
