"""Quantised weights: the tensors that make up one weight → a `TensorRef` whose elements are decoded when they are read.

`Modules` finds them in headers, by name, and asks the families (a module each) how they are to be decoded; `elements`
decodes a tensor, or a byte range of one. Rules of the formats: `docs/quantised.md`.
"""

from __future__ import annotations

from shardesd.checkpoint.quantised.encoding import Encoding, Read, Turned, by_rows, elements
from shardesd.checkpoint.quantised.families import weight_names
from shardesd.checkpoint.quantised.modules import Modules

__all__ = ["Encoding", "Modules", "Read", "Turned", "by_rows", "elements", "weight_names"]
