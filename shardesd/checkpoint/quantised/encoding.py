"""What all encodings share: a stack of matrices whose rows can be decoded one range at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from math import prod

import numpy as np

from shardesd.checkpoint.elements import raw_dtype
from shardesd.checkpoint.quantised.codes import numbers
from shardesd.errors import MatrixError
from shardesd.records import TensorRef

Read = Callable[[TensorRef], AbstractContextManager[np.ndarray]]
"""Gives the raw elements of a stored tensor, or of a part of one, as `checkpoint.Shard.read` does."""

STRIP_BYTES = 1 << 17
"""Codes that are read and decoded at a time, where they lie row by row: numpy widens them to 64-bit indices."""


class Undecodable(ValueError):
    """Why a quantised weight can't be decoded; becomes the reason of its failed row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding(ABC):
    """How one weight is stored. Subclasses add the `TensorRef`s of its parts."""

    label: str
    """The row's ``dtype``: ``fp8_e4m3[128x128]``, ``gptq4[g128]`` …"""
    shape: tuple[int, ...]
    """Of the decoded weight: a matrix (rows, columns), or a stack of them."""
    quantised: bool = True
    """False for one that only lies in another order."""

    @property
    def by_rows(self) -> bool:
        """Whether some rows cost about that part of all of them."""
        return True

    @property
    def parts(self) -> tuple[TensorRef, ...]:
        """The stored tensors that it is decoded from, the codes first."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, TensorRef))

    @abstractmethod
    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """Rows `start`…`stop` of the stack's matrix number `matrix` into `out`, float32 of (stop − start, columns).

        Takes no more memory than 16 bytes for each of its elements beside `out`. Raises `MatrixError` where the parts'
        content makes no sense.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned(Encoding):
    """The transpose of one matrix: what a quantiser has made a linear layer of, as the model itself keeps it."""

    stored: Encoding

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return False

    @property
    def parts(self) -> tuple[TensorRef, ...]:
        """See `Encoding.parts`."""
        return self.stored.parts

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        rows, columns = self.stored.shape
        count = rows if not self.stored.by_rows else max(1, STRIP_BYTES // (4 * columns))
        for first in range(0, rows, count):
            last = min(rows, first + count)
            values = np.empty((last - first, columns), np.float32)
            self.stored.decode(read, matrix, first, last, values)
            out[:, first:last] = values[:, start:stop].T


def turned(encoding: Encoding) -> Turned:
    """The transpose of a matrix."""
    return Turned(label=encoding.label, shape=encoding.shape[::-1], quantised=encoding.quantised, stored=encoding)


def decoded(encoding: Encoding, name: str) -> TensorRef:
    """The tensor called `name` that `encoding` gives: F32, its bytes counted as if the decoded elements were stored."""
    codes = encoding.parts[0]
    return TensorRef(
        name=name, dtype="F32", shape=encoding.shape, shard=codes.shard, end=4 * prod(encoding.shape), encoding=encoding
    )


def by_rows(tensor: TensorRef) -> bool:
    """Whether some rows of a tensor with an encoding cost about that part of all of them."""
    return isinstance(tensor.encoding, Encoding) and tensor.encoding.by_rows


def elements(tensor: TensorRef, read: Read, into: np.ndarray | None = None) -> np.ndarray:
    """The elements of a tensor with an encoding, or of a byte range of one: an array of its shape and dtype word.

    They lie in `into` (flat uint8) where it is large enough. Raises `MatrixError`.
    """
    encoding = tensor.encoding
    assert isinstance(encoding, Encoding)
    if not tensor.nbytes:
        raise MatrixError(f"tensor '{tensor.name}' of shape {tensor.shape} has no elements")
    *_, rows, columns = encoding.shape
    width = 4 * columns
    first, last = tensor.start // width, -(-tensor.end // width)
    size = (last - first) * width
    flat = np.empty(size, np.uint8) if into is None or len(into) < size else into[:size]
    out = flat.view(np.float32).reshape(last - first, columns)
    row = first
    while row < last:
        matrix, start = divmod(row, rows)
        count = min(rows - start, last - row)
        with np.errstate(all="ignore"):  # what becomes NaN or infinite here is seen where the spectrum is computed
            encoding.decode(read, matrix, start, start + count, out[row - first : row - first + count])
        row += count
    at = tensor.start - first * width
    data = flat[at : at + tensor.nbytes]
    return data.view(raw_dtype(tensor.dtype)).reshape(tensor.shape)


def part(tensor: TensorRef, index: int, of: int, shape: tuple[int, ...]) -> TensorRef:
    """The `index`-th of the `of` equal parts of a stored tensor, seen in `shape`."""
    size = tensor.nbytes // of
    return tensor.part(shape, tensor.start + index * size, tensor.start + (index + 1) * size)


def floats(read: Read, tensor: TensorRef) -> np.ndarray:
    """A copy of a small tensor's numbers as float32; those of U8 and F8_E8M0 are powers of two."""
    with read(tensor) as raw:
        return numbers(raw, tensor.dtype)


def strips(rows: int, bytes_each: int) -> Iterator[tuple[int, int]]:
    """First and last row of strips of about `STRIP_BYTES`."""
    step = max(1, STRIP_BYTES // max(1, bytes_each))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)
