"""GGUF files: their header, their tensors as Hugging Face calls them, and their blocks dequantised by the gguf package.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here, since a hostile one keeps the
package's own reader busy for ever; block sizes, dequantisation and name maps are the package's.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, BinaryIO, NoReturn

import numpy as np

from shardesd.checkpoint.gguf_config import hf_config
from shardesd.checkpoint.gguf_names import MOST_TENSORS, hf_name, own_parts
from shardesd.checkpoint.gguf_order import Order, order_of, own_shape
from shardesd.checkpoint.header import MAX_HEADER_BYTES, Header
from shardesd.checkpoint.quantised.encoding import Encoding, Read, decoded, floats, strips
from shardesd.errors import MalformedHeader, MatrixError, NoWeights
from shardesd.records import TensorRef

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_COUNTS, _MOST_COUNTS = (4, 5, 10, 11), 1024
"""Types of numbers of which arrays hold one for each block."""
_PLAIN = {word: word for word in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}
_FLOATS = ("F32", "F16", "BF16")
"""Types whose elements can be put in another order."""
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Encoding):
    """Rows of ggml blocks; or a plain matrix that lies in another order."""

    codes: TensorRef
    """U8, (rows, bytes of a row); plain: in its own type, (rows, columns)."""
    type: str
    """ggml's name of the block type."""
    factor: TensorRef | None = None
    """F32, one more scale for all of it, or one for each matrix of a stack (NVFP4, BitNet)."""
    order: Order | None = None
    stored: tuple[int, ...] = ()
    """The shape that `order` was found for."""

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return self.order is None or self.order.by_rows

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""

        def rows(first: int, last: int, into: np.ndarray) -> None:
            self._decode(read, first, last, into)

        if self.order is not None:
            self.order.decode(rows, self.stored, start, stop, out)
        else:
            at = matrix * self.shape[-2]
            rows(at + start, at + stop, out)
        if self.factor is not None:
            factors = floats(read, self.factor).reshape(-1)
            out *= factors[matrix if len(factors) > 1 else 0]

    def _decode(self, read: Read, start: int, stop: int, out: np.ndarray) -> None:
        # A row of blocks grows up to 16 times on the way: ggml's kernels keep several copies in float32.
        for first, last in strips(stop - start, 8 * self.codes.nbytes // self.codes.shape[0]):
            with read(self.codes.rows(start + first, start + last)) as raw:
                out[first:last] = self._numbers(raw)

    def _numbers(self, raw: np.ndarray) -> np.ndarray:
        import gguf

        if self.type in ("F32", "F16"):
            return raw.astype(np.float32)
        try:
            values: np.ndarray = gguf.quants.dequantize(raw.view(np.uint8), gguf.GGMLQuantizationType[self.type])
        except NotImplementedError:
            raise MatrixError(f"gguf {_version()} can't dequantise {self.type}") from None
        return values


def read_gguf(file: BinaryIO, shard: str, known: Mapping[str, Any]) -> Header:
    """The header of an open GGUF file.

    `known` is the `Header.config` of the first file of a split set, whose others don't name their architecture. Raises
    `MalformedHeader`; `NoWeights` without the gguf package.
    """
    try:
        import gguf
    except ImportError:
        raise NoWeights(f"{file.name} is a GGUF file: pip install 'shardesd[gguf]' to read it") from None
    parser = _Parser(file)
    values, entries = parser.parse()
    config = hf_config(values) or dict(known)
    if not config and values.get("split.no"):
        parser.refuse("a part of a split set, whose first file says what model it is: name that, or their folder")
    tensors, taken = [], set[str]()
    scales = {
        name: _scale(name, shape, parser.data_start + at, shard) for name, shape, kind, at in entries if kind == 0
    }
    for name, shape, kind, offset in entries:
        where = f"tensor {name!r}"
        if prod(shape) >= 1 << 62:
            parser.refuse(f"{where}: shape {shape} has more elements than a file can hold")
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
            block, size = gguf.GGML_QUANT_SIZES[quantisation]
        except (ValueError, KeyError):  # how many bytes it takes isn't known
            problem = f"gguf {_version()} doesn't know its type {kind}"
            tensors.append(TensorRef(name=hf_name(name, config), dtype="U8", shape=shape, shard=shard, problem=problem))
            continue
        if not shape or shape[-1] % block:
            parser.refuse(f"{where}: shape {shape} doesn't divide into blocks of {block}")
        start = parser.data_start + offset
        nbytes = prod(shape) // block * size
        if start + nbytes > parser.size:
            parser.refuse(f"{where}: truncated: it ends at byte {start + nbytes} of {parser.size}: download it again")
        stored = _Stored(name, shape, quantisation.name, start, start + nbytes)
        tensor = _tensor(stored, shard, config)
        factor = scales.get(f"{name.removesuffix('.weight')}.scale") or scales.get(f"{name}.scale")
        if factor and factor.end <= parser.size:
            tensor = _with_factor(tensor, factor)
        found = list(_cut(tensor, own_parts(name, shape, config)))
        if not taken.isdisjoint(one.name for one in found):  # two of GGUF's names for one: no tensor may hide another
            found = [replace(tensor, name=name)]
        taken.update(one.name for one in found)
        tensors += found
        if len(tensors) > MOST_TENSORS:
            parser.refuse(f"more than {MOST_TENSORS} tensors, each expert counted")
    return Header(
        tensors=tuple(sorted(tensors, key=_start)),
        metadata={},
        sha256=parser.sha256,
        size=parser.size,
        config=config,
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    end: int


def _tensor(stored: _Stored, shard: str, config: Mapping[str, Any]) -> TensorRef:
    name, shape = hf_name(stored.name, config), own_shape(stored.name, stored.shape)
    plain = _PLAIN.get(stored.type)
    order = order_of(stored.name, stored.shape, config) if plain is None or plain in _FLOATS else None
    if plain is not None and order is None:
        return TensorRef(name=name, dtype=plain, shape=shape, shard=shard, start=stored.start, end=stored.end)
    rows = prod(stored.shape[:-1])
    width = stored.shape[-1] if plain else (stored.end - stored.start) // max(1, rows)
    codes = TensorRef(
        name=name, dtype=plain or "U8", shape=(rows, width), shard=shard, start=stored.start, end=stored.end
    )
    if order is not None:
        shape = order.own(stored.shape)
    encoding = Blocks(
        label=plain or stored.type.lower(),
        shape=shape if len(shape) > 1 else (1, *shape),
        quantised=plain is None,
        codes=codes,
        type=stored.type,
        order=order,
        stored=stored.shape,
    )
    return replace(decoded(encoding, name), shape=shape)


def _cut(tensor: TensorRef, parts: list[tuple[str, int]]) -> Iterator[TensorRef]:
    """The tensors that it is in the model's own checkpoints: names and rows of them."""
    if not parts or tensor.problem:
        yield tensor
        return
    columns = tensor.shape[-1]
    width, start = tensor.nbytes // prod(tensor.shape[:-1]), tensor.start
    for name, rows in parts:
        yield replace(tensor, name=name, shape=(rows, columns), start=start, end=start + rows * width)
        start += rows * width


def _scale(name: str, shape: tuple[int, ...], start: int, shard: str) -> TensorRef:
    return TensorRef(name=name, dtype="F32", shape=shape, shard=shard, start=start, end=start + 4 * prod(shape))


def _with_factor(tensor: TensorRef, factor: TensorRef) -> TensorRef:
    """A quantised weight, with its ``.scale`` beside it."""
    encoding = tensor.encoding
    if not isinstance(encoding, Blocks) or not encoding.quantised:
        return tensor
    if factor.numel not in (1, prod(encoding.shape[:-2])):
        return replace(
            tensor, encoding=None, problem=f"its scale of shape {factor.shape} fits neither it nor its parts"
        )
    return replace(tensor, encoding=replace(encoding, factor=factor))


def _start(tensor: TensorRef) -> int:
    return tensor.encoding.parts[0].start if tensor.encoding is not None else tensor.start


class _Parser:
    """Reads a header and never beyond `MAX_HEADER_BYTES`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._read = 0
        self.where = str(file.name)
        self.size = os.fstat(file.fileno()).st_size
        self.data_start = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def parse(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Metadata by key (arrays as None but for short ones of integers); name, shape, type, offset of each tensor."""
        self._file.seek(0)
        if self._bytes(4) != MAGIC:
            self.refuse("not a GGUF file")
        (version,) = self._unpack("I")
        if version not in (2, 3):
            self.refuse(f"version {version} of GGUF is not supported (2 and 3 are)")
        tensors, keys = self._unpack("QQ")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            (kind,) = self._unpack("I")
            values[key] = self._value(kind)
        entries = list(self._entries(tensors))
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            self.refuse(f"general.alignment {alignment!r} is not a power of two")
        self.data_start = -(-self._read // alignment) * alignment
        if any(offset % alignment for *_, offset in entries):
            self.refuse("a tensor's offset is not aligned")
        return values, entries

    def refuse(self, why: str) -> NoReturn:
        raise MalformedHeader(f"{self.where}: {why}")

    def _entries(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        seen = set()
        for _ in range(count):
            name = self._string()
            if name in seen:
                self.refuse(f"tensor {name!r} is there twice")
            seen.add(name)
            (dimensions,) = self._unpack("I")
            if dimensions > _MOST_DIMENSIONS:
                self.refuse(f"tensor {name!r} has {dimensions} dimensions")
            shape = self._unpack(f"{dimensions}Q")[::-1]
            kind, offset = self._unpack("IQ")
            yield name, shape, kind, offset

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 4:
            self.refuse(f"a value of type {kind}, which GGUF doesn't have, or arrays of arrays of arrays")
        inner, count = self._unpack("IQ")
        if inner in _SCALARS:
            content = self._bytes(count * struct.calcsize(f"<{_SCALARS[inner]}"))
            if inner in _COUNTS and count <= _MOST_COUNTS:
                return list(struct.unpack(f"<{count}{_SCALARS[inner]}", content))
        else:
            for _ in range(count):
                self._value(inner, depth + 1)
        return None

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._bytes(length).decode("utf-8", "backslashreplace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def _bytes(self, count: int) -> bytes:
        self._read += count
        if self._read > self.size:
            self.refuse(f"the header leads beyond the file's {self.size} bytes: download it again")
        if self._read > MAX_HEADER_BYTES:
            self.refuse(f"a header of more than {MAX_HEADER_BYTES} bytes")
        data = self._file.read(count)
        if len(data) < count:
            self.refuse("the header ends too early: download it again")
        self._digest.update(data)
        return data


def _version() -> str:
    from importlib import metadata

    return metadata.version("gguf")
