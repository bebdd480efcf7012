"""What ``--stats`` gathers while a scan goes on: moments of every tensor, from bytes that are read anyway.

A byte range that several matrices are cut from is counted by the first of them; what no matrix reads (norms, biases,
embeddings) is read for this alone, in pieces. Ranks come from the λ when all are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np

from shardesd import matrices, metrics
from shardesd.checkpoint import Shard, StoredMatrix, is_integer, is_supported
from shardesd.checkpoint.elements import raw_dtype
from shardesd.records import MatrixRef, Row, Skip, StatsRow, TensorRef

PIECE_BYTES = 8_000_000
"""Read at a time, by any thread, of a tensor that no matrix needs."""
_CHUNK_ELEMENTS = 1 << 18
"""Converted to float64 at a time: in the cache, and so many that threads don't wait for each other's next call."""

_Range = tuple[int, int]


@dataclass(slots=True)
class _Tensor:
    ref: TensorRef
    name: matrices.Name
    ranges: dict[_Range, metrics.Moments | None]
    longnames: list[str] | None
    """Of its matrices; None where a part of it is left out."""


@dataclass(slots=True)
class Statistics:
    """Gathers, in any number of threads; `rows` at the end."""

    _tensors: dict[str, _Tensor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(
        self, tensor: TensorRef, items: Sequence[MatrixRef | Skip], read: Collection[str], *, in_pieces: bool = True
    ) -> tuple[set[str], list[TensorRef]]:
        """Note a tensor and what it holds, of which the matrices in `read` (longnames) will be read.

        Gives the longnames that are to be read by way of `counting`, and the pieces that must be read for this alone.
        """
        ranges: dict[_Range, TensorRef] = {}
        carriers: dict[_Range, str] = {}
        for item in items:
            at = (item.tensor.start, item.tensor.end)
            ranges.setdefault(at, item.tensor)
            if isinstance(item, MatrixRef) and item.longname in read:
                carriers.setdefault(at, item.longname)
        codes = bool(tensor.problem) or any(matrices.holds_codes(item) for item in items)
        readable = tensor.numel > 0 and can_count(tensor.dtype) and not codes
        rest = [ref for at, ref in ranges.items() if readable and at not in carriers]
        alone = [piece for ref in rest for piece in (_pieces(ref) if in_pieces else (ref,))]
        whole = all(isinstance(item, MatrixRef) for item in items)
        with self._lock:
            self._tensors[tensor.name] = _Tensor(
                tensor,
                matrices.parse_name(tensor.name),
                dict.fromkeys([*carriers, *((piece.start, piece.end) for piece in alone)]),
                [item.longname for item in items] if whole else None,
            )
        return set(carriers.values()), alone

    def counting(self, shard: Shard, tensor: TensorRef) -> Shard:
        """`shard`, counting the elements of `tensor` as they are read, whole or block by block."""
        return cast(Shard, _Counting(shard, tensor, partial(self._put, tensor)))  # of a shard, matrices only read

    def read(self, tensor: TensorRef, shard: Shard) -> None:
        """Read one range for this alone, and count its elements."""
        with shard.read(tensor) as raw:
            self._put(tensor, count(raw, tensor.dtype))

    def rows(self, template: Row, eigs: Callable[[str], np.ndarray | None]) -> Iterator[StatsRow]:
        """A row per tensor in natural order of names; `eigs` gives the λ of a longname, None where there are none."""
        for name in sorted(self._tensors, key=matrices.natural_key):
            yield _row(self._tensors[name], template, eigs)

    def _put(self, tensor: TensorRef, moments: metrics.Moments | None) -> None:
        with self._lock:
            self._tensors[tensor.name].ranges[tensor.start, tensor.end] = moments


class _Counting:
    """Counts what its reads show for the first time: those that go on where the one before ended.

    A second pass over the same bytes, in whatever blocks, begins anew and isn't counted.
    """

    def __init__(self, shard: Shard, tensor: TensorRef, done: Callable[[metrics.Moments | None], None]) -> None:
        self._shard, self._end, self._done = shard, tensor.end, done
        self._seen = tensor.start
        self._complete = False
        self._parts: list[metrics.Moments] = []

    @contextmanager
    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """See `Shard.read`."""
        with self._shard.read(tensor, into) as raw:
            if tensor.start == self._seen and not self._complete:
                found = count(raw, tensor.dtype)
                self._seen = tensor.end
                self._parts += [found] if found else []
                self._complete = self._seen == self._end
                if self._complete:
                    self._done(metrics.merge(self._parts))
            yield raw


def _pieces(tensor: TensorRef) -> Iterator[TensorRef]:
    """Rows of a tensor, of `PIECE_BYTES` together or less where a row is not longer."""
    size = raw_dtype(tensor.dtype).itemsize
    if not tensor.shape or tensor.nbytes != tensor.numel * size:  # an adapter has made it larger than it is stored
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    step = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, tensor.shape[0], step):
        n = min(step, tensor.shape[0] - first)
        start = tensor.start + first * row_bytes
        yield replace(tensor, shape=(n, *tensor.shape[1:]), start=start, end=start + n * row_bytes)


def can_count(dtype: str) -> bool:
    """Whether elements of this type are numbers that can be read (packed and FP8 ones are not)."""
    return is_supported(dtype) or is_integer(dtype)


def count(raw: np.ndarray, dtype: str) -> metrics.Moments | None:
    """The moments of raw elements, one chunk at a time."""
    flat = raw.reshape(-1)
    work = np.empty(min(flat.size, _CHUNK_ELEMENTS))
    return metrics.merge(metrics.moments(chunk, work) for chunk in _chunks(flat, dtype))


def _chunks(flat: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        if dtype == "BF16" and part.dtype == np.uint16:  # as stored, and not what an adapter made of it
            part = StoredMatrix(part[None], dtype).block(0, 0, 1, np.dtype(np.float32))[0]
        yield part


def _row(tensor: _Tensor, template: Row, eigs: Callable[[str], np.ndarray | None]) -> StatsRow:
    row = StatsRow(
        model_id=template.model_id,
        revision=template.revision,
        tensor=tensor.ref.name,
        layer_index=tensor.name.layer_index,
        block_type=tensor.name.block_type,
        dtype=tensor.ref.label,
        shape="×".join(map(str, tensor.ref.shape)),
        numel=tensor.ref.numel,
    )
    found = list(tensor.ranges.values())
    total = metrics.merge(_sorted(tensor)) if found and None not in found else None
    if total:
        row = replace(
            row,
            mean=total.mean,
            std=total.std,
            var=total.var,
            min=total.low,
            max=total.high,
            sparsity=total.sparsity,
        )
    spectra = [eigs(longname) for longname in tensor.longnames or ()]
    if not spectra or any(one is None for one in spectra):
        return row
    each = [metrics.ranks(one) for one in spectra if one is not None]
    design, actual, svd_90 = (sum(getattr(one, what) for one in each) for what in ("design", "actual", "svd_90"))
    return replace(
        row,
        matrices=len(each),
        design_rank=design,
        actual_rank=actual,
        rank_ratio=actual / design,
        svd_90_percent_rank=svd_90,
        svd_90_percent_ratio=svd_90 / design,
    )


def _sorted(tensor: _Tensor) -> Iterable[metrics.Moments]:
    return (part for _, part in sorted(tensor.ranges.items()) if part is not None)
