"""Integers packed into words, with scales and zero points for groups of inputs: GPTQ, AWQ, compressed-tensors.

- GPTQ: ``qweight`` is packed along the inputs, (inputs · bits / 32, outputs), ``qzeros`` along the outputs, (groups,
  outputs · bits / 32), the lowest bits first and across words (3 bits). W = scales[g] · (q − z) with g = ``g_idx`` of
  the input, or inputs in order; z is the stored one plus 1, unless the format is gptq_v2 (`_one_more`).
- AWQ (gemm): both are packed along the outputs, eight nibbles a word in the order 0 2 4 6 1 3 5 7; z as stored.
- compressed-tensors: ``weight_packed`` (outputs, words) along the inputs, minus 2**(bits − 1); ``weight_zero_point``
  is packed along the outputs. Older versions let no code cross a word.

GPTQ and AWQ store the transpose; the weight that comes out is outputs × inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardesd.checkpoint.quantised.codes import numbers, unpack
from shardesd.checkpoint.quantised.encoding import Encoding, Read, Undecodable, floats, strips
from shardesd.errors import MatrixError
from shardesd.records import TensorRef

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_WORDS = {"I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_LOOKED_AT = 1 << 20
"""Bytes of codes that are read to tell how they are packed."""
_COLUMNS_AT_ONCE = 256  # of a transposed store: decoded together, so that words are unpacked along rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Encoding):
    """See the module."""

    codes: TensorRef
    scale: TensorRef
    zero: TensorRef
    group_of: TensorRef | None = None
    group: int
    """Inputs of a group, but maybe the last, where there is no `group_of`."""
    bits: int
    more: bool
    """Whether zero points are stored less 1."""

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return False

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        inputs = self.shape[1]
        with read(self.codes) as words:
            for first in range(start, stop, _COLUMNS_AT_ONCE):
                last = min(stop, first + _COLUMNS_AT_ONCE)
                out[first - start : last - start] = unpack(words[:, first:last].T, self.bits, inputs)
        with read(self.zero) as words:
            if self.more:
                words = _one_more(words, self.bits)
            zero = unpack(words, self.bits, self.shape[0])[:, start:stop].astype(np.float32)
        if self.more and 8 % self.bits:
            zero = (zero + 1) % 2**self.bits
        with read(self.scale) as raw:
            scale = numbers(raw[:, start:stop], self.scale.dtype)
        groups = _groups(read, self.group_of, inputs, len(scale), self.group)
        _apply(out, scale, zero, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Encoding):
    """See the module."""

    codes: TensorRef
    scale: TensorRef
    zero: TensorRef

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return False

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        inputs = self.shape[1]
        first, last = start // 8, -(-stop // 8)
        cut = slice(start - 8 * first, stop - 8 * first)
        for row, end in strips(inputs, self.codes.nbytes // inputs):
            with read(self.codes.rows(row, end)) as words:
                out[:, row:end] = _awq(words[:, first:last])[:, cut].T
        with read(self.zero) as words:
            zero = _awq(words[:, first:last])[:, cut].astype(np.float32)
        with read(self.scale) as raw:
            scale = numbers(raw[:, start:stop], self.scale.dtype)
        _apply(out, scale, zero, _groups(read, None, inputs, len(scale)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(Encoding):
    """compressed-tensors' pack-quantized. See the module."""

    codes: TensorRef
    scale: TensorRef
    zero: TensorRef | None = None
    group_of: TensorRef | None = None
    bits: int
    dense: bool

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        outputs, inputs = self.shape
        offset = 2 ** (self.bits - 1)
        for first, last in strips(stop - start, 2 * inputs):
            with read(self.codes.rows(start + first, start + last)) as words:
                out[first:last] = unpack(words, self.bits, inputs, dense=self.dense)
        out -= np.float32(offset)
        scale = floats(read, self.scale if self.scale.numel == 1 else self.scale.rows(start, stop))
        scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
        zero = None
        if self.zero is not None:
            with read(self.zero) as words:
                if self.zero.dtype != "I32":
                    plain = words if self.zero.numel == 1 else words[start:stop]
                    zero = plain.reshape(len(plain), -1).astype(np.float32).T
                else:
                    stored = unpack(words.reshape(len(words), -1).T, self.bits, outputs, dense=self.dense)
                    zero = stored[:, start:stop].astype(np.float32) - np.float32(offset)
        groups = _groups(read, self.group_of, inputs, scale.shape[1])
        _apply(out, np.ascontiguousarray(scale.T), zero, groups)


def gptq(
    codes: TensorRef,
    scale: TensorRef,
    zero: TensorRef,
    group_of: TensorRef | None,
    *,
    v2: bool = False,
    group_size: int = 0,
) -> Gptq:
    """``qweight``, ``scales``, ``qzeros``, ``g_idx``; the bits follow from their shapes.

    `group_size`, as the config says it (0: not), tells whether the last group is shorter. Raises `Undecodable`.
    """
    words = _words(codes)
    if _words(zero) != words or len(scale.shape) != 2 or scale.dtype not in ("F16", "BF16", "F32"):
        raise Undecodable(f"its scales are {scale.dtype} of shape {scale.shape}, its zeros {zero.dtype}")
    groups, outputs = scale.shape
    bits, rest = divmod(zero.shape[1] * words, max(1, outputs))
    if not rest and bits in (5, 6, 7):  # gptqmodel's, in planes
        raise Undecodable(f"GPTQ at {bits} bits is not supported (only 2, 3, 4 and 8 are)")
    if rest or bits not in (2, 3, 4, 8) or zero.shape[0] != groups or codes.shape[1] != outputs:
        raise Undecodable(f"qweight {codes.shape}, qzeros {zero.shape} and scales {scale.shape} don't fit together")
    inputs, rest = divmod(codes.shape[0] * words, bits)
    if rest or not inputs or not groups or (group_of is not None and not _is_index(group_of, inputs)):
        raise Undecodable(f"qweight {codes.shape} and its g_idx don't fit together at {bits} bits")
    group, rest = divmod(inputs, groups)
    if group_size and -(-inputs // group_size) == groups:
        group, rest = min(group_size, inputs), 0
    if rest and group_of is None:
        raise Undecodable(f"{inputs} inputs don't divide into {groups} groups, and there is no g_idx")
    # Where the last group is shorter, only the config says how long the others are.
    name = "channel" if groups == 1 else f"{groups} groups" if rest else f"g{group}"
    return Gptq(
        label=f"gptq{bits}[{name}]",
        shape=(outputs, inputs),
        codes=codes,
        scale=scale,
        zero=zero,
        group_of=group_of,
        group=group,
        bits=bits,
        more=not v2,
    )


def awq(codes: TensorRef, scale: TensorRef, zero: TensorRef) -> Awq:
    """``qweight``, ``scales``, ``qzeros`` of the gemm kind. Raises `Undecodable`."""
    if _words(codes) != 32 or _words(zero) != 32 or len(scale.shape) != 2:
        raise Undecodable(f"its codes are {codes.dtype}, its zeros {zero.dtype}, its scales have {scale.shape}")
    groups, outputs = scale.shape
    inputs = codes.shape[0]
    if scale.dtype not in ("F16", "BF16", "F32") or not groups or not inputs or inputs % groups:
        raise Undecodable(f"its scales are {scale.dtype} of shape {scale.shape} for {inputs} inputs")
    if codes.shape[1] * 8 != outputs or zero.shape != (groups, codes.shape[1]):
        raise Undecodable(f"qweight {codes.shape}, qzeros {zero.shape} and scales {scale.shape} are not 4-bit gemm's")
    name = "channel" if groups == 1 else f"g{inputs // groups}"
    return Awq(label=f"awq4[{name}]", shape=(outputs, inputs), codes=codes, scale=scale, zero=zero)


def compressed(
    codes: TensorRef,
    scale: TensorRef,
    zero: TensorRef | None,
    group_of: TensorRef | None,
    *,
    shape: tuple[int, ...],
    bits: Iterable[int],
    read: Read,
) -> Packed:
    """``weight_packed`` and the rest; `shape` is the content of ``weight_shape``, `bits` those that the config names
    (none: any). `read` tells of a narrow weight whether its codes cross words. Raises `Undecodable`."""
    if _words(codes) != 32 or len(shape) != 2 or codes.shape[0] != shape[0] or not all(shape):
        raise Undecodable(f"its codes are {codes.dtype} of shape {codes.shape}, weight_shape says {shape}")
    outputs, inputs = shape
    words = codes.shape[1]
    widths = [count for count in sorted(set(bits) or set(range(1, 9))) if 1 <= count <= 8]
    fits = [(count, True) for count in widths if -(-inputs * count // 32) == words]
    fits += [(count, False) for count in widths if 32 % count and -(-inputs // (32 // count)) == words]
    if len(fits) == 2 and fits[0][0] == fits[1][0]:
        fits = [(fits[0][0], _crosses_words(codes, fits[0][0], read))]
    if len(fits) != 1:
        raise Undecodable(f"{words} words a row for {inputs} inputs can be read in {len(fits) or 'no'} ways")
    width, dense = fits[0]
    if scale.dtype not in ("F16", "BF16", "F32") or not (
        scale.numel == 1 or (scale.shape[0] == outputs and len(scale.shape) <= 2)
    ):
        raise Undecodable(f"its scales are {scale.dtype} of shape {scale.shape} for {outputs} outputs")
    groups = max(1, scale.numel // outputs) if scale.numel > 1 else 1
    if group_of is not None and not _is_index(group_of, inputs):
        raise Undecodable(f"weight_g_idx is {group_of.dtype} of shape {group_of.shape} for {inputs} inputs")
    if inputs % groups:
        raise Undecodable(f"{inputs} inputs don't divide into {groups} groups")
    if zero is not None:
        per = -(-outputs * width // 32) if dense else -(-outputs // (32 // width))
        # Packed along the outputs, but for the one of a whole tensor.
        kinds = [("I8", scale.shape), ("I64", scale.shape)]
        kinds += [("I32", (per, groups))] if scale.numel > 1 or outputs == 1 else []
        if (zero.dtype, zero.shape) not in kinds:
            raise Undecodable(f"its zero points are {zero.dtype} of shape {zero.shape}, its scales have {scale.shape}")
    name = "tensor" if scale.numel == 1 else "channel" if groups == 1 else f"g{inputs // groups}"
    return Packed(
        label=f"int{width}[{name}]",
        shape=(outputs, inputs),
        codes=codes,
        scale=scale,
        zero=zero,
        group_of=group_of,
        bits=width,
        dense=dense,
    )


def _words(tensor: TensorRef) -> int:
    if tensor.dtype not in _WORDS or len(tensor.shape) != 2 or not tensor.numel:
        raise Undecodable(f"'{tensor.name}' is {tensor.dtype} of shape {tensor.shape}")
    return _WORDS[tensor.dtype]


def _crosses_words(codes: TensorRef, bits: int, read: Read) -> bool:
    """Whether codes lie across words: else what is left at the top of each word, too little for a code, is never set.

    Asked only of rows so narrow that both ways take as many words.
    """
    with read(codes.rows(0, min(codes.shape[0], _LOOKED_AT // (4 * codes.shape[1]) + 1))) as words:
        return bool((np.ascontiguousarray(words).view(np.uint32) >> np.uint32(32 // bits * bits)).any())


def _is_index(tensor: TensorRef, inputs: int) -> bool:
    return tensor.shape == (inputs,) and tensor.dtype in ("I32", "I64")


def _one_more(words: np.ndarray, bits: int) -> np.ndarray:
    """Packed zero points with 1 added to each, where codes fill whole words.

    To the words, not to each code: gptqmodel takes 1 off that way, so that a 0 borrows from the code above it.
    """
    if 8 % bits:
        return words
    plain: np.ndarray = np.ascontiguousarray(words).view(f"u{words.itemsize}")
    one: np.ndarray = plain.dtype.type(sum(1 << at for at in range(0, 8 * words.itemsize, bits))) + plain
    return one


def _awq(words: np.ndarray) -> np.ndarray:
    stored = unpack(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    return stored[:, :, _AWQ_ORDER].reshape(len(words), -1)


def _groups(
    read: Read, index: TensorRef | None, inputs: int, count: int, size: int = 0
) -> list[tuple[int, slice | np.ndarray]]:
    """Each group's number and its inputs; `size` of them, where they are in order (0: an equal share)."""
    size = size or inputs // count
    in_order: list[tuple[int, slice | np.ndarray]] = [(g, slice(g * size, (g + 1) * size)) for g in range(count)]
    if index is None:
        return in_order
    with read(index) as raw:
        group_of = raw.astype(np.int64)
    if (group_of == -1).all() and inputs == size * count:  # compressed-tensors: no order of its own
        return in_order
    if not ((group_of >= 0) & (group_of < count)).all():
        raise MatrixError(f"'{index.name}' names groups from {group_of.min()} to {group_of.max()}, of {count}")
    if inputs == size * count and (group_of == np.arange(inputs) // size).all():
        return in_order
    return [(g, np.flatnonzero(group_of == g)) for g in range(count)]


def _apply(
    out: np.ndarray, scale_GN: np.ndarray, zero_GN: np.ndarray | None, groups: list[tuple[int, slice | np.ndarray]]
) -> None:
    """(out − zero) · scale, group by group of columns."""
    for g, columns in groups:
        block = out[:, columns]
        if zero_GN is not None:
            block -= zero_GN[g][:, None]
        block *= scale_GN[g][:, None]
        if not isinstance(columns, slice):
            out[:, columns] = block
