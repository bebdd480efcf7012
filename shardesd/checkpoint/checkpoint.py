"""A checkpoint in files: its shards in reading order, and one tensor of a shard at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardesd.checkpoint.elements import raw_dtype
from shardesd.checkpoint.header import DTYPE_BITS, Header, read_header
from shardesd.checkpoint.index import Index
from shardesd.checkpoint.layout import SUFFIX, find_layout, left_out
from shardesd.checkpoint.reader import Reader, unreadable
from shardesd.errors import CheckpointError, NoWeights, ShardChanged
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    from shardesd.source import Source


class StoredShard:
    """An open safetensors file whose header has been checked: a `Shard`."""

    def __init__(self, ref: ShardRef, reader: Reader, header: Header, tensors: tuple[TensorRef, ...]) -> None:
        self.ref = ref
        self.path = reader.path
        self.nbytes = header.size
        self.tensors = tensors
        self.metadata = header.metadata
        self.header_sha256 = header.sha256
        self._reader = reader

    @property
    def io(self) -> str:
        """``mmap`` or ``pread``: how tensors are read."""
        return self._reader.method

    @contextmanager
    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """See `Shard.read`."""
        bits = DTYPE_BITS[tensor.dtype]
        if tensor.numel * bits != tensor.nbytes * 8 or not 0 <= tensor.start <= tensor.end <= self.nbytes:
            raise ValueError(f"{tensor} is not a byte range of {self.ref.name}")
        with self._reader.read(tensor.start, tensor.end, into) as data:
            yield data if bits % 8 else data.view(raw_dtype(tensor.dtype)).reshape(tensor.shape)

    def in_blocks(self, tensor: TensorRef) -> bool:
        """See `Shard.in_blocks`."""
        return True

    def factors(self, tensor: TensorRef) -> None:
        """None: see `Shard.factors`."""
        return

    def close(self) -> None:
        """See `Shard.close`."""
        self._reader.close()

    def __enter__(self) -> StoredShard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_shard(ref: ShardRef, path: Path, *, io: str = "auto") -> StoredShard:
    """Open one safetensors file by itself. Raises `MalformedHeader` or `SourceError`."""
    reader, header = _open(ref, path, io)
    return StoredShard(ref, reader, header, header.tensors)


@dataclass(frozen=True, slots=True)
class _Known:
    header_sha256: str
    size: int
    modified_ns: int
    tensors: tuple[TensorRef, ...]


class StoredCheckpoint:
    """The shards of a source; made by `open_checkpoint`. A `Checkpoint`."""

    hints: Mapping[str, str] = MappingProxyType({})
    ties: Mapping[str, str] = MappingProxyType({})
    distinct: frozenset[str] = frozenset()

    def __init__(
        self,
        source: Source,
        shards: Iterable[ShardRef],
        *,
        config: dict[str, Any],
        index: Index | None,
        notes: Iterable[str],
        io: str,
    ) -> None:
        self.source = source
        self.config = config
        self.shards = tuple(shards)
        self._index = index
        self._notes = list(notes)
        self._io = io
        self._known: dict[str, _Known] = {}
        self._homes: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Checkpoint.notes`."""
        return tuple(self._notes)

    @property
    def names(self) -> frozenset[str] | None:
        """See `Checkpoint.names`."""
        if self._index is None and not self.complete:
            return None
        with self._lock:
            return frozenset(self._homes).union(self._index.weight_map if self._index else ())

    @property
    def complete(self) -> bool:
        """See `Checkpoint.complete`."""
        return len(self._known) == len(self.shards)

    def tensors(self) -> tuple[TensorRef, ...]:
        """See `Checkpoint.tensors`."""
        known = (self._known.get(shard.name) for shard in self.shards)
        return tuple(tensor for shard in known if shard for tensor in shard.tensors)

    def open(self, shard: ShardRef, path: Path) -> StoredShard:
        """See `Checkpoint.open`."""
        reader, header = _open(shard, path, self._io)
        try:
            return StoredShard(shard, reader, header, self._learn(shard, header, reader.modified_ns))
        except BaseException:
            reader.close()
            raise

    def close(self) -> None:
        """Nothing to let go of: shards are closed one by one."""

    def identity(self) -> dict[str, Any]:
        """See `Checkpoint.identity`: by the commit where there is one, else by the files' sizes and times."""
        names = [shard.name for shard in self.shards]
        if self.source.commit:
            return {"model_id": self.source.model_id, "commit": self.source.commit, "shards": names}
        known = {name: self._known[name] for name in names if name in self._known}
        files = {name: [entry.size, entry.modified_ns, entry.header_sha256] for name, entry in known.items()}
        return {"location": self.source.location, "shards": files}

    def digests(self) -> dict[str, dict[str, Any]]:
        """See `Checkpoint.digests`."""
        digests = {}
        for shard in self.shards:
            known = self._known.get(shard.name)
            digests[shard.name] = {
                "size": known.size if known else shard.size,
                "sha256": shard.sha256,
                "header_sha256": known.header_sha256 if known else None,
            }
        return digests

    def _learn(self, shard: ShardRef, header: Header, modified_ns: int) -> tuple[TensorRef, ...]:
        with self._lock:
            known = self._known.get(shard.name)
            if known:
                if (known.header_sha256, known.modified_ns) != (header.sha256, modified_ns):
                    raise ShardChanged(f"{shard.name} is another file than when the scan began: run again")
                return known.tensors
            tensors = self._index.select(shard.name, header.tensors) if self._index else header.tensors
            for tensor in tensors:
                home = self._homes.setdefault(tensor.name, shard.name)
                if home != shard.name:
                    raise CheckpointError(
                        f"tensor '{tensor.name}' is in both {home} and {shard.name}: name one file, or move one away"
                    )
            elsewhere = len(header.tensors) - len(tensors)
            if self._index and elsewhere:
                self._notes.append(
                    f"ignored {elsewhere} tensors of {shard.name} that {self._index.name} places elsewhere"
                )
            self._known[shard.name] = _Known(header.sha256, header.size, modified_ns, tensors)
            return tensors


def open_checkpoint(source: Source, *, io: str = "auto") -> StoredCheckpoint:
    """Find out what a source's checkpoint is made of, and check the headers of all its shards that are local.

    `io` is how tensors are read (`reader.Reader`). Raises `NoWeights`, `MalformedIndex`, `MalformedHeader`,
    `CheckpointError` (a tensor in two shards) or what the source raises.
    """
    files = source.files()
    by_name = {file.name: file for file in files}
    try:
        layout = find_layout(files, source.location, source.file)
    except NoWeights:
        if source.partial:  # the list is of the cache alone: what is missing there may well exist
            source.path(f"model{SUFFIX}")
        raise
    shards = list(layout.shards)
    index = None
    if layout.index:
        index = Index(layout.index, source.path(layout.index), None if source.partial else by_name)
        shards = [by_name.get(name) or ShardRef(name=name) for name in index.shards]
    config, notes = _config(source, by_name)
    notes += left_out(files, layout, shards)
    checkpoint = StoredCheckpoint(source, shards, config=config, index=index, notes=notes, io=io)
    for shard in shards:
        path = source.local(shard.name)
        if path is None and not source.location.startswith("hf://"):
            path = source.path(shard.name)  # raises the reason: a broken link, or one that leads outside
        if path is not None:
            checkpoint.open(shard, path).close()
    return checkpoint


def _open(ref: ShardRef, path: Path, io: str) -> tuple[Reader, Header]:
    reader = Reader(path, io)
    try:
        return reader, read_header(reader.file, ref.name)
    except OSError as error:
        reader.close()
        raise unreadable(path, error) from error
    except BaseException:
        reader.close()
        raise


def _config(source: Source, files: Mapping[str, ShardRef]) -> tuple[dict[str, Any], list[str]]:
    if "config.json" not in files:
        return {}, []
    path = source.path("config.json")
    try:
        value = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"ignored {path}: {error}"]
    if not isinstance(value, dict):
        return {}, [f"ignored {path}: not a JSON object"]
    return value, []
