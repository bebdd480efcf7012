"""How one stored tensor holds several matrices: a table, read from the top, that grows by rows.

Sizes of the stored tensor are M × N, as it lies there (rows are outputs in linear layers, inputs in GPT-2's Conv1D).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardesd.matrices.names import ends_with, role

ALL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One matrix inside a fused tensor."""

    suffix: str
    """Added to the longname."""
    block_type: str
    pick: tuple[int | slice, ...]
    """Index into the folded tensor; the last axis of what it gives is N, the others together are M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A row of the table. It holds for a tensor whose name and model match and whose elements fill `fold`."""

    names: str
    """Rule for the end of the longname (see `matrices.names`)."""
    models: tuple[str, ...] = ()
    """``model_type`` of config.json; empty: any, or none."""
    fold: tuple[int | str, ...] = ("M", "N")
    """The shape that parts are picked from: numbers, M, N, or integers of config.json by their key."""
    parts: tuple[Part, ...] = ()
    """Empty: the tensor is analysed whole."""
    note: str = ""
    """What a user should know of a tensor that is analysed whole."""

    def sizes(self, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """`fold` in numbers; None where the tensor is none of this layout's."""
        known = {**config, "M": shape[0], "N": shape[1]}
        sizes = [known.get(size) if isinstance(size, str) else size for size in self.fold]
        fold = tuple(size for size in sizes if type(size) is int and size > 0)
        return fold if len(fold) == len(sizes) and prod(fold) == prod(shape) else None


def _columns(*parts: tuple[str, str]) -> tuple[Part, ...]:
    return tuple(Part(suffix=suffix, block_type=kind, pick=(ALL, i)) for i, (suffix, kind) in enumerate(parts))


LAYOUTS: tuple[Layout, ...] = (
    # Called c_attn too, but an nn.Linear (outputs × inputs), multi-query in BigCode.
    Layout(names="c_attn", models=("gpt_bigcode", "qwen"), note="fused qkv analysed whole"),
    # Conv1D keeps inputs × outputs: q, k and v lie side by side in the columns. M × 3M rules out nn.Linear (3M × M).
    Layout(
        names=r"crossattention\.c_attn",
        fold=("M", 2, "M"),
        parts=_columns(("_k", "k_proj"), ("_v", "v_proj")),
    ),
    Layout(
        names="c_attn",
        fold=("M", 3, "M"),
        parts=_columns(("_q", "q_proj"), ("_k", "k_proj"), ("_v", "v_proj")),
    ),
    Layout(names=r"(?:mixer|mamba)\.in_proj", note="fused in_proj analysed whole"),
    Layout(names=r"experts\.mlp\.(?:w1|v1|w2)", note="stacked experts analysed whole"),
)

# Fused by what it is called, and in no row above that fits: better whole and flagged than split by a guess.
_UNKNOWN_FUSIONS = {part: Layout(names="", note=f"fused {part} analysed whole") for part in ("qkv", "kv", "gate_up")}
_PLAIN = Layout(names="")

_STACKS = (
    # A parameter of a module called `experts`, which holds no numbered experts of its own.
    re.compile(r"(?:^|\.)experts(?!\.(?:\w+_)?[0-9]+(?:\.|$))(?:\.|$)"),
    ends_with(r"(?:moe|block_sparse_moe|mlp)\.(?:input_linear|output_linear)", r"moe\.(?:gate|up|down)_proj"),
)
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def find_layout(
    longname: str, shape: tuple[int, ...], config: Mapping[str, Any], table: Sequence[Layout] = LAYOUTS
) -> tuple[Layout, tuple[int, ...]]:
    """The layout of a 2-D tensor, and its `fold` in numbers."""
    for layout in _named(longname, config, table):
        fold = layout.sizes(shape, config)
        if fold is not None:
            return layout, fold
    return _UNKNOWN_FUSIONS.get(role(longname), _PLAIN), shape


def promised_parts(longname: str, config: Mapping[str, Any]) -> int:
    """How many matrices the tensor holds, as far as its name and the model tell; `find_layout` has the last word."""
    return next((max(1, len(layout.parts)) for layout in _named(longname, config, LAYOUTS)), 1)


def is_stack(longname: str) -> bool:
    """Whether a tensor of 3 dimensions with this name holds one matrix per expert along its first axis."""
    return any(rule.search(longname) for rule in _STACKS)


def promised_experts(config: Mapping[str, Any]) -> int:
    """Experts per stack by config.json, that of a text tower included; 1 where it doesn't say."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in _EXPERT_COUNTS:
            if type(place.get(key)) is int and place[key] > 0:
                return int(place[key])
    return 1


def _named(longname: str, config: Mapping[str, Any], table: Sequence[Layout]) -> list[Layout]:
    model_type = config.get("model_type")
    return [
        layout
        for layout in table
        if (not layout.models or model_type in layout.models) and ends_with(layout.names).search(longname)
    ]
