"""What a scan needs of a checkpoint, whether it lies in files or is alive in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardesd.errors import NotFound
from shardesd.records import ShardRef, TensorRef

if TYPE_CHECKING:
    from shardesd.source import Source


class Shard(Protocol):
    """The tensors of one file, once its header has been checked; a context manager."""

    @property
    def ref(self) -> ShardRef: ...

    @property
    def path(self) -> Path: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        ...

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """In the order of their bytes; without those that the index places elsewhere.

        Not the parts of quantised weights, but the weights as they are when decoded (`TensorRef.encoding`), once all
        their parts are known.
        """
        ...

    @property
    def metadata(self) -> dict[str, str]: ...

    @property
    def header_sha256(self) -> str: ...

    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> AbstractContextManager[np.ndarray]:
        """The raw elements of a tensor, or of a part of one (a `TensorRef` narrowed to a byte range, in its own shape).

        A quantised weight is decoded, its parts read wherever they lie.
        An array of `tensor.shape` and of `elements.raw_dtype`; F4 and F6, whose elements are no whole bytes, come as
        flat bytes. Valid until the context ends: its memory is used again (with `into`, flat uint8 and large enough to
        be read into, until the caller uses that again). Not to be written to. With `into` the bytes may be on their way
        when this returns: the context is to be entered, once, in any case. Any number of threads
        may read at once. Raises `ShardChanged` if the file shrank or changed, `SourceError` if it can't be read,
        `MatrixError` if this tensor's elements can't be had.
        """
        ...

    @property
    def on_server(self) -> bool:
        """Whether elements come over a network when they are read, which may have to wait for it."""
        ...

    def in_blocks(self, tensor: TensorRef) -> bool:
        """Whether reading some rows of a tensor costs about that part of reading all of it."""
        ...

    def factors(self, tensor: TensorRef) -> tuple[np.ndarray, np.ndarray] | None:
        """(left, right), float64, where the matrix is their product and was never multiplied out; else None."""
        ...

    def delta(self, tensor: TensorRef) -> str | None:
        """What is done to a tensor's stored bytes when it is read: empty for nothing, or a digest that differs where it
        does (an adapter's). None where bytes elsewhere count too, so that nothing short of reading tells."""
        ...

    def close(self) -> None:
        """Let go of the file; arrays in use stay valid."""
        ...

    def __enter__(self) -> Shard: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Checkpoint(Protocol):
    """The shards of a model in reading order."""

    @property
    def source(self) -> Source: ...

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json, or {}."""
        ...

    @property
    def shards(self) -> tuple[ShardRef, ...]:
        """In natural order."""
        ...

    @property
    def names(self) -> frozenset[str] | None:
        """All tensor names, from the index and the headers read so far; None while nothing tells them all."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: files that were left out, and why. Grows as shards are opened."""
        ...

    @property
    def hints(self) -> Mapping[str, str]:
        """Tensor name → ``embedding``, ``norm``, ``conv`` or ``conv1d``, where the module tells; else {}."""
        ...

    @property
    def ties(self) -> Mapping[str, str]:
        """Name of a tensor that is another one's memory → that other one's name; {} for files."""
        ...

    @property
    def distinct(self) -> frozenset[str]:
        """Tensors that are no other one's copy, whatever their stored bytes say: an adapter changes them."""
        ...

    def close(self) -> None:
        """Let go of what was opened beside the shards."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the headers of all shards are known."""
        ...

    def tensors(self) -> tuple[TensorRef, ...]:
        """All tensors of the headers that are known, in reading order."""
        ...

    def is_needed_later(self, shard: str) -> bool:
        """Whether a quantised weight that this shard holds a part of has other parts in another shard, which may not
        be here yet: keep it open. Such a weight is in `tensors` once all its parts are known."""
        ...

    def open(self, shard: ShardRef, path: Path) -> Shard:
        """Open a shard that lies at `path`.

        Raises `MalformedHeader`, `MalformedIndex`, `ShardChanged` (its header is not what it was), `SourceError`, or
        `CheckpointError` (a tensor that another shard holds too).
        """
        ...

    def peek(self, shard: ShardRef) -> Shard | None:
        """A shard that lies on a server, opened by its header alone; None where there is no server to ask.

        Raises as `open`, and `NoRanges` where the server sends whole files only.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Plain JSON that differs where the weights do: what an unfinished run is continued by."""
        ...

    def digests(self) -> dict[str, dict[str, Any]]:
        """Shard name → ``size``, ``sha256`` (where the source knows it), ``header_sha256`` (once read), or None."""
        ...


def open_local(checkpoint: Checkpoint, shard: ShardRef, path: Path | None = None) -> Shard | None:
    """A shard whose file lies on this machine (at `path`); None where it doesn't, or has just gone.

    A file in the Hub cache goes when another scan evicts it. Raises what `Checkpoint.open` raises.
    """
    path = path or checkpoint.source.local(shard.name)
    if path is None:
        return None
    try:
        return checkpoint.open(shard, path)
    except NotFound:
        if checkpoint.source.remote(shard.name) is None:
            raise
        return None
