"""Which base tensors an adapter changes, and how: decided from configs and headers alone, all or nothing.

Every adapter tensor is used or named in an error, so a plan that exists is complete before the first byte of a weight
has been read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from shardesd.adapters.config import AdapterConfig
from shardesd.adapters.edits import Edit, Replace, ReplaceRows, merged_shape
from shardesd.adapters.experts import is_stack, plan_stacks
from shardesd.adapters.hira import plan_hira
from shardesd.adapters.ia3 import plan_ia3
from shardesd.adapters.loha import plan_loha
from shardesd.adapters.lokr import plan_lokr
from shardesd.adapters.lora import plan_delora, plan_lora, plan_vera
from shardesd.adapters.match import Index
from shardesd.adapters.names import REPLACE, Group, group
from shardesd.adapters.oft import plan_boft, plan_oft
from shardesd.adapters.target import Placed, Setting
from shardesd.errors import MalformedAdapter, UnmatchedAdapter, UnsupportedAdapter
from shardesd.records import TensorRef

_FLOATS = ("F64", "F32", "F16", "BF16")
_FAMILIES: dict[str, Callable[[Group, Setting], Placed]] = {
    "lora": plan_lora,
    "mlx": plan_lora,
    "hada": plan_loha,
    "lokr": plan_lokr,
    "ia3": plan_ia3,
    "oft": plan_oft,
    "boft": plan_boft,
    "vera": plan_vera,
    "hira": plan_hira,
    "delora": plan_delora,
}
_FAMILY = re.compile(rf"({'|'.join(_FAMILIES)})_")
# peft's replicate_layers knows these containers.
_LAYER = re.compile(r"((?:^|.*?\.)(?:layers|encoder\.layer|h))\.(\d+)\.(.+)")


class AdapterTensors(Protocol):
    """What a plan needs of an adapter; `load.Adapter` is one."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> AdapterConfig: ...

    @property
    def tensors(self) -> Sequence[TensorRef]: ...

    def read(self, tensor: TensorRef) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Virtual:
    """A tensor of the merged model that the base doesn't store under this name."""

    name: str
    base: TensorRef | None
    """The stored tensor that it begins as a copy of; None where the adapter brings all of it."""
    shape: tuple[int, ...]
    dtype: str
    edits: tuple[Edit, ...]
    why: str
    """``tied to …``, ``replicates …`` or ``added by the adapter``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What becomes of every tensor of the base. Tensors that no edit names stay as they are."""

    edits: Mapping[str, tuple[Edit, ...]]
    extra: tuple[Virtual, ...]
    dropped: frozenset[str] = frozenset()
    """Base tensors that the merged model has only through the `Virtual` ones made from them (layer_replication)."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of those base tensors that the adapters leave in another one (resized embeddings)."""

    def for_tensor(self, name: str) -> tuple[Edit, ...]:
        """The edits of one base tensor, in the order in which they are done."""
        return self.edits.get(name, ())


def plan_merge(
    adapters: Sequence[AdapterTensors],
    base: Mapping[str, TensorRef],
    config: Mapping[str, Any],
    *,
    hints: Mapping[str, str] | None = None,
) -> MergePlan:
    """The plan that merges `adapters`, in this order, into a base with these headers and this config.json.

    `hints` tells of tensors whose module class is known (`checkpoint.open_live`): ``conv1d``, ``embedding``. Raises
    `UnmatchedAdapter`, `MalformedAdapter` or `UnsupportedAdapter`, each with one line that names the tensor.
    """
    target = _Target(base, adapters)
    for adapter in adapters:
        try:
            _plan_adapter(adapter, target, config, hints or {})
        except UnmatchedAdapter as error:
            if not config.get("quantization_config"):
                raise
            raise UnsupportedAdapter(
                f"{error}; the base is quantised, which changes its shapes and names: give the one it was made from "
                "(for …-bnb-4bit, the name without that ending) with --base"
            ) from error
    return target.plan()


class _Target:
    """The merged model while adapters are planned onto it, one after the other."""

    def __init__(self, base: Mapping[str, TensorRef], adapters: Sequence[AdapterTensors]) -> None:
        self.base = base
        self.refs: dict[str, TensorRef | None] = dict(base)
        self.why: dict[str, str] = {}
        self.edits: dict[str, list[Edit]] = {}
        self.dropped: set[str] = set()
        maps = {adapter.config.layer_replication for adapter in adapters}
        if any(maps):
            if len(maps) > 1:
                raise UnsupportedAdapter("adapters with different layer_replication can't be merged into one model")
            self._replicate(maps.pop(), adapters[0].name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: merged_shape(self.edits.get(name, ()), ref.shape if ref else ()) for name, ref in self.refs.items()
        }

    def add(self, name: str, edit: Edit) -> None:
        self.edits.setdefault(name, []).append(edit)

    def plan(self) -> MergePlan:
        extra = []
        for name, why in self.why.items():
            ref, own = self.refs[name], tuple(self.edits.get(name, ()))
            first = own[0] if own else None
            dtype = ref.dtype if ref else (first.tensor.dtype if isinstance(first, Replace) else "F32")
            shape = merged_shape(own, ref.shape if ref else ())
            extra.append(Virtual(name=name, base=ref, shape=shape, dtype=dtype, edits=own, why=why))
        edits = {name: tuple(found) for name, found in self.edits.items() if name not in self.why}
        shapes = {
            name: shape
            for name, found in edits.items()
            if (shape := merged_shape(found, self.base[name].shape)) != self.base[name].shape
        }
        return MergePlan(edits=edits, extra=tuple(extra), dropped=frozenset(self.dropped), shapes=shapes)

    def _replicate(self, ranges: tuple[tuple[int, int], ...], where: str) -> None:
        layers: dict[int, list[tuple[str, str, str]]] = {}
        for name in self.base:
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[2]), []).append((name, match[1], match[3]))
        sources = [layer for start, stop in ranges for layer in range(start, stop)]
        if missing := [layer for layer in sources if layer not in layers]:
            raise UnmatchedAdapter(
                f"{where}: layer_replication names layer {missing[0]}, but the base has {len(layers)}"
            )
        self.dropped = {name for found in layers.values() for name, _, _ in found}
        for name in self.dropped:
            del self.refs[name]
        for layer, source in enumerate(sources):
            for name, container, rest in layers[source]:
                new = f"{container}.{layer}.{rest}"
                self.refs[new] = self.base[name]
                self.why[new] = f"replicates {name}"


def _plan_adapter(adapter: AdapterTensors, target: _Target, model: Mapping[str, Any], hints: Mapping[str, str]) -> None:
    where = adapter.name
    named = group(adapter.tensors, where=where, dialect=adapter.config.dialect)
    setting = Setting(
        where=where,
        config=replace(adapter.config, dialect=named.dialect),
        index=Index(target.shapes(), where),
        read=adapter.read,
        shared=named.shared,
        model=model,
        hints=hints,
    )
    placed: Placed = []
    stacks: dict[str, list[Group]] = {}
    # Replacements first: the other edits of a tensor begin from what they leave, in its shape.
    for one in sorted(named.groups, key=lambda one: set(one.tensors) != {REPLACE}):
        if set(one.tensors) == {REPLACE}:
            _place_replacement(one, setting, target, placed)
        elif is_stack(one, setting):
            stacks.setdefault(one.module, []).append(one)
        else:
            placed += _plan_module(one, setting)
        if one.tensors and one not in stacks.get(one.module, ()):
            left = next(iter(one.tensors.values()))
            raise MalformedAdapter(f"{where}: {left.name} has no place beside the other tensors of {one.module}")
    for module, groups in stacks.items():
        placed += plan_stacks(module, groups, setting)
    if not placed:
        raise MalformedAdapter(f"{where}: the adapter holds no tensor that changes a weight")
    _check_shared(setting, named.shared)
    _check_once(placed, where)
    for head, embedding in setting.tied.items():
        if head not in target.refs:
            target.refs[head] = target.refs[embedding]
            target.why[head] = f"tied to {embedding}"
    for name, edit in placed:
        _check_dtype(name, target.refs.get(name), edit, where)
        target.add(name, edit)


def _plan_module(one: Group, setting: Setting) -> Placed:
    if "trainable_tokens_delta" in one.tensors:
        return _plan_tokens(one, setting)
    if {"ln_tuning_layers", "ln_tuning_layers.bias"} & set(one.tensors):
        return _plan_norm(one, setting)
    for role in one.tensors:
        if match := _FAMILY.match(role):
            return _FAMILIES[match[1]](one, setting)
    left = next(iter(one.tensors.values()))
    raise MalformedAdapter(f"{setting.where}: {left.name} belongs to no kind of adapter that is known")


def _place_replacement(one: Group, setting: Setting, target: _Target, placed: Placed) -> None:
    """A whole tensor in the adapter: replaces the base's of that name, or is added (a new head)."""
    (tensor,) = setting.take(one, REPLACE)
    common = setting.common(one)
    name = one.module
    found = setting.index.find(name)
    if found is None:
        setting.place_tied(name)
    if found is None and name not in setting.tied:
        module = name.rpartition(".")[0]
        saved = setting.config.modules_to_save
        if not any(part in saved for part in _tails(module)) and not any(f"{s}." in f"{module}." for s in saved):
            raise UnmatchedAdapter(
                f"{setting.where}: {tensor.name} finds no tensor {name} in the base, and modules_to_save "
                "doesn't name it"
                f"{setting.index.nearest(name)}"
            )
        target.refs[name] = None
        target.why[name] = "added by the adapter"
    where = found or name
    if found is not None and tensor.shape != setting.index.shape(found) and not _may_resize(found, tensor, setting):
        raise UnmatchedAdapter(
            f"{setting.where}: {tensor.name} is {list(tensor.shape)}, but the base's {found} is "
            f"{list(setting.index.shape(found))}; is this another size of the base, or another model?"
        )
    setting.index.put(where, tensor.shape)
    placed.append((where, Replace(tensor=tensor, **common)))


def _may_resize(name: str, tensor: TensorRef, setting: Setting) -> bool:
    """A vocabulary may have grown, and a head that was trained anew may have other outputs."""
    shape = setting.index.shape(name)
    return tensor.shape[1:] == shape[1:] and len(shape) in (1, 2)


def _plan_tokens(one: Group, setting: Setting) -> Placed:
    (tensor,) = setting.take(one, "trainable_tokens_delta")
    rows = next(
        (
            rows
            for module, rows in setting.config.trainable_tokens.items()
            if not module or one.module == module or one.module.endswith(f".{module}")
        ),
        None,
    )
    if rows is None and setting.is_tied_head(one.module):
        # peft saves a tied head's rows as well as the embedding's; they are the same.
        if setting.index.find(f"{one.module}.weight") is None:
            return []
        rows = next(iter(setting.config.trainable_tokens.values()), None)
    if rows is None or len(tensor.shape) != 2 or len(rows) != tensor.shape[0]:
        told = "no row numbers" if rows is None else f"{len(rows)} row numbers"
        raise MalformedAdapter(
            f"{setting.where}: {tensor.name} has shape {list(tensor.shape)}, but the config gives {told} for it"
        )

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[1] == tensor.shape[1]

    name = setting.weight(one, fits, source=tensor, needs=f"rows of {tensor.shape[1]}")
    size = setting.index.shape(setting.tied.get(name, name))[0]
    if rows and max(rows) >= size:
        raise MalformedAdapter(f"{setting.where}: token {max(rows)} of {one.module} is outside the base's {size} rows")
    return [(name, ReplaceRows(rows=rows, tensor=tensor, **setting.common(one)))]


def _plan_norm(one: Group, setting: Setting) -> Placed:
    placed: Placed = []
    for role, leaf in (("ln_tuning_layers", "weight"), ("ln_tuning_layers.bias", "bias")):
        if tensor := one.tensors.pop(role, None):
            shape = tensor.shape
            name = setting.index.tensor(f"{one.module}.{leaf}", shape.__eq__, source=tensor, needs=f"{list(shape)}")
            placed.append((name, Replace(tensor=tensor, **setting.common(one))))
    return placed


def _check_shared(setting: Setting, shared: Mapping[str, TensorRef]) -> None:
    for role, tensor in shared.items():
        if role not in ("vera_A", "vera_B") or setting.config.peft_type != "VERA":
            raise MalformedAdapter(f"{setting.where}: {tensor.name} belongs to no module")


def _check_once(placed: Placed, where: str) -> None:
    seen: dict[tuple[str, bool], Edit] = {}
    for name, edit in placed:
        key = (name, isinstance(edit, Replace))
        if key in seen and seen[key].module != edit.module:
            raise UnmatchedAdapter(f"{where}: {seen[key].module} and {edit.module} both lead to the base's {name}")
        seen[key] = edit


def _check_dtype(name: str, ref: TensorRef | None, edit: Edit, where: str) -> None:
    if isinstance(edit, Replace) and edit.tensor.dtype[0] in "IU":
        return  # a counter, which is no weight
    for tensor in (*edit.refs, *([ref] if ref and not isinstance(edit, Replace) else [])):
        if tensor.dtype not in _FLOATS:
            whose = f"{where}: the base's {name}" if tensor is ref else f"{where}: {tensor.name}"
            raise UnsupportedAdapter(
                f"{whose} is stored as {tensor.dtype}, which can't be merged; give an unquantised one "
                "(a base called …-bnb-4bit has one without that ending)"
            )


def _tails(module: str) -> Iterable[str]:
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
