"""A checkpoint in files: its shards in reading order, and one tensor of a shard at a time."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from shardesd.checkpoint import quantised
from shardesd.checkpoint.elements import as_elements
from shardesd.checkpoint.gguf import read_gguf
from shardesd.checkpoint.header import DTYPE_BITS, Header, read_header
from shardesd.checkpoint.index import Index
from shardesd.checkpoint.interface import open_local
from shardesd.checkpoint.layout import PICKLED, SUFFIX, find_layout, left_out
from shardesd.checkpoint.pickled import read_pickled
from shardesd.checkpoint.ranged import RangedShard, read_remote, remote_header
from shardesd.checkpoint.reader import Reader, unreadable
from shardesd.errors import CheckpointError, NoWeights, ShardChanged
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    from shardesd.source import Remote, Source


_ANOTHER_FILE = "{} is another file than when the scan began: run again"


class StoredShard:
    """An open safetensors file whose header has been checked: a `Shard`."""

    def __init__(
        self,
        ref: ShardRef,
        reader: Reader,
        header: Header,
        tensors: tuple[TensorRef, ...],
        elsewhere: quantised.Read | None = None,
    ) -> None:
        """`elsewhere` reads a part of a quantised weight that another shard holds."""
        self.ref = ref
        self.path = reader.path
        self.nbytes = header.size
        self.tensors = tensors
        self.metadata = header.metadata
        self.header_sha256 = header.sha256
        self.on_server = False
        self._reader = reader
        self._elsewhere = elsewhere

    @property
    def io(self) -> str:
        """``mmap`` or ``pread``: how tensors are read."""
        return self._reader.method

    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> AbstractContextManager[np.ndarray]:
        """See `Shard.read`."""
        if tensor.encoding is not None:
            return self._decoded(tensor, into)
        return _read(self._reader, tensor, self.nbytes, into)

    @contextmanager
    def _decoded(self, tensor: TensorRef, into: np.ndarray | None) -> Iterator[np.ndarray]:
        yield quantised.elements(tensor, self._read_part, into)

    def _read_part(self, tensor: TensorRef) -> AbstractContextManager[np.ndarray]:
        if tensor.shard == self.ref.name or self._elsewhere is None:
            return self.read(tensor)
        return self._elsewhere(tensor)

    def in_blocks(self, tensor: TensorRef) -> bool:
        """See `Shard.in_blocks`."""
        return tensor.encoding is None or quantised.by_rows(tensor)

    def factors(self, tensor: TensorRef) -> None:
        """None: see `Shard.factors`."""
        return

    def delta(self, tensor: TensorRef) -> str | None:
        """See `Shard.delta`."""
        return "" if tensor.encoding is None else None

    def close(self) -> None:
        """See `Shard.close`."""
        self._reader.close()

    def __enter__(self) -> StoredShard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_shard(ref: ShardRef, path: Path, *, io: str = "auto") -> StoredShard:
    """Open one safetensors file by itself. Raises `MalformedHeader` or `SourceError`."""
    reader, header = _open(ref, path, io, {})
    return StoredShard(ref, reader, header, header.tensors)


@dataclass(frozen=True, slots=True)
class _Known:
    header: Header
    """Parsed once: a shard is opened to be checked, and again to be read."""
    modified_ns: int | None
    """None for a file on a server."""
    path: Path | None
    """None while it is only there."""


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
        self._named = 0
        """Stored tensors that `_names` was made from."""
        self._names: frozenset[str] = frozenset()
        self._described: dict[str, Any] = {}
        """What a shard itself told of the model."""
        self._modules = quantised.Modules(config)
        self._weights: dict[str, list[TensorRef]] = {}
        self._readers: WeakValueDictionary[str, Reader] = WeakValueDictionary()
        self._remotes: dict[str, Remote] = {}
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
            stored = self._homes.keys() | (self._index.weight_map.keys() if self._index else ())
            if len(stored) != self._named:
                self._named, self._names = len(stored), quantised.weight_names(stored)
            return self._names

    @property
    def complete(self) -> bool:
        """See `Checkpoint.complete`."""
        return len(self._known) == len(self.shards)

    def tensors(self) -> tuple[TensorRef, ...]:
        """See `Checkpoint.tensors`."""
        with self._lock:
            return tuple(tensor for shard in self.shards for tensor in self._weights.get(shard.name, ()))

    def is_needed_later(self, shard: str) -> bool:
        """See `Checkpoint.is_needed_later`."""
        return self._modules.is_needed_later(shard)

    def open(self, shard: ShardRef, path: Path) -> StoredShard:
        """See `Checkpoint.open`."""
        known = self._known.get(shard.name)
        reader, header = _open(shard, path, self._io, self._described, known.header if known else None)
        try:
            with self._lock:
                self._readers[shard.name] = reader
                tensors = self._learn(shard, header, reader.modified_ns, reader.path)
            return StoredShard(shard, reader, header, tensors, self._read_part)
        except BaseException:
            reader.close()
            raise

    def peek(self, shard: ShardRef) -> RangedShard | None:
        """See `Checkpoint.peek`; safetensors only."""
        remote = self.source.remote(shard.name) if shard.name.endswith(SUFFIX) else None
        if remote is None:
            return None
        header = remote_header(shard, remote)
        with self._lock:
            self._remotes[shard.name] = remote
            tensors = self._learn(shard, header, None, None)
        return RangedShard(shard, remote, header, tensors, self._read_part)

    def close(self) -> None:
        """Nothing to let go of: shards are closed one by one."""

    def identity(self) -> dict[str, Any]:
        """See `Checkpoint.identity`: by the commit where there is one, else by the files' sizes and times."""
        names = [shard.name for shard in self.shards]
        if self.source.commit:
            return {"model_id": self.source.model_id, "commit": self.source.commit, "shards": names}
        # Not by the place that was named: a folder and its only file are the same weights.
        known = [self._known[name] for name in names if name in self._known]
        files = {
            os.path.realpath(one.path): [one.header.size, one.modified_ns, one.header.sha256]
            for one in known
            if one.path
        }
        return {"shards": files}

    def digests(self) -> dict[str, dict[str, Any]]:
        """See `Checkpoint.digests`."""
        digests = {}
        for shard in self.shards:
            known = self._known.get(shard.name)
            digests[shard.name] = {
                "size": known.header.size if known else shard.size,
                "sha256": shard.sha256,
                "header_sha256": known.header.sha256 if known else None,
            }
        return digests

    def _learn(
        self, shard: ShardRef, header: Header, modified_ns: int | None, path: Path | None
    ) -> tuple[TensorRef, ...]:
        """Under the lock: the tensors of a shard's header, now that it is known; no time or path if on a server."""
        known = self._known.get(shard.name)
        if known:
            times = {known.modified_ns, modified_ns} - {None}
            # What another scan has evicted is downloaded anew: another time, the same commit.
            if known.header.sha256 != header.sha256 or (len(times) > 1 and self.source.remote(shard.name) is None):
                raise ShardChanged(_ANOTHER_FILE.format(shard.name))
            if known.path is None or len(times) > 1:
                self._known[shard.name] = replace(known, modified_ns=modified_ns, path=path)
            return tuple(self._weights.get(shard.name, ()))
        tensors = self._index.select(shard.name, header.tensors) if self._index else header.tensors
        for tensor in tensors:
            home = self._homes.setdefault(tensor.name, shard.name)
            if home != shard.name:
                raise CheckpointError(
                    f"tensor '{tensor.name}' is in both {home} and {shard.name}: name one file, or move one away"
                )
        self._known[shard.name] = _Known(header, modified_ns, path)
        promised = self._index.weight_map if self._index else None
        try:
            found = self._modules.learn(
                tensors, self._read_part, promised=promised, complete=self.complete, metadata=header.metadata
            )
        except BaseException:  # a part that tells how others lie could not be read: the next one to open it learns it
            del self._known[shard.name]
            raise
        elsewhere = len(header.tensors) - len(tensors)
        if self._index and elsewhere:
            self._notes.append(f"ignored {elsewhere} tensors of {shard.name} that {self._index.name} places elsewhere")
        self._described = header.config or self._described
        self.config = self.config or self._described
        for tensor in found:
            self._weights.setdefault(tensor.shard, []).append(tensor)
        for name in {tensor.shard for tensor in found}:
            self._weights[name].sort(key=_place)
        return tuple(self._weights.get(shard.name, ()))

    def _remote(self, shard: str) -> Remote:
        remote = self._remotes.get(shard) or self.source.remote(shard)
        if remote is None:
            raise ShardChanged(f"{shard} is no longer there: run again")
        return remote

    @contextmanager
    def _read_part(self, tensor: TensorRef) -> Iterator[np.ndarray]:
        """Part of a quantised weight, from any shard: one that is open, is opened once more, or lies on a server."""
        known = self._known[tensor.shard]
        with ExitStack() as stack:
            reader = self._readers.get(tensor.shard)
            if reader is None or reader.closed:
                if known.path is None or not known.path.exists():
                    yield stack.enter_context(read_remote(self._remote(tensor.shard), tensor))
                    return
                reader = stack.enter_context(Reader(known.path, self._io))
                if reader.modified_ns != known.modified_ns:
                    raise ShardChanged(_ANOTHER_FILE.format(tensor.shard))
            yield stack.enter_context(_read(reader, tensor, known.header.size))


def open_checkpoint(source: Source, *, io: str = "auto", allow_pickle: bool = False) -> StoredCheckpoint:
    """Find out what a source's checkpoint is made of, and check the headers of all its shards that are local.

    `io` is how tensors are read (`reader.Reader`); PyTorch's pickled files are read only with `allow_pickle`. Raises
    `NoWeights`, `MalformedIndex`, `MalformedHeader`,
    `CheckpointError` (a tensor in two shards) or what the source raises.
    """
    files = source.files()
    by_name = {file.name: file for file in files}
    try:
        layout = find_layout(files, source.location, source.file, allow_pickle=allow_pickle)
    except NoWeights as error:
        if source.partial:  # the list is of the cache alone: what is missing there may well exist
            source.path(f"model{SUFFIX}")
        if os.path.isdir(os.path.join(source.location, f"model{SUFFIX}")):
            raise NoWeights(f"{error} (model{SUFFIX} in it is a folder, not a file)") from None
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
        here = open_local(checkpoint, shard)
        if here is None and not source.location.startswith("hf://"):
            here = checkpoint.open(shard, source.path(shard.name))  # raises: a broken link, or one that leads outside
        if here is not None:
            here.close()
    return checkpoint


def _place(tensor: TensorRef) -> int:
    """Where its bytes begin in its shard."""
    return tensor.start if tensor.encoding is None else tensor.encoding.parts[0].start


def _read(
    reader: Reader, tensor: TensorRef, size: int, into: np.ndarray | None = None
) -> AbstractContextManager[np.ndarray]:
    if tensor.numel * DTYPE_BITS[tensor.dtype] != tensor.nbytes * 8 or not 0 <= tensor.start <= tensor.end <= size:
        raise ValueError(f"{tensor} is not a byte range of {reader.path}")
    return _elements(reader.read(tensor.start, tensor.end, into), tensor)


@contextmanager
def _elements(reading: AbstractContextManager[np.ndarray], tensor: TensorRef) -> Iterator[np.ndarray]:
    with reading as data:
        yield as_elements(data, tensor)


def _open(
    ref: ShardRef, path: Path, io: str, described: Mapping[str, Any], known: Header | None = None
) -> tuple[Reader, Header]:
    reader = Reader(path, io)
    try:
        if ref.name.endswith(".gguf"):
            return reader, read_gguf(reader.file, ref.name, described)
        if ref.name.endswith(PICKLED):
            return reader, read_pickled(reader.file, ref.name)
        return reader, read_header(reader.file, ref.name, known)
    except OSError as error:
        reader.close()
        raise unreadable(path, error) from error
    except BaseException:
        reader.close()
        raise


def _config(source: Source, files: Mapping[str, ShardRef]) -> tuple[dict[str, Any], list[str]]:
    """config.json; where it says nothing of quantisation, gptqmodel's own file says it."""
    config, notes = _json(source, files, "config.json")
    if "quantization_config" in config:
        return config, notes
    own, more = _json(source, files, "quantize_config.json")
    return (config | {"quantization_config": own} if own else config), notes + more


def _json(source: Source, files: Mapping[str, ShardRef], name: str) -> tuple[dict[str, Any], list[str]]:
    if name not in files:
        return {}, []
    path = source.path(name)
    try:
        value = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"ignored {path}: {error}"]
    if not isinstance(value, dict):
        return {}, [f"ignored {path}: not a JSON object"]
    return value, []
