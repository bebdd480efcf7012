"""LoRA on whole stacks of experts (`target_parameters`), for bases that store the stack or every expert by itself.

peft wraps a module once per parameter, the first parameter innermost, so `experts.base_layer.lora_A` belongs to
gate_up_proj and `experts.lora_A` to down_proj. A's rows run expert by expert, B's columns rank by rank
(peft lora/layer.py, ParamWrapper).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardesd.adapters.edits import LowRank, Scale
from shardesd.adapters.lora import Lora
from shardesd.adapters.names import Group
from shardesd.adapters.target import Placed, Setting
from shardesd.errors import MalformedAdapter, UnmatchedAdapter
from shardesd.records import TensorRef

_ORDER = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
# Where transformers' stack comes from on disk, in the order in which it is put together.
_PARTS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
# Classes that transformers marks `is_transposed`, which peft reads. Llama 4's, (experts, in, out) too, is not marked.
_TRANSPOSED_MODELS = ("gpt_oss", "openai_privacy_filter", "aria", "aria_text")
_SWAP = (0, 19)
"""The peft version from which A's inputs are the stack's last axis, unless the class is transposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLora(LowRank):
    """s·B_e·A_e for every expert of a stack, or for one of them and some of its outputs."""

    A: TensorRef
    B: TensorRef
    scale: Scale
    experts: int
    expert: int | None = None
    outputs: tuple[int, int] | None = None
    """Rows of the expert's matrix as stored in the stack, for a base that splits it (gate and up)."""

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.A, self.B)

    def ab(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        A, B = self.read(self.A).astype(dtype, copy=False), self.read(self.B).astype(dtype, copy=False)
        A = A.reshape(self.experts, -1, A.shape[1])
        B = B.reshape(B.shape[0], -1, self.experts).transpose(2, 0, 1) * dtype.type(self.scale.value(self.read))
        return (A, B) if self.expert is None else (A[self.expert], B[self.expert])

    def factors(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        A, B = self.ab(dtype)
        left, right = (A.swapaxes(-1, -2), B.swapaxes(-1, -2)) if self.transposed else (B, A)
        return (left, right) if self.outputs is None else (left[slice(*self.outputs)], right)


def is_stack(group: Group, setting: Setting) -> bool:
    """Whether a LoRA pair belongs to a parameter rather than to a module's weight."""
    if not {"lora_A", "lora_B"} <= set(group.tensors) or group.flattened:
        return False
    if setting.index.find(f"{group.module}.weight") is not None and group.depth == 0:
        return False
    return bool(_wanted(group.module, setting)) or group.depth > 0 or group.module.endswith(".experts")


def plan_stacks(module: str, groups: list[Group], setting: Setting) -> Placed:
    """All wrappers of one module, each with the parameter it stands for."""
    base = setting.index.module(module)
    if base is None:
        first = groups[0].tensors["lora_A"]
        raise UnmatchedAdapter(
            f"{setting.where}: {first.name} finds no module {module} in the base{setting.index.nearest(module)}"
        )
    leaves = _wanted(module, setting) or _present(base, setting)
    leaves = sorted(leaves, key=lambda leaf: (_ORDER.index(leaf) if leaf in _ORDER else len(_ORDER), leaf))
    groups = sorted(groups, key=lambda group: -group.depth)
    if len(leaves) != len(groups) or (len(leaves) > 1 and not set(leaves) <= set(_ORDER)):
        raise UnmatchedAdapter(
            f"{setting.where}: {module} has {len(groups)} wrapped parameters, but which they are is not certain: "
            f"target_parameters and the base give {', '.join(leaves) or 'none'}"
        )
    placed: Placed = []
    for leaf, group in zip(leaves, groups, strict=True):
        placed += _plan_stack(f"{base}.{leaf}", f"{module}.{leaf}", group, setting)
    return placed


def _plan_stack(name: str, parameter: str, group: Group, setting: Setting) -> Placed:
    A, B = setting.take(group, "lora_A", "lora_B")
    if len(A.shape) != 2 or len(B.shape) != 2 or 0 in A.shape + B.shape or A.shape[0] != B.shape[1]:
        raise MalformedAdapter(f"{setting.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} don't fit")
    if name in setting.index and len(setting.index.shape(name)) == 2:
        return _plan_matrix(name, parameter, A, B, group, setting)
    split = _split(name, setting) if name not in setting.index else []
    shape = setting.index.shape(name) if name in setting.index else _stack_shape(split, setting)
    if not shape:
        raise UnmatchedAdapter(
            f"{setting.where}: {A.name} finds no stack {name} in the base, and no experts beside it"
            f"{setting.index.nearest(name)}"
        )
    experts, d1, d2 = shape
    size = (B.shape[0], A.shape[1])
    if size not in ((d1, d2), (d2, d1)) or A.shape[0] % experts:
        raise UnmatchedAdapter(
            f"{setting.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} don't fit the base's {name}, "
            f"{experts} experts of {d1}×{d2}"
        )
    rank = A.shape[0] // experts
    setting.check_rank(group, A, rank, parameter)
    transposed = size != (d1, d2) if d1 != d2 else _is_transposed(setting)
    scale = setting.scale(group, rank, parameter)
    common = {"A": A, "B": B, "scale": scale, "experts": experts, "transposed": transposed, **setting.common(group)}
    if not split:
        return [(name, ExpertLora(**common))]
    placed: Placed = []
    for expert, parts in enumerate(split):
        at = 0
        for part in parts:
            rows = setting.index.shape(part)[0]
            placed.append((part, ExpertLora(expert=expert, outputs=(at, at + rows), **common)))
            at += rows
    return placed


def _plan_matrix(name: str, parameter: str, A: TensorRef, B: TensorRef, group: Group, setting: Setting) -> Placed:
    if setting.index.shape(name) != (B.shape[0], A.shape[1]):
        raise UnmatchedAdapter(
            f"{setting.where}: {A.name} {list(A.shape)} and {B.name} {list(B.shape)} don't fit the base's {name} "
            f"{list(setting.index.shape(name))}"
        )
    setting.check_rank(group, A, A.shape[0], parameter)
    scale = setting.scale(group, A.shape[0], parameter)
    return [(name, Lora(A=A, B=B, scale=scale, **setting.common(group)))]


def _split(name: str, setting: Setting) -> list[list[str]]:
    """The base's own tensors of every expert, in the order in which the stack is put together."""
    module, _, leaf = name.rpartition(".")
    experts: list[list[str]] = []
    while leaf in _PARTS:
        prefix = f"{module}.{len(experts)}"
        parts = [
            next((n for w in words if (n := f"{prefix}.{w}.weight") in setting.index), "") for words in _PARTS[leaf]
        ]
        if not all(parts):
            break
        experts.append(parts)
    return experts


def _stack_shape(split: list[list[str]], setting: Setting) -> tuple[int, int, int] | tuple[()]:
    if not split:
        return ()
    shapes = [setting.index.shape(part) for part in split[0]]
    return (len(split), sum(shape[0] for shape in shapes), shapes[0][1])


def _is_transposed(setting: Setting) -> bool:
    """(experts, in, out) for a square stack, where the shape can't tell."""
    version = setting.config.peft_version
    return setting.model.get("model_type") in _TRANSPOSED_MODELS or version is None or version[:2] < _SWAP


def _wanted(module: str, setting: Setting) -> list[str]:
    """The parameters of this module that `target_parameters` names."""
    leaves = []
    for target in setting.config.target_parameters:
        parent, _, leaf = target.rpartition(".")
        if module == parent or (parent and module.endswith(f".{parent}")) or not parent:
            leaves.append(leaf)
    return list(dict.fromkeys(leaves))


def _present(base: str, setting: Setting) -> list[str]:
    """The stacks that the base has here, for an adapter whose config doesn't say."""
    found = [leaf for leaf in ("gate_up_proj", "down_proj") if f"{base}.{leaf}" in setting.index]
    digits = re.compile(rf"{re.escape(base)}\.0\.")
    if not found and any(digits.match(name) for name in setting.index.names()):
        found = ["gate_up_proj", "down_proj"]
    return found
