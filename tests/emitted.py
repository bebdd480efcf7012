"""The matrices themselves that a scan of a saved model takes apart, by longname."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from shardesd.matrices import Context, plan, slices
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, TensorRef

_WORDS = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


@dataclass(frozen=True)
class Emitted:
    slices: list[np.ndarray]
    scale: float
    note: str
    block_type: str


def emitted(folder: Path, **options: Any) -> dict[str, Emitted]:
    """Of ``model.safetensors`` with its config.json, planned without an aspect rule."""
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, Emitted] = {}
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        context = Context(
            config=config, names=frozenset(file.keys()), options=ScanOptions(**{"max_aspect": 0, **options})
        )
        for name in file.keys():  # noqa: SIM118
            array = file.get_tensor(name)
            stored = TensorRef(
                name=name, dtype=_WORDS[array.dtype.name], shape=array.shape, shard="s", end=array.nbytes
            )
            for item in plan(stored, context):
                if isinstance(item, MatrixRef):
                    raw = np.frombuffer(array.tobytes()[item.tensor.start : item.tensor.end], array.dtype)
                    views = slices(item, raw.reshape(item.tensor.shape))
                    assert item.longname not in found
                    found[item.longname] = Emitted(views, item.scale, item.note, item.block_type)
    return found
