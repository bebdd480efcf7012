"""By what a spectrum is known again: the bytes, what of them is the matrix, what was added to it, and how it is solved.

Anything that could change a λ must be in the key, and nothing else: a name, a shard's number or a fit's options change
none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
from blake3 import blake3

from shardesd.records import MatrixRef, TensorRef

ALGORITHM = 1
"""Raised whenever `spectra` would give other λ (beyond rounding) for the same matrix: old entries are then unknown."""

_NAMES = frozenset({"longname", "block_type", "layer_index", "whole", "note"})
"""What a `MatrixRef` says of a matrix that changes no λ. All other fields, later ones too, go into the key."""


def digest(pieces: Iterable[np.ndarray]) -> str:
    """BLAKE3 (in hex) of the bytes of arrays in turn: 5 GB/s a core, and no two tensors ever share one."""
    state = blake3()
    for piece in pieces:
        state.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def spectrum_key(content: str, matrix: MatrixRef, *, solver: str, precision: str) -> str:
    """The key of one spectrum, 64 hex digits.

    `content` is the `digest` of the elements of `matrix.tensor` as they are read: merged, decoded.
    """
    what = {field.name: _plain(getattr(matrix, field.name)) for field in fields(matrix) if field.name not in _NAMES}
    return _hash(["spectrum", ALGORITHM, content, what, solver, precision])


def place_key(sha256: str, start: int, end: int, delta: str) -> str:
    """The key under which the digest of what `delta` makes of bytes `start`…`end` of a file is remembered."""
    return _hash(["place", ALGORITHM, sha256, start, end, delta])


def _plain(value: Any) -> Any:
    if isinstance(value, TensorRef):
        # What it holds is told by the content; its shape and element type are not.
        return [value.dtype, list(value.shape)]
    if isinstance(value, slice):
        return ["slice", value.start, value.stop, value.step]
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
