"""What ``--stats`` gathers while a scan goes on: moments of every tensor, from bytes that are read anyway.

A byte range that several matrices are cut from is counted by the first of them; what no matrix reads (norms, biases,
embeddings) is read for this alone, in pieces. Ranks come from the λ when all are there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from shardesd import matrices, metrics, spectra
from shardesd.checkpoint import Shard, ShardMatrix, StoredMatrix, is_integer, is_supported
from shardesd.checkpoint.elements import raw_dtype
from shardesd.engine import Task
from shardesd.errors import MatrixError
from shardesd.keys import Count, Key, limits
from shardesd.records import Matrix, MatrixRef, Row, Skip, StatsRow, TensorRef

PIECE_BYTES = 256_000_000
"""Read by one task, of tensors that no matrix needs: long, since two threads that count get in each other's way (each
of numpy's calls waits for the interpreter's lock), and one that counts beside one that solves does not."""
_OPERATIONS = 64
"""In the time of reading and counting one element, a core does about as many floating-point operations of a solve."""
_OPERATIONS_ON_GPU = 3000
"""Of a GPU's solves, in the time of reading and sending one."""
_LEAST_ON_GPU = 1 << 20
"""Elements from which a tensor that no matrix needs is sent to a GPU to be counted: a core takes a millisecond."""
_READ_BYTES = 1 << 20
"""Read at a time by it, into a buffer that stays in the cache."""
_CHUNK_ELEMENTS = 1 << 18
"""Counted at a time: few enough that they stay in the cache, so many that Python's own time is little."""

_RANKED_AT_ONCE = 1 << 16
"""λ whose ranks are counted at a time."""

_Range = tuple[int, int]
_local = threading.local()
"""A `metrics.Scratch` of each thread."""


@dataclass(slots=True)
class _Tensor:
    ref: TensorRef
    name: matrices.Name
    ranges: dict[_Range, metrics.Moments | None]
    designs: dict[str, int] | None
    """Of its matrices, longname → how many singular values; None where a part of it is left out."""


@dataclass(slots=True)
class Statistics:
    """Gathers, in any number of threads; `rows` at the end."""

    _tensors: dict[str, _Tensor] = field(default_factory=dict)
    _ranks: dict[str, metrics.Ranks] = field(default_factory=dict)
    _unranked: dict[str, np.ndarray] = field(default_factory=dict)
    """λ whose ranks are not yet counted, all of one length."""
    refused: dict[str, str] = field(default_factory=dict)
    """Tensor → why its elements, which no matrix needs, can't be had."""
    _alone: deque[TensorRef] = field(default_factory=deque)
    """What no matrix reads, until a task takes it."""
    _for_gpus: deque[TensorRef] = field(default_factory=deque)
    """Of that, what a GPU is to count."""
    _alone_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __contains__(self, tensor: str) -> bool:
        """Whether it has been told to expect this tensor."""
        return tensor in self._tensors

    def expect(
        self,
        tensor: TensorRef,
        items: Sequence[MatrixRef | Skip],
        read: Collection[str],
        *,
        in_pieces: bool = True,
        on_gpus: bool = False,
    ) -> set[str]:
        """Note a tensor and what it holds, of which the matrices in `read` (longnames) will be read.

        Gives the longnames that are to be read by way of `counting`; what none of them reads goes into `tasks`: where
        it is large and may be sent to one (`on_gpus`), for GPUs.
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
        sent: list[TensorRef] = []
        alone: list[TensorRef] = []
        for ref in rest:
            if on_gpus and _gpu_counts(ref):
                sent.append(ref)
            else:
                alone += pieces(ref, PIECE_BYTES) if in_pieces else (ref,)
        designs = {item.longname: item.slices * min(item.M, item.N) for item in items if isinstance(item, MatrixRef)}
        with self._lock:
            self._tensors[tensor.name] = _Tensor(
                tensor,
                matrices.parse_name(tensor.name),
                dict.fromkeys([*carriers, *((piece.start, piece.end) for piece in (*sent, *alone))]),
                designs if len(designs) == len(items) else None,
            )
        self._for_gpus += sent
        self._alone += alone
        self._alone_bytes += sum(piece.nbytes for piece in alone)
        return set(carriers.values())

    def tasks(self, shard: Shard, *, rest: bool) -> Iterator[Task[Key, Any]]:
        """What must be read for this alone of the tensors that were expected, all of this shard: in tasks of
        `PIECE_BYTES`, of which the last may be shorter if `rest`, and else waits for more.

        Most of it are norms and biases, of a few kilobytes each.
        """
        while self._for_gpus:
            yield self._task_on_gpu(self._for_gpus.popleft(), shard)
        while self._alone and (rest or self._alone_bytes >= PIECE_BYTES):
            yield self._task(shard)

    def _task(self, shard: Shard) -> Task[Key, Any]:
        parts, nbytes = [], 0
        while self._alone and nbytes < PIECE_BYTES:
            parts.append(self._alone.popleft())
            nbytes += parts[-1].nbytes
        self._alone_bytes -= nbytes
        return Task(
            key=Key(Count(tuple(parts)), shard.ref.name),
            run=lambda device: self.read(parts, shard),
            host_bytes=max(_at_once(part, shard) for part in parts),
            cost=_OPERATIONS * sum(part.numel for part in parts),
            **limits(0.0, nbytes, shard),
            aside=True,
        )

    def _task_on_gpu(self, tensor: TensorRef, shard: Shard) -> Task[Key, Any]:
        M, N = tensor.shape

        def run(device: str) -> None:
            if device == "cpu":
                self.read([tensor], shard)
            else:
                spectra.count_cuda(self.tallied(ShardMatrix(shard, tensor), tensor), device)

        return Task(
            key=Key(Count((tensor,)), shard.ref.name),
            run=run,
            host_bytes=_at_once(tensor, shard),
            device_bytes=spectra.count_bytes(M, N, tensor.nbytes // tensor.numel),
            cost=_OPERATIONS_ON_GPU * tensor.numel,
            **limits(0.0, tensor.nbytes, shard),
        )

    def counting(self, shard: Shard, tensor: TensorRef) -> Shard:
        """`shard`, counting the elements of `tensor` as they are read, whole or block by block."""
        return cast(Shard, _Counting(shard, tensor, partial(self._put, tensor)))  # of a shard, matrices only read

    def tallied(self, matrix: Matrix, tensor: TensorRef) -> spectra.Tallied:
        """`matrix`, which is all of `tensor`, counted by the GPU that makes its Gram, if one does."""

        def done(parts: Sequence[spectra.Part]) -> None:
            self._put(tensor, metrics.merge(metrics.Moments(*part) for part in parts))

        return spectra.Tallied(matrix, metrics.NEARLY_ZERO, done)

    def read(self, tensors: Iterable[TensorRef], shard: Shard) -> None:
        """Read ranges for this alone, and count their elements."""
        buffer = np.empty(_READ_BYTES, np.uint8)
        for tensor in tensors:
            found = []
            try:
                for piece in pieces(tensor, _READ_BYTES) if shard.in_blocks(tensor) else (tensor,):
                    with shard.read(piece, buffer) as raw:
                        found.append(count(raw, tensor.dtype))
            except MatrixError as error:  # of what no matrix reads: no row says so
                self.refused[tensor.name] = str(error)
                continue
            self._put(tensor, metrics.merge(part for part in found if part))

    def analysed(self, longname: str, eigs: np.ndarray) -> None:
        """Take the ranks from the λ of a matrix, while they are at hand; of several at once, in fewer calls."""
        if self._unranked and len(eigs) != len(next(iter(self._unranked.values()))):
            self._rank()
        self._unranked[longname] = eigs
        if len(self._unranked) * len(eigs) >= _RANKED_AT_ONCE:
            self._rank()

    def _rank(self) -> None:
        if self._unranked:
            found = metrics.ranks(np.stack(list(self._unranked.values())))
            self._ranks.update(zip(self._unranked, found, strict=True))
            self._unranked.clear()

    def rows(self, template: Row, eigs: Callable[[str], np.ndarray | None]) -> Iterator[StatsRow]:
        """A row per tensor in natural order of names; `eigs` gives the λ of a longname that an earlier run analysed,
        None where there are none."""
        self._rank()

        def ranks(longname: str) -> metrics.Ranks | None:
            found = self._ranks.get(longname)
            if found is None and (before := eigs(longname)) is not None:
                (found,) = metrics.ranks(before[None])
            return found

        for name in sorted(self._tensors, key=matrices.natural_key):
            yield _row(self._tensors[name], template, ranks)

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

    def in_blocks(self, tensor: TensorRef) -> bool:
        """See `Shard.in_blocks`."""
        return self._shard.in_blocks(tensor)

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


def pieces(tensor: TensorRef, nbytes: int) -> Iterator[TensorRef]:
    """Rows of a tensor, of `nbytes` together, or of one row where that is longer."""
    # Most are norms and biases; and an adapter may have made one larger than it is stored.
    if tensor.nbytes <= nbytes or tensor.nbytes != tensor.numel * raw_dtype(tensor.dtype).itemsize:
        yield tensor
        return
    M = tensor.shape[0]
    step = max(1, nbytes // (tensor.nbytes // M))
    for first in range(0, M, step):
        yield tensor.rows(first, min(first + step, M))


def _gpu_counts(tensor: TensorRef) -> bool:
    """Whether a tensor can be sent to a GPU as it is stored, and is worth it."""
    plain = is_supported(tensor.dtype) and tensor.nbytes == tensor.numel * raw_dtype(tensor.dtype).itemsize
    return plain and len(tensor.shape) == 2 and tensor.numel >= _LEAST_ON_GPU


def _at_once(tensor: TensorRef, shard: Shard) -> int:
    """Bytes of it that are in memory at a time while it is read for the statistics alone."""
    if not tensor.shape or not shard.in_blocks(tensor):
        return tensor.nbytes
    return min(tensor.nbytes, max(_READ_BYTES, tensor.nbytes // tensor.shape[0]))


def can_count(dtype: str) -> bool:
    """Whether elements of this type are numbers that can be read (packed and FP8 ones are not)."""
    return is_supported(dtype) or is_integer(dtype)


def count(raw: np.ndarray, dtype: str) -> metrics.Moments | None:
    """The moments of raw elements, one chunk at a time."""
    if not hasattr(_local, "scratch"):
        _local.scratch = metrics.Scratch(_CHUNK_ELEMENTS)
    scratch: metrics.Scratch = _local.scratch
    flat = raw.reshape(-1)
    with np.errstate(all="ignore"):  # NaN and Inf go into what they make so
        return metrics.merge(scratch.moments(chunk) for chunk in _chunks(flat, dtype))


def _chunks(flat: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        if part.dtype == raw_dtype(dtype) and dtype in ("BF16", "F16"):  # as stored, and not what an adapter made of it
            part = StoredMatrix(part[None], dtype).block(0, 0, 1, np.dtype(np.float32))[0]
        yield part


def _row(tensor: _Tensor, template: Row, ranks: Callable[[str], metrics.Ranks | None]) -> StatsRow:
    values: dict[str, float | int | None] = {}
    found = list(tensor.ranges.values())
    total = metrics.merge(_sorted(tensor)) if found and None not in found else None
    if total:
        values = {
            **{"mean": total.mean, "std": total.std, "var": total.var},
            **{"min": total.low, "max": total.high, "sparsity": total.sparsity},
        }
    designs = tensor.designs or {}
    each = [ranks(longname) for longname in designs]
    known = [one for one in each if one is not None]
    if each and len(known) == len(each):
        design = sum(designs.values())  # more than λ where those of a product of thin factors are all that can be > 0
        actual, svd_90 = sum(one.actual for one in known), sum(one.svd_90 for one in known)
        values |= {"matrices": len(known), "design_rank": design, "actual_rank": actual, "rank_ratio": actual / design}
        values |= {"svd_90_percent_rank": svd_90, "svd_90_percent_ratio": svd_90 / design}
    return StatsRow(
        model_id=template.model_id,
        revision=template.revision,
        tensor=tensor.ref.name,
        layer_index=tensor.name.layer_index,
        block_type=tensor.name.block_type,
        dtype=tensor.ref.label,
        shape="×".join(map(str, tensor.ref.shape)),
        numel=tensor.ref.numel,
        **values,  # type: ignore[arg-type]
    )


def _sorted(tensor: _Tensor) -> Iterable[metrics.Moments]:
    return (part for _, part in sorted(tensor.ranges.items()) if part is not None)
