"""Two checkpoints of one shape, seen as their difference: a fine-tune less its base, tensor by tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardesd.checkpoint.elements import StoredMatrix, element_word
from shardesd.checkpoint.interface import Checkpoint, Shard
from shardesd.errors import CheckpointError, MatrixError
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    from shardesd.source import Source

_FLOATS = ("F64", "F32", "F16", "BF16")


class MinusCheckpoint:
    """`one` − `other`, in float64. A `Checkpoint`; every floating-point weight of `one` must be in `other` too.

    Raises `CheckpointError` that names the first one that isn't, or that has another shape there. A weight whose
    elements can't be had there has a `TensorRef.problem`.
    """

    ties: Mapping[str, str] = {}
    distinct: frozenset[str] = frozenset()

    def __init__(self, one: Checkpoint, other: Checkpoint, is_weight: Callable[[TensorRef], bool]) -> None:
        """`is_weight`: whether a tensor of `one` is to be analysed. What isn't (a norm, a scale of inputs, rotary
        frequencies) need not be in both."""
        self.one, self.other = one, other
        self.source: Source = one.source
        self._others = {tensor.name: tensor for tensor in other.tensors()}
        self._alone: dict[str, str] = {}
        """Tensors that nothing can be subtracted from, and why."""
        self._problems: dict[str, str] = {}
        """Of the weights among them."""
        for tensor in one.tensors():
            if tensor.dtype not in _FLOATS or tensor.problem:
                continue
            twin = self._others.get(tensor.name)
            if twin is not None and (twin.problem or twin.dtype not in _FLOATS):
                reason = twin.problem or f"elements of {twin.dtype} can't be subtracted"
                why = f"in {other.source.model_id}: {reason}"
                if is_weight(tensor):
                    self._problems[tensor.name] = why
            elif twin is None or twin.shape != tensor.shape:
                has = "has no such tensor" if twin is None else f"has it as {list(twin.shape)}"
                why = f"{other.source.model_id} {has}"
                if is_weight(tensor):
                    raise CheckpointError(
                        f"tensor '{tensor.name}' of {one.source.model_id} is {list(tensor.shape)}, but "
                        f"{why}: --minus needs two checkpoints of one shape"
                    )
            else:
                continue
            self._alone[tensor.name] = why
        self._lock = threading.Lock()
        self._opened: dict[str, Shard] = {}

    @property
    def config(self) -> dict[str, Any]:
        """The first's."""
        return self.one.config

    @property
    def shards(self) -> tuple[ShardRef, ...]:
        """The first's."""
        return self.one.shards

    @property
    def names(self) -> frozenset[str] | None:
        """The first's."""
        return self.one.names

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of both."""
        return self.one.notes + self.other.notes

    @property
    def hints(self) -> Mapping[str, str]:
        """The first's."""
        return self.one.hints

    @property
    def complete(self) -> bool:
        """The first's."""
        return self.one.complete

    def tensors(self) -> tuple[TensorRef, ...]:
        """The first's."""
        return self._judged(self.one.tensors())

    def open(self, shard: ShardRef, path: Path) -> MinusShard:
        """See `Checkpoint.open`."""
        return MinusShard(self.one.open(shard, path), self)

    def peek(self, shard: ShardRef) -> None:
        """See `Checkpoint.peek`: both checkpoints are read from files."""

    def is_needed_later(self, shard: str) -> bool:
        """See `Checkpoint.is_needed_later`."""
        return self.one.is_needed_later(shard)

    def identity(self) -> dict[str, Any]:
        """See `Checkpoint.identity`."""
        return {"one": self.one.identity(), "minus": self.other.identity()}

    def digests(self) -> dict[str, dict[str, Any]]:
        """See `Checkpoint.digests`."""
        others = {f"minus {name}": digest for name, digest in self.other.digests().items()}
        return {**self.one.digests(), **others}

    def close(self) -> None:
        """Let go of the second checkpoint's files."""
        with self._lock:
            for shard in self._opened.values():
                shard.close()
            self._opened.clear()

    def _judged(self, tensors: tuple[TensorRef, ...]) -> tuple[TensorRef, ...]:
        """Tensors of the first, those with their problem that can't be read in the second."""
        if not self._problems:
            return tensors
        return tuple(replace(t, problem=self._problems[t.name]) if t.name in self._problems else t for t in tensors)

    def _other(self, name: str) -> tuple[TensorRef, Shard]:
        if name in self._alone:
            raise MatrixError(self._alone[name])
        tensor = self._others[name]
        with self._lock:
            if tensor.shard not in self._opened:
                ref = next(shard for shard in self.other.shards if shard.name == tensor.shard)
                self._opened[tensor.shard] = self.other.open(ref, self.other.source.path(tensor.shard))
            return tensor, self._opened[tensor.shard]


class MinusShard:
    """A shard of the first checkpoint whose tensors come with the second's subtracted. A `Shard`."""

    def __init__(self, one: Shard, checkpoint: MinusCheckpoint) -> None:
        self._one = one
        self._checkpoint = checkpoint
        self.ref, self.path, self.nbytes = one.ref, one.path, one.nbytes
        self.tensors, self.metadata = checkpoint._judged(one.tensors), one.metadata
        self.header_sha256 = one.header_sha256
        self.on_server = one.on_server

    @contextmanager
    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """See `Shard.read`; floating-point tensors come as float64."""
        if tensor.dtype not in _FLOATS:
            with self._one.read(tensor, into) as raw:
                yield raw
            return
        twin, shard = self._checkpoint._other(tensor.name)
        mine = next(own for own in self.tensors if own.name == tensor.name)
        first = (tensor.start - mine.start) * twin.nbytes // max(1, mine.nbytes)
        size = tensor.nbytes * twin.nbytes // max(1, mine.nbytes)
        part = twin.part(tensor.shape, twin.start + first, twin.start + first + size)
        with self._one.read(tensor) as raw:
            difference = _numbers(raw, tensor.dtype)
        with shard.read(part) as raw:
            difference -= _numbers(raw, twin.dtype)
        yield difference

    def in_blocks(self, tensor: TensorRef) -> bool:
        """See `Shard.in_blocks`."""
        return self._one.in_blocks(tensor)

    def delta(self, tensor: TensorRef) -> str | None:
        """See `Shard.delta`: two files tell."""
        return None if tensor.dtype in _FLOATS else self._one.delta(tensor)

    def factors(self, tensor: TensorRef) -> None:
        """None: a difference of two full tensors has no thin factors."""
        return

    def close(self) -> None:
        """See `Shard.close`."""
        self._one.close()

    def __enter__(self) -> MinusShard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    flat = StoredMatrix(raw.reshape(1, -1), element_word(raw, dtype))
    return flat.block(0, 0, 1, np.dtype(np.float64)).reshape(raw.shape)
