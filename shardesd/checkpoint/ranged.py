"""A shard whose tensors are read over the network, straight into memory, and never lie on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np

from shardesd.checkpoint import quantised
from shardesd.checkpoint.elements import as_elements
from shardesd.checkpoint.header import DTYPE_BITS, Header, parse_header
from shardesd.records import ShardRef, TensorRef
from shardesd.source import Ahead, Progress, Remote, memory

_FIRST_BYTES = 32 << 10
"""Of the first request for a header: most fit, and of a larger one only the rest is asked for then."""


def remote_header(ref: ShardRef, remote: Remote) -> Header:
    """The header of a safetensors file that lies on a server; one request, or two where it is large.

    Raises `MalformedHeader`, or what `Remote.read` raises.
    """
    begun = remote.bytes(0, _FIRST_BYTES)
    assert remote.size is not None

    def read(start: int, count: int) -> bytes:
        here = begun[start : start + count]
        return here if len(here) == count else here + remote.bytes(start + len(here), start + count)

    return parse_header(read, remote.size, ref.name, ref.name)


@contextmanager
def read_remote(remote: Remote, tensor: TensorRef) -> Iterator[np.ndarray]:
    """The raw elements of a tensor of a file on a server, over one connection. Raises what `Remote.read` raises."""
    data = memory(tensor.nbytes)

    def put(at: int, piece: bytes) -> None:
        data[at - tensor.start : at - tensor.start + len(piece)] = np.frombuffer(piece, np.uint8)

    remote.read(tensor.start, tensor.end, put)
    yield _elements(data, tensor)


def _elements(data: np.ndarray, tensor: TensorRef) -> np.ndarray:
    if tensor.numel * DTYPE_BITS[tensor.dtype] != tensor.nbytes * 8:
        raise ValueError(f"{tensor} is not a range of whole elements")
    return as_elements(data, tensor)


class RangedShard:
    """A `Shard` by ranges. What is `want`ed is fetched ahead; anything else when it is read, over one connection."""

    def __init__(
        self,
        ref: ShardRef,
        remote: Remote,
        header: Header,
        tensors: tuple[TensorRef, ...],
        read_part: quantised.Read,
    ) -> None:
        """`read_part` reads a part of a quantised weight, from whichever shard."""
        self.ref = ref
        self._read_part = read_part
        self.path = Path(ref.name)
        """Stands for the file; there is none."""
        self.nbytes = header.size
        self.tensors = tensors
        self.metadata = header.metadata
        self.header_sha256 = header.sha256
        self.on_server = True
        self._remote = remote
        self._ahead: list[Ahead] = []

    def want(self, tensors: Iterable[TensorRef], *, limit: int, report: Progress | None = None) -> None:
        """Begins to fetch tensors, or parts of them, which will be read in about this order.

        One that is read several times is named as often. The parts of quantised weights are fetched when they are
        read. At most `limit` bytes are held unread.
        """
        spans = [(tensor.start, tensor.end) for tensor in tensors if tensor.nbytes and tensor.encoding is None]
        if spans:
            self._ahead.append(Ahead(self._remote, spans, limit=limit, report=report))

    @contextmanager
    def read(self, tensor: TensorRef, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """See `Shard.read`. The bytes lie in memory of their own, whether or not there is an `into`."""
        if tensor.encoding is not None:
            yield quantised.elements(tensor, self._read_part, into)
            return
        span = tensor.start, tensor.end
        found = next((found for ahead in self._ahead if (found := ahead.find(span)) is not None), None)
        if found is None:
            with read_remote(self._remote, tensor) as data:
                yield data
        else:
            with found as data:
                yield _elements(data, tensor)

    def in_blocks(self, tensor: TensorRef) -> bool:
        """False: a request for each block would take longer than one for all of them."""
        return False

    def factors(self, tensor: TensorRef) -> None:
        """None: see `Shard.factors`."""
        return

    def delta(self, tensor: TensorRef) -> str | None:
        """See `Shard.delta`."""
        return "" if tensor.encoding is None else None

    def close(self) -> None:
        """See `Shard.close`."""
        for ahead in self._ahead:
            ahead.close()

    def __enter__(self) -> RangedShard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
