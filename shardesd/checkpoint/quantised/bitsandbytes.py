"""bitsandbytes' 4-bit weights, nf4 and fp4, with their block maxima quantised once more or not.

W = quant_map[code] · absmax[block], over the elements in C order, the high nibble first. Double quantised:
absmax = nested_quant_map[code] · nested_absmax[block] + nested_offset. Shape and block sizes are JSON in
``quant_state.bitsandbytes__nf4``. The codes may lie in words of any type (bnb_4bit_quant_storage).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from shardesd.checkpoint.quantised.codes import nibbles
from shardesd.checkpoint.quantised.encoding import STRIP_BYTES, Encoding, Read, Undecodable, floats
from shardesd.records import TensorRef

MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockwise4(Encoding):
    """See the module."""

    codes: TensorRef
    table: TensorRef
    absmax: TensorRef
    block: int
    nested_table: TensorRef | None = None
    nested_absmax: TensorRef | None = None
    nested_block: int = 1
    nested_offset: float = 0.0

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        rows, columns = self.shape[-2:]
        first = (matrix * rows + start) * columns
        last = first + out.size
        table = floats(read, self.table)
        flat = out.reshape(-1)
        step = max(1, STRIP_BYTES // self.block) * self.block
        for at in range(first // self.block * self.block, last, step):
            end = min(at + step, 2 * self.codes.numel, -(-last // self.block) * self.block)
            values = np.empty(end - at, np.float32)
            with read(self.codes.rows(at // 2, end // 2)) as raw:
                nibbles(raw.reshape(1, -1), table, values.reshape(1, -1), high_first=True)
            absmax = self._absmax(read, at // self.block, -(-end // self.block))
            values *= np.repeat(absmax, self.block)[: len(values)]
            low, high = max(at, first), min(end, last)
            flat[low - first : high - first] = values[low - at : high - at]

    def _absmax(self, read: Read, first: int, last: int) -> np.ndarray:
        part = self.absmax.rows(first, last)
        if self.nested_table is None or self.nested_absmax is None:
            return floats(read, part)
        with read(part) as raw:
            absmax = np.take(floats(read, self.nested_table), raw)
        outer = first // self.nested_block, -(-last // self.nested_block)
        scale = np.repeat(floats(read, self.nested_absmax.rows(*outer)), self.nested_block)
        absmax *= scale[first - outer[0] * self.nested_block :][: len(absmax)]
        absmax += np.float32(self.nested_offset)
        return absmax


def blockwise4(codes: TensorRef, parts: dict[str, TensorRef], state: bytes) -> Blockwise4:
    """The encoding of a ``weight`` with its parts by their last word, and the content of its quant_state. Raises
    `Undecodable`."""
    try:
        values: Any = json.loads(state)
        kind, block, shape = values["quant_type"], values["blocksize"], tuple(values["shape"])
        nested = "nested_absmax" in parts
        nested_block = values["nested_blocksize"] if nested else 1
        offset = float(values["nested_offset"]) if nested else 0.0
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Undecodable(f"its quant_state is malformed ({type(error).__name__}: {error})") from None
    sizes = (*shape, block, nested_block)
    if kind not in ("nf4", "fp4") or len(shape) < 2 or not all(type(n) is int and 0 < n < 2**40 for n in sizes):
        raise Undecodable(f"its quant_state says type {kind!r}, shape {shape}, blocks of {block!r}, {nested_block!r}")
    codes = replace(codes, dtype="U8", shape=(codes.nbytes,))
    count = prod(shape)
    blocks = -(-count // block)
    if -(-count // 2) != codes.numel or block % 2 or block > 1 << 20 or nested_block > 1 << 20:
        raise Undecodable(f"{codes.numel} bytes of codes in blocks of {block} are not what shape {shape} takes")
    wanted = {"quant_map": ("F32", 16), "absmax": ("U8" if nested else "F32", blocks)}
    if nested:
        wanted |= {"nested_quant_map": ("F32", 256), "nested_absmax": ("F32", -(-blocks // nested_block))}
    for name, (dtype, length) in wanted.items():
        there = parts.get(name)
        if there is None:
            raise Undecodable(f"its {name} is missing")
        if there.dtype != dtype or there.shape != (length,):
            raise Undecodable(f"its {name} is {there.dtype} of shape {there.shape}, not {dtype} of ({length},)")
    return Blockwise4(
        label=f"{kind}[{block}]",
        shape=shape,
        codes=codes,
        table=parts["quant_map"],
        absmax=parts["absmax"],
        block=block,
        nested_table=parts.get("nested_quant_map") if nested else None,
        nested_absmax=parts.get("nested_absmax"),
        nested_block=nested_block,
        nested_offset=offset,
    )
