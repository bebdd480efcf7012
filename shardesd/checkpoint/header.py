"""The header of a safetensors file: read, and refused where it breaks the format's rules.

A file is ``u64 little-endian length · JSON of that length · data``. The rules are those of
https://github.com/huggingface/safetensors#format; nothing that this parser accepts is refused by that library.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from shardesd.errors import MalformedHeader
from shardesd.records import TensorRef

MAX_HEADER_BYTES = 100_000_000
_U64_MAX = 2**64 - 1
_MOST_DIGITS = 1000

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of every type that safetensors 0.8 knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a shard's header says."""

    tensors: tuple[TensorRef, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    """``__metadata__``, or {}."""
    sha256: str
    """Of the length and the JSON, as they lie in the file."""
    size: int
    """Bytes of the whole file."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the file itself tells of the model, in the words of a config.json (GGUF does)."""


class _NotTheFormat(ValueError):
    """JSON that Python would take and the format doesn't."""


def read_header(file: BinaryIO, shard: str, known: Header | None = None) -> Header:
    """Parse and check the header of an open safetensors file; `shard` is the name that its `TensorRef`s carry.

    Where it still is what gave `known`, that is returned.
    Raises `MalformedHeader` naming the file, and the tensor where there is one. OSError passes through.
    """

    def read(start: int, count: int) -> bytes:
        file.seek(start)
        return file.read(count)

    return parse_header(read, os.fstat(file.fileno()).st_size, shard, str(file.name), known)


def parse_header(
    read: Callable[[int, int], bytes], size: int, shard: str, where: str, known: Header | None = None
) -> Header:
    """As `read_header`, for a file of `size` bytes of which ``read(start, count)`` gives any; `where` names it."""
    head = read(0, 8)
    if len(head) < 8:
        raise MalformedHeader(f"{where}: {size} bytes are too few for a safetensors file: download it again")
    if head == b"version " and read(8, 20).startswith(b"https://git-lfs"):
        raise MalformedHeader(f"{where}: a Git LFS pointer instead of the file itself: run `git lfs pull`")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedHeader(
            f"{where}: a header of {length} bytes (at most {MAX_HEADER_BYTES} are allowed): not a safetensors file"
        )
    if 8 + length > size:
        raise MalformedHeader(f"{where}: the header's {length} bytes lead beyond the file's {size}: download it again")
    raw = read(8, length)
    if len(raw) < length:
        raise MalformedHeader(f"{where}: the header ends after {len(raw)} of {length} bytes: download it again")
    sha256 = hashlib.sha256(head + raw).hexdigest()
    if known is not None and (known.sha256, known.size) == (sha256, size):
        return known
    entries = _parse(raw, where)
    metadata = _metadata(entries.pop("__metadata__", None), where)
    tensors = tuple(_tensor(name, entry, shard, 8 + length, where) for name, entry in entries.items())
    tensors = tuple(sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)))
    _check_coverage(tensors, 8 + length, size, where)
    return Header(tensors=tensors, metadata=metadata, sha256=sha256, size=size)


def strict_json(raw: bytes) -> Any:
    """JSON as the standard has it: no duplicate keys, no NaN, no lone surrogates. Raises ValueError with a reason."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    return value


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise MalformedHeader(f"{where}: the header is not a JSON object: not a safetensors file")
    try:
        value = strict_json(raw)
    except ValueError as error:
        raise MalformedHeader(f"{where}: the header is malformed: {error}") from None
    assert isinstance(value, dict)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _NotTheFormat(f"key '{twice}' is there twice")
    return value


def _integer(text: str) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise _NotTheFormat(f"an integer of {len(text)} digits")
    return -0.0 if text == "-0" else int(text)


def _constant(text: str) -> NoReturn:
    raise _NotTheFormat(f"{text} is not JSON")


def _metadata(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise MalformedHeader(f"{where}: __metadata__ is not an object of strings")
    return value


def _tensor(name: str, entry: Any, shard: str, data_start: int, where: str) -> TensorRef:
    def refuse(why: str) -> NoReturn:
        raise MalformedHeader(f"{where}: tensor '{name}': {why}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("its entry is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        refuse(f"dtype {json.dumps(dtype)[:60]} is not one of {', '.join(DTYPE_BITS)}")
    if not _is_naturals(shape):
        refuse(f"shape {json.dumps(shape)[:60]} is not a list of non-negative integers")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"data_offsets {json.dumps(offsets)[:60]} are not [begin, end]")
    begin, end = offsets
    numel = 1
    for length in shape:
        numel *= length
        if numel > _U64_MAX:
            refuse(f"shape {shape} is too large")
    if numel * bits != (end - begin) * 8:
        refuse(f"{end - begin} bytes are not what {dtype} of shape {shape} takes ({numel * bits / 8:.15g})")
    return TensorRef(
        name=name, dtype=dtype, shape=tuple(shape), shard=shard, start=data_start + begin, end=data_start + end
    )


def _is_naturals(value: Any) -> bool:
    # `type`, not `isinstance`: to Python, true and false are integers too.
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - a generator costs a large header half as much time again
        if type(item) is not int or not 0 <= item <= _U64_MAX:
            return False
    return True


def _check_coverage(tensors: tuple[TensorRef, ...], data_start: int, size: int, where: str) -> None:
    """The tensors' bytes must follow each other without overlap or hole, from the header's end to the file's."""
    at = data_start
    for tensor in tensors:
        if tensor.start < at:
            raise MalformedHeader(f"{where}: tensor '{tensor.name}': its bytes overlap those of another tensor")
        if tensor.start > at:
            raise MalformedHeader(
                f"{where}: tensor '{tensor.name}': {tensor.start - at} bytes before it are no tensor's"
            )
        at = tensor.end
    if at > size:
        last = tensors[-1].name
        raise MalformedHeader(
            f"{where}: truncated: the header promises {at} bytes (up to tensor '{last}'), {size} are there: "
            "download it again"
        )
    if at < size:
        raise MalformedHeader(f"{where}: {size - at} bytes are left over after the last tensor: download it again")
