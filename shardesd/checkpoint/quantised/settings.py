"""What config.json says of a model's quantisation: only what headers don't tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_AUTO_ROUND: dict[str, tuple[str, str]] = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
}
"""auto-round's packing_format → whose format it is, of what layout (auto_round/inference/backend.py)."""
_LONGEST = 10_000  # characters of a metadata value that is looked into
_ROTATIONS = ("hadamard", "random-hadamard")
"""compressed-tensors' transforms that leave singular values as they are."""
_DEEPEST = 3
"""Levels of config.json that are looked through: its own, its parts' and theirs."""


class Settings:
    """``quantization_config`` of a config.json, wherever it stands; whatever makes no sense there counts as unsaid."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = _section(config)
        groups = found.get("config_groups")
        weights = [
            group["weights"]
            for group in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(group, dict) and isinstance(group.get("weights"), dict)
        ]
        method = found.get("quant_method", found.get("method"))  # gptqmodel's word
        self.method: str = method.lower() if isinstance(method, str) else "unknown" if found else ""
        """``gptq``, ``awq``, ``fp8`` …; empty where the model isn't quantised, as far as the config knows."""
        layouts = [found.get(key) for key in ("format", "checkpoint_format", *["version"] * (self.method == "awq"))]
        said = sorted({layout.lower()[:40] for layout in layouts if isinstance(layout, str)})
        self.layout: str = " and ".join(said)
        """GPTQ's checkpoint_format, AWQ's version; gptqmodel calls both format. Several make none that is known."""
        if found.get("is_marlin_format") is True:
            self.layout = "marlin"
        if self.method in ("auto-round", "intel/auto-round"):
            packing = str(found.get("packing_format", found.get("backend")))
            self.method, self.layout = _AUTO_ROUND.get(packing, ("gptq", packing[:40]))
        self.blocks: tuple[tuple[int, int], ...] = tuple(_blocks(found, weights))
        """Rows and columns that one scale holds for."""
        group = found.get("group_size")
        self.group_size: int = group if type(group) is int and group > 0 else 0
        """Inputs that share a scale, for GPTQ; 0: unsaid, or all of them."""
        self.data_types: frozenset[str] = frozenset(_data_types(found))
        """auto-round's, of the weights: ``int``, ``mx_fp`` …"""
        bits = config.get("quantization_bit")
        self.own_bits: int = bits if type(bits) is int else 0
        """ChatGLM's, which quantises itself; 0: unsaid."""
        self.transforms: frozenset[str] = frozenset(_transforms(found))
        """Names of modules whose weights compressed-tensors multiplies inputs and outputs by."""
        self.distorts: str = next(_distorting(found), "")
        """The first of its transforms that weights were multiplied by and that is no rotation."""
        self.scales_are: str = str(found.get("weight_scale_semantics", ""))[:40]
        """gptqmodel's word on FP8: ``inverse`` where codes are divided by their scales; empty: unsaid."""
        self.bits: frozenset[int] = frozenset(
            weight["num_bits"]
            for weight in weights
            if type(weight.get("num_bits")) is int and weight.get("type", "int") == "int"
        )
        """Of the integer weights."""


def torchao_types(metadata: Mapping[str, str]) -> dict[str, str]:
    """Weight → torchao's class of tensor, by a safetensors header's metadata."""
    found = {}
    for name, text in metadata.items():
        if '"_type"' in text and len(text) < _LONGEST:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and isinstance(value.get("_type"), str):
                found[name] = value["_type"]
    return found


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config``, the whole model's or that of a part of it (thinker_config, text_config …)."""
    found: list[dict[str, Any]] = []
    level = [config]
    for _ in range(_DEEPEST):
        for place in level:
            for key in ("quantization_config", "compression_config"):
                value = place.get(key)
                if isinstance(value, dict) and value and value not in found:
                    found.append(value)
        if found:
            break
        level = [value for place in level for key, value in place.items() if isinstance(value, dict)]
    if len(found) > 1 and level != [config]:
        return {"quant_method": "several that differ"}
    if not found:
        return {}
    inner = found[0].get("quantization_config")  # older compressed-tensors
    return {**found[0], **inner} if isinstance(inner, dict) else found[0]


def _blocks(found: Mapping[str, Any], weights: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    yield from _pair(found.get("weight_block_size"))
    for weight in weights:
        block = weight.get("block_structure")
        if isinstance(block, str):
            block = [int(side) for side in block.split("x") if side.isdecimal() and len(side) < 10]
        yield from _pair(block)
        yield from _pair([1, weight.get("group_size")])


def _data_types(found: Mapping[str, Any]) -> Iterator[str]:
    layers = found.get("extra_config")
    for place in (found, *(layers.values() if isinstance(layers, dict) else ())):
        if isinstance(place, dict) and isinstance(place.get("data_type"), str):
            yield place["data_type"]


def _schemes(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    config = found.get("transform_config")
    schemes = config.get("config_groups") if isinstance(config, dict) else None
    for name, scheme in schemes.items() if isinstance(schemes, dict) else ():
        if isinstance(scheme, dict):
            yield name, scheme


def _transforms(found: Mapping[str, Any]) -> Iterator[str]:
    for name, _ in _schemes(found):
        yield from (f"{name}_{place}" for place in ("input", "output", "q_attn", "k_cache"))


def _distorting(found: Mapping[str, Any]) -> Iterator[str]:
    for name, scheme in _schemes(found):
        applied = scheme.get("apply")
        applied = applied if isinstance(applied, list) else []
        places = [place.get("location") for place in applied if isinstance(place, dict)]
        if scheme.get("type") not in _ROTATIONS and any(str(place).startswith("weight") for place in places):
            yield f"{name} ({str(scheme.get('type'))[:40]})"


def _pair(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        yield value[0], value[1]
