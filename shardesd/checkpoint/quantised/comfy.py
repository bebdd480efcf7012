"""What ComfyUI says of a layer: JSON in ``X.comfy_quant``, or of all layers in a header's metadata.

Its float8 and its int8 with a scale for the tensor or for rows are what they are elsewhere. The others are not, though
their parts have the same names: nvfp4 keeps the high nibble first and its scales, like mxfp8's, in cuBLAS's tiles, and
whatever is called convrot holds a rotated weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardesd.checkpoint.quantised.encoding import Undecodable

METADATA = "_quantization_metadata"
MAX_BYTES = 1 << 16
_PLAIN = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
_OF_NO_EFFECT = ("format", "full_precision_matrix_mult", "per_channel", "convrot_groupsize")


def layers(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Module → what a safetensors header's metadata says of it."""
    try:
        value = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError):
        return {}
    found = value.get("layers") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def of(module: str, known: Mapping[str, Any]) -> Any:
    """What `known` says of a module, by its name or by the end of it; None where nothing is said."""
    while module not in known and "." in module:
        module = module.partition(".")[2]
    return known.get(module)


def check(said: bytes | Any) -> None:
    """Raises `Undecodable` unless `said`, of one layer (JSON, or what it holds), leaves the parts' names their usual
    meaning."""
    if isinstance(said, bytes):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise Undecodable(f"its comfy_quant is malformed ({type(error).__name__}: {error})") from None
    kind = said.get("format") if isinstance(said, dict) else None
    if kind not in _PLAIN:
        raise Undecodable(f"ComfyUI's {str(kind)[:40]} is not supported (only {', '.join(_PLAIN)} are)")
    for key, value in said.items():
        if value and key not in _OF_NO_EFFECT:
            raise Undecodable(f"ComfyUI's {kind} with {str(key)[:40]} is not supported")
