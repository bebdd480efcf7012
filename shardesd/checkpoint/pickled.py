"""PyTorch's own files, ``.bin`` and ``.pt``: which tensors one holds, and where their bytes lie.

Such a file is a zip archive, uncompressed, with a pickle and a record for each storage. torch unpickles it with
``weights_only=True``, which makes tensors and plain containers and runs nothing else, and onto the meta device, so that
no storage is read. From there on the bytes are read as those of any other file are. The older format, one pickle
without an archive, can't be read lazily and is refused.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from shardesd.checkpoint.elements import TORCH_WORDS, raw_dtype
from shardesd.checkpoint.header import Header
from shardesd.checkpoint.quantised.codes import numbers
from shardesd.checkpoint.quantised.encoding import Encoding, Read, decoded
from shardesd.errors import MalformedHeader
from shardesd.records import TensorRef

if TYPE_CHECKING:
    import torch

_INNER = ("state_dict", "model_state_dict", "model", "module", "params")
"""Where a training script's checkpoint may keep the weights."""
_MOST_SPREAD = 4
"""A view may span this many times the bytes of its own elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided(Encoding):
    """Elements that lie in another order than the tensor's own."""

    elements: TensorRef
    """From the first to the last, one dimension."""
    strides: tuple[int, ...]
    """Of `view`, in elements."""
    view: tuple[int, ...]
    """The tensor's shape."""

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return False

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        with read(self.elements) as raw:
            steps = [stride * raw.itemsize for stride in self.strides]
            view = np.lib.stride_tricks.as_strided(raw, self.view, steps, writeable=False)
            rows = view.reshape(self.shape)[start:stop]  # one copy, in the type that is stored
            out[...] = numbers(rows, self.elements.dtype)


def read_pickled(file: BinaryIO, shard: str) -> Header:
    """The tensors of an open PyTorch file. Raises `MalformedHeader`."""
    where = str(file.name)
    size = os.fstat(file.fileno()).st_size
    records = _records(file, where)
    state = _unpickle(where)
    stored = []
    for name, value in state.items():
        if (what := _strange(value)) is not None:
            stored.append(_unreadable(name, value, shard, what))
            continue
        offset = getattr(value.untyped_storage(), "_checkpoint_offset", None)
        if offset is None:
            raise MalformedHeader(f"{where}: PyTorch 2.7 or later is needed to read it without loading it")
        if offset not in records or records[offset] < value.untyped_storage().nbytes():
            raise MalformedHeader(f"{where}: tensor '{name}': no record of the archive holds its elements")
        stored.append(_tensor(name, value, shard, offset, offset + records[offset], where))
    digest = hashlib.sha256(f"{sorted(records.items())}{stored}".encode())
    tensors = tuple(sorted(stored, key=lambda tensor: (tensor.start, tensor.name)))
    return Header(tensors=tensors, metadata={}, sha256=digest.hexdigest(), size=size)


def _records(file: BinaryIO, where: str) -> dict[int, int]:
    """Where each record's content begins → its bytes."""
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise MalformedHeader(
            f"{where}: not a zip archive: from before PyTorch 1.6 (load it and save it anew), or not PyTorch's"
        )
    found = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise MalformedHeader(f"{where}: its record '{entry.filename}' is compressed")
                if entry.filename.rpartition("/")[2] == "byteorder" and archive.read(entry) != b"little":
                    raise MalformedHeader(f"{where}: its elements are big-endian")
                file.seek(entry.header_offset)
                local = file.read(30)
                length = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
                found[entry.header_offset + 30 + length] = entry.file_size
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise MalformedHeader(f"{where}: a malformed archive ({error}): download it again") from None
    return found


def _unpickle(where: str) -> Mapping[str, torch.Tensor]:
    import torch

    try:
        content: Any = torch.load(where, map_location="meta", weights_only=True)
    except Exception as error:  # whatever a hostile pickle makes torch's own reader raise
        reason = " ".join(str(error).split())[:200]
        raise MalformedHeader(f"{where}: torch.load(weights_only=True) refuses it: {reason}") from None
    for candidate in _candidates(content):
        state = {
            name: value
            for name, value in candidate.items()
            if isinstance(name, str) and isinstance(value, torch.Tensor)
        }
        if state:
            return state
    raise MalformedHeader(f"{where}: it holds no named tensors, at the top or under {', '.join(_INNER)}")


def _candidates(content: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(content, Mapping):
        yield content
        for key in _INNER:
            if isinstance(content.get(key), Mapping):
                yield content[key]


def _strange(value: torch.Tensor) -> str | None:
    """What a tensor is that isn't its storage's elements; None for one that is."""
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"tensors of class {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"{value.layout} tensors"
    return "views with the sign turned" if value.is_neg() else None


def _unreadable(name: str, value: torch.Tensor, shard: str, what: str) -> TensorRef:
    word = str(value.dtype).removeprefix("torch.")
    dtype = TORCH_WORDS.get(word, word.upper())
    return TensorRef(name=name, dtype=dtype, shape=tuple(value.shape), shard=shard, problem=f"{what} can't be read")


def _tensor(name: str, value: torch.Tensor, shard: str, start: int, end: int, where: str) -> TensorRef:
    word = str(value.dtype).removeprefix("torch.")
    if value.is_quantized or word not in TORCH_WORDS:
        return _unreadable(name, value, shard, f"elements of {value.dtype}")
    dtype, size, shape = TORCH_WORDS[word], value.element_size(), tuple(value.shape)
    unreadable = TensorRef(name=name, dtype=dtype, shape=shape, shard=shard, start=start, end=start)
    first = start + int(value.storage_offset()) * size
    strides = tuple(int(stride) for stride in value.stride())
    span = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) if value.numel() else 0
    if first + span * size > end:
        raise MalformedHeader(
            f"{where}: tensor '{name}' of shape {shape} leads beyond its record's {end - start} bytes"
        )
    if value.is_contiguous():
        return replace(unreadable, start=first, end=first + value.numel() * size)
    if dtype not in ("F32", "F16", "BF16") or span > _MOST_SPREAD * value.numel() or not value.numel():
        return replace(
            unreadable, problem=f"a view of {dtype} with strides {strides} can't be read: save it contiguous"
        )
    elements = replace(unreadable, shape=(span,), start=first, end=first + span * raw_dtype(dtype).itemsize)
    rows = (value.numel() // shape[-1], shape[-1])
    encoding = Strided(label=dtype, shape=rows, quantised=False, elements=elements, strides=strides, view=shape)
    return replace(decoded(encoding, name), shape=shape)
