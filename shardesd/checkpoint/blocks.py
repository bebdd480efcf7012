"""A matrix that stays in its file: each block is read when it is asked for, so that it is never in memory whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardesd.checkpoint import aio
from shardesd.checkpoint.elements import StoredMatrix, element_word
from shardesd.checkpoint.interface import Shard
from shardesd.records import Matrix, TensorRef

if TYPE_CHECKING:
    import torch

_STRIP_BYTES = 16_000_000  # of rows that are read at once to take columns from


class ShardMatrix:
    """A `records.Matrix` over a 2-D tensor of a shard."""

    def __init__(self, shard: Shard, tensor: TensorRef) -> None:
        self._shard = shard
        self._tensor = tensor
        M, N = self.shape = tensor.shape[0], tensor.shape[1]
        self._row_bytes = tensor.nbytes // M
        self.itemsize = max(1, self._row_bytes // N)

    def block(self, axis: Literal[0, 1], start: int, stop: int, dtype: np.dtype[Any]) -> np.ndarray:
        """See `records.Matrix`. Columns cost a pass over the whole tensor."""
        if axis == 0:
            with self._read(start, stop) as raw:
                return self._stored(raw).block(0, 0, stop - start, dtype)
        M = self.shape[0]
        out = np.empty((M, stop - start), dtype)
        step = max(1, _STRIP_BYTES // self._row_bytes)
        for row in range(0, M, step):
            with self._read(row, min(row + step, M)) as raw:
                out[row : row + step] = self._stored(raw).block(1, start, stop, dtype)
        return out

    @cached_property
    def is_stretch(self) -> bool:
        """See `records.Matrix`."""
        return self._shard.delta(self._tensor) == ""

    def precedes(self, other: Matrix) -> bool:
        """See `records.Matrix`."""
        if not isinstance(other, ShardMatrix) or other._shard is not self._shard:
            return False
        one, next_ = self._tensor, other._tensor
        return one.end == next_.start and one.dtype == next_.dtype and self.is_stretch and other.is_stretch

    def through(self, last: Matrix) -> ShardMatrix:
        """See `records.Matrix`."""
        if not isinstance(last, ShardMatrix) or last._shard is not self._shard:
            raise ValueError("they lie in different files")
        end = last._tensor.end
        start = self._tensor.start
        return ShardMatrix(self._shard, self._tensor.part(((end - start) // self.itemsize, 1), start, end))

    def begin(self, start: int, stop: int, buffer: np.ndarray) -> Callable[[], torch.Tensor]:
        """See `records.Matrix`."""
        try:
            reading = self._read(start, stop, buffer)

            def come() -> torch.Tensor:
                try:
                    with reading as raw:
                        rows = self._stored(raw).rows(0, stop - start)
                        # What didn't fit into the caller's buffer lies in one that is used again after this context.
                        fits = len(buffer) >= (stop - start) * self._row_bytes and rows.data_ptr() == buffer.ctypes.data
                        return rows if fits else rows.clone()
                except BaseException:  # there was no memory to enter the context, say
                    aio.settle(buffer)
                    raise

            return come
        except BaseException:
            aio.settle(buffer)
            raise

    def _read(self, start: int, stop: int, into: np.ndarray | None = None) -> AbstractContextManager[np.ndarray]:
        tensor = self._tensor
        first, end = tensor.start + start * self._row_bytes, tensor.start + stop * self._row_bytes
        return self._shard.read(tensor.part((stop - start, tensor.shape[1]), first, end), into)

    def _stored(self, raw: np.ndarray) -> StoredMatrix:
        return StoredMatrix(raw, element_word(raw, self._tensor.dtype))
