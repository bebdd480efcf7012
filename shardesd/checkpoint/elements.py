"""Raw elements and the format's dtype words → numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardesd.checkpoint.header import DTYPE_BITS
from shardesd.records import Matrix, TensorRef

if TYPE_CHECKING:
    import torch

_FLOATS: dict[str, type[np.generic]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_OTHERS: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "C64": np.complex64,
}
_STRIP_ELEMENTS = 1 << 16
"""Elements converted at a time: small enough for the intermediate float32 to stay in the cache."""

TORCH_WORDS = {
    "bool": "BOOL",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
}
"""torch's names of element types → the format's words."""

SUPPORTED = frozenset(_FLOATS)
"""The dtype words whose elements can be analysed."""


def is_supported(dtype: str) -> bool:
    """Whether `StoredMatrix` knows this dtype word."""
    return dtype in SUPPORTED


def is_integer(dtype: str) -> bool:
    """Whether this dtype word is an integer or boolean type."""
    return dtype[0] in "UI" or dtype == "BOOL"


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that raw elements of this dtype word have: uint16 for BF16, uint8 (bytes) for F8, F6 and F4."""
    return np.dtype(_FLOATS.get(dtype) or _OTHERS.get(dtype) or np.uint8)


def as_elements(data: np.ndarray, tensor: TensorRef) -> np.ndarray:
    """A tensor's bytes as its raw elements, in its shape; F4 and F6, whose elements are no whole bytes, as they are."""
    return data if DTYPE_BITS[tensor.dtype] % 8 else data.view(raw_dtype(tensor.dtype)).reshape(tensor.shape)


def element_word(raw: np.ndarray, stored: str) -> str:
    """The dtype word of elements in hand: `stored`, unless they have been widened on the way."""
    return {"float32": "F32", "float64": "F64"}.get(raw.dtype.name, stored)


class StoredMatrix:
    """A `records.Matrix` over raw elements, wherever their view points; nothing is converted before it is asked for."""

    def __init__(self, raw: np.ndarray, dtype: str) -> None:
        """`raw`: a 2-D array or view, M×N, of `raw_dtype(dtype)`; `dtype`: one of `SUPPORTED`, else ValueError."""
        if dtype not in SUPPORTED:
            raise ValueError(f"dtype '{dtype}' is not supported (expected one of: {', '.join(sorted(SUPPORTED))})")
        if raw.ndim != 2 or raw.dtype != raw_dtype(dtype):
            raise ValueError(f"expected a 2-D array of {raw_dtype(dtype)} for {dtype}, got {raw.ndim}-D {raw.dtype}")
        self._raw = raw
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self._raw.shape[0], self._raw.shape[1]

    def block(self, axis: Literal[0, 1], start: int, stop: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Rows (axis 0, in C order) or columns (axis 1, in whichever order is quicker) `start`…`stop` as a fresh array.

        `dtype` is float32 or float64. Every stored type is exact in float64; float64 is rounded to float32.
        """
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"a block is float32 or float64, not {dtype}")
        part = self._raw[start:stop] if axis == 0 else self._raw[:, start:stop]
        if axis == 1 and abs(part.strides[0]) < abs(part.strides[1]):
            return np.transpose(_convert(part.T, self._dtype, np.dtype(dtype)))
        return _convert(part, self._dtype, np.dtype(dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element."""
        return self._raw.itemsize

    @property
    def is_stretch(self) -> bool:
        """False: they are in memory."""
        return False

    def precedes(self, other: Matrix) -> bool:
        """False: see `records.Matrix`."""
        return False

    def through(self, last: Matrix) -> Matrix:
        """Raises ValueError."""
        raise ValueError("it is no stretch of a file")

    def begin(self, start: int, stop: int, buffer: np.ndarray) -> Callable[[], torch.Tensor]:
        """See `records.Matrix`."""
        rows = self.rows(start, stop)
        return lambda: rows

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows as stored, sharing memory with the raw elements (unless a stride is negative: then a copy)."""
        import torch

        raw = self._raw[start:stop]
        if min(raw.strides, default=0) < 0 or not raw.flags.writeable:
            raw = raw.copy()  # torch has no negative strides, and warns of what can't be written to
        if self._dtype == "BF16":
            return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(raw)


def _convert(part: np.ndarray, stored: str, dtype: np.dtype[Any]) -> np.ndarray:
    # What overflows float32 becomes infinite, and a signalling NaN a quiet one: whoever computes with them will see.
    with np.errstate(over="ignore", invalid="ignore"):
        if stored != "BF16":
            return part.astype(dtype, order="C", copy=True)
        out = np.empty(part.shape, dtype)
        if dtype == np.float32:
            _widen(part, out)
            return out
        rows, columns = part.shape
        width = max(1, min(columns, _STRIP_ELEMENTS))
        height = _STRIP_ELEMENTS // width
        strip = np.empty((min(height, rows), width), np.float32)
        for row in range(0, rows, height):
            for column in range(0, columns, width):
                piece = part[row : row + height, column : column + width]
                wide = strip[: piece.shape[0], : piece.shape[1]]
                _widen(piece, wide)
                out[row : row + height, column : column + width] = wide
        return out


def _widen(bf16: np.ndarray, out: np.ndarray) -> None:
    """A bfloat16 is the upper half of the float32 of the same value."""
    np.left_shift(bf16, 16, out=out.view(np.uint32), dtype=np.uint32)
