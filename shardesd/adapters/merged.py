"""A checkpoint seen through its adapters: the same tensors, each merged (or its ΔW alone) when it is read.

`MergedCheckpoint` is a `checkpoint.Checkpoint`, so nothing after it knows of adapters. Base and factors are read when a
tensor is due, merged in float32 by blocks of rows, and dropped: beside what a scan of the base takes there are one
tensor's factors and its merged float32 form in memory.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardesd.adapters.edits import Edit, Merger, additive_only, delta, delta_factors, merged_shape
from shardesd.adapters.load import Adapter, adapters_from_peft
from shardesd.adapters.names import base_name
from shardesd.adapters.plan import MergePlan, plan_merge
from shardesd.checkpoint import Checkpoint, LiveCheckpoint, Shard, StoredMatrix, element_word, open_live
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    import torch

    from shardesd.source import Source

_BLOCK_ELEMENTS = 1 << 20  # merged at once where a whole tensor is asked for


class MergedCheckpoint:
    """`base` with `adapters` merged into it in order, or with `only_delta` just the ΔW of what they change.

    All headers of the base must be known. Raises as `plan_merge` does.
    """

    complete = True

    def __init__(
        self,
        base: Checkpoint,
        adapters: Sequence[Adapter],
        *,
        round_to_base: bool = False,
        only_delta: bool = False,
    ) -> None:
        self.source: Source = base.source
        self.base = base
        self.adapters = tuple(adapters)
        self._round_to_base = round_to_base
        self._only_delta = only_delta
        self._digested: list[str] | None = None
        stored = {tensor.name: tensor for tensor in base.tensors()}
        self.plan: MergePlan = plan_merge(adapters, stored, base.config, hints=base.hints)
        self._edits: dict[str, tuple[Edit, ...]] = dict(self.plan.edits)
        self._stored: dict[str, TensorRef | None] = dict(stored)
        self._extra: dict[str, list[TensorRef]] = {}
        for virtual in self.plan.extra:
            begun = virtual.base
            home = begun.shard if begun else base.shards[0].name
            start, end = (begun.start, begun.end) if begun else (0, 0)
            ref = TensorRef(
                name=virtual.name, dtype=virtual.dtype, shape=virtual.shape, shard=home, start=start, end=end
            )
            self._extra.setdefault(home, []).append(ref)
            self._stored[virtual.name] = begun
            self._edits[virtual.name] = virtual.edits
        self.distinct = frozenset(self._edits)

    @property
    def config(self) -> dict[str, Any]:
        """The base's."""
        return self.base.config

    @property
    def shards(self) -> tuple[ShardRef, ...]:
        """The base's."""
        return self.base.shards

    @property
    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(tensor.name for tensor in self.tensors())

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Checkpoint.notes`."""
        return self.base.notes

    @property
    def hints(self) -> Mapping[str, str]:
        """See `Checkpoint.hints`."""
        return self.base.hints

    @property
    def ties(self) -> Mapping[str, str]:
        """The base's, but for what an adapter sets apart."""
        return {name: of for name, of in self.base.ties.items() if not {name, of} & self.distinct}

    def tensors(self) -> tuple[TensorRef, ...]:
        """See `Checkpoint.tensors`."""
        stored = self.base.tensors()
        return tuple(
            tensor
            for shard in self.shards
            for tensor in self._seen(shard.name, [tensor for tensor in stored if tensor.shard == shard.name])
        )

    def open(self, shard: ShardRef, path: Path) -> MergedShard:
        """See `Checkpoint.open`."""
        opened = self.base.open(shard, path)
        return MergedShard(opened, self._seen(shard.name, opened.tensors), self)

    def peek(self, shard: ShardRef) -> MergedShard | None:
        """See `Checkpoint.peek`."""
        opened = self.base.peek(shard)
        return None if opened is None else MergedShard(opened, self._seen(shard.name, opened.tensors), self)

    def digest_of(self, tensor: TensorRef) -> str:
        """A digest of all that makes a changed tensor of its base's bytes."""
        what = [*self._digests(), tensor.name, tensor.shape, self._round_to_base, self._only_delta]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def _digests(self) -> list[str]:
        if self._digested is None:
            self._digested = [_digest(adapter) for adapter in self.adapters]
        return self._digested

    def is_needed_later(self, shard: str) -> bool:
        """See `Checkpoint.is_needed_later`."""
        return self.base.is_needed_later(shard)

    def identity(self) -> dict[str, Any]:
        """See `Checkpoint.identity`."""
        return {"base": self.base.identity(), "adapters": self._digests()}

    def digests(self) -> dict[str, dict[str, Any]]:
        """See `Checkpoint.digests`; the adapters' files too."""
        found = {f"{a.name}/{a.file}": {"size": None, "sha256": a.digest, "header_sha256": None} for a in self.adapters}
        return {**self.base.digests(), **found}

    def close(self) -> None:
        """Let go of the adapters' files."""
        for adapter in self.adapters:
            adapter.close()

    def _seen(self, shard: str, stored: Sequence[TensorRef]) -> tuple[TensorRef, ...]:
        seen = [
            replace(tensor, shape=self.plan.shapes.get(tensor.name, tensor.shape))
            for tensor in stored
            if tensor.name not in self.plan.dropped
        ]
        seen += self._extra.get(shard, [])
        return tuple(tensor for tensor in seen if not self._only_delta or tensor.name in self._edits)

    def _whole(self, name: str) -> tuple[TensorRef | None, tuple[Edit, ...]]:
        return self._stored[name], self._edits.get(name, ())


class MergedShard:
    """A shard of the base whose tensors come merged. A `checkpoint.Shard`."""

    def __init__(self, base: Shard, tensors: tuple[TensorRef, ...], checkpoint: MergedCheckpoint) -> None:
        self._base = base
        self._checkpoint = checkpoint
        self._local = threading.local()
        self.tensors = tensors

    @property
    def ref(self) -> ShardRef:
        """The base's."""
        return self._base.ref

    @property
    def path(self) -> Path:
        """The base's."""
        return self._base.path

    @property
    def nbytes(self) -> int:
        """The base's."""
        return self._base.nbytes

    @property
    def metadata(self) -> dict[str, str]:
        """The base's."""
        return self._base.metadata

    @property
    def header_sha256(self) -> str:
        """The base's."""
        return self._base.header_sha256

    @property
    def on_server(self) -> bool:
        """The base's."""
        return self._base.on_server

    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> AbstractContextManager[np.ndarray]:
        """See `Shard.read`. What an adapter changes comes as float32 (ΔW as float64)."""
        base, edits = self._checkpoint._whole(tensor.name)
        if not edits and base is not None:
            return self._base.read(replace(tensor, name=base.name), into)
        return self._merged(tensor, base, edits)

    def in_blocks(self, tensor: TensorRef) -> bool:
        """See `Shard.in_blocks`."""
        base, edits = self._checkpoint._whole(tensor.name)
        rows = all(edit.by_rows for edit in edits) and not (edits and self._checkpoint._only_delta)
        # A vocabulary that has grown has other rows than its bytes on disk tell.
        return (
            base is not None and rows and tensor.name not in self._checkpoint.plan.shapes and self._base.in_blocks(base)
        )

    def delta(self, tensor: TensorRef) -> str | None:
        """See `Shard.delta`."""
        base, edits = self._checkpoint._whole(tensor.name)
        if base is None:
            return None
        below = self._base.delta(base)
        if not edits or below is None:
            return below
        return self._checkpoint.digest_of(tensor)

    def factors(self, tensor: TensorRef) -> tuple[np.ndarray, np.ndarray] | None:
        """(left, right), float64, with ΔW = left @ right, where only ΔW is asked for and it has thin factors."""
        base, edits = self._checkpoint._whole(tensor.name)
        if not self._checkpoint._only_delta or base is None or len(tensor.shape) != 2:
            return None
        index = None if len(base.shape) == 2 else self._rows_of(tensor, base)[0]
        return delta_factors(edits, index=index)

    def close(self) -> None:
        """See `Shard.close`."""
        self._base.close()

    def __enter__(self) -> MergedShard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _merged(self, tensor: TensorRef, base: TensorRef | None, edits: tuple[Edit, ...]) -> Iterator[np.ndarray]:
        if base is None:
            yield Merger(edits, tensor.shape).rows(np.zeros(tensor.shape, np.float32), 0, tensor.shape[0])
        elif self._checkpoint._only_delta:
            whole = None if additive_only(edits) else self._numbers(base, 0, base.shape[0])
            D = delta(edits, whole, merged_shape(edits, base.shape))
            start, stop = self._rows_of(tensor, base)
            yield D[start:stop].reshape(tensor.shape)
        else:
            shape = merged_shape(edits, base.shape)
            merger = self._merger(tensor.name, base, edits, shape)
            start, stop = (0, shape[0]) if shape != base.shape else self._rows_of(tensor, base)
            if shape != base.shape:
                W = merger.rows(np.zeros(shape, np.float32), 0, shape[0])
            elif not merger.by_rows:
                W = merger.rows(self._numbers(base, 0, shape[0]), 0, shape[0])[start:stop]
            else:
                W = np.empty((stop - start, *shape[1:]), np.float32)
                step = max(1, _BLOCK_ELEMENTS // max(1, int(np.prod(shape[1:]))))
                for row in range(start, stop, step):
                    end = min(row + step, stop)
                    W[row - start : end - start] = merger.rows(self._numbers(base, row, end), row, end)
            yield W.reshape(tensor.shape)

    def _merger(self, name: str, base: TensorRef, edits: tuple[Edit, ...], shape: tuple[int, ...]) -> Merger:
        """With its factors in memory; the last one of each thread is kept, since blocks of one tensor follow."""
        last: tuple[str, Merger] | None = getattr(self._local, "last", None)
        if last is None or last[0] != name:
            self._local.last = None  # before the next factors are read
            round_to = base.dtype if self._checkpoint._round_to_base else None
            last = self._local.last = name, Merger(edits, shape, round_to=round_to)
        return last[1]

    def _numbers(self, base: TensorRef, start: int, stop: int) -> np.ndarray:
        """Rows of the base as fresh float32."""
        part = base.rows(start, stop)
        with self._base.read(part) as raw:
            flat = StoredMatrix(raw.reshape(1, -1), element_word(raw, base.dtype))
            numbers: np.ndarray = flat.block(0, 0, 1, np.dtype(np.float32)).reshape(part.shape)
        return numbers

    @staticmethod
    def _rows_of(tensor: TensorRef, base: TensorRef) -> tuple[int, int]:
        """Which rows (experts, for a stack) of the stored tensor a narrowed reference means."""
        row_bytes = base.nbytes // base.shape[0]
        return (tensor.start - base.start) // row_bytes, (tensor.end - base.start) // row_bytes


def open_peft(model: torch.nn.Module, *, round_to_base: bool = False, only_delta: bool = False) -> MergedCheckpoint:
    """A live `peft.PeftModel`: its base under the base's own names, with the active adapters merged when read."""
    adapters = adapters_from_peft(model)
    inner: Any = model
    live = open_live(inner.get_base_model())
    values = {new: live.values[name] for name in live.values if (new := base_name(name))}
    hints = {new: kind for name, kind in live.hints.items() if (new := base_name(name))}
    base = LiveCheckpoint(live.source.model_id, values, config=live.config, hints=hints, notes=live.notes)
    return MergedCheckpoint(base, adapters, round_to_base=round_to_base, only_delta=only_delta)


def _digest(adapter: Adapter) -> str:
    if adapter.digest is not None:
        return adapter.digest
    digest = hashlib.sha256()
    for tensor in adapter.tensors:
        digest.update(tensor.name.encode())
        digest.update(np.ascontiguousarray(adapter.read(tensor)).tobytes())
    return digest.hexdigest()
