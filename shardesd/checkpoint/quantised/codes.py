"""Codes → numbers: tables of the small floats, and integers unpacked from words."""

from __future__ import annotations

from functools import cache

import numpy as np

FLOAT8 = {
    # exponent bits, bias, whether it has infinities as IEEE has, whether -0 is the only NaN
    "F8_E4M3": (4, 7, False, False),
    "F8_E5M2": (5, 15, True, False),
    "F8_E4M3FNUZ": (4, 8, False, True),
    "F8_E5M2FNUZ": (5, 16, False, True),
}
"""https://onnx.ai/onnx/technical/float8.html"""
SCALES = frozenset({"F64", "F32", "F16", "BF16", "U8", "F8_E8M0", "F8_E4M3"})
"""Dtype words that `numbers` reads."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The sixteen 4-bit floats of MXFP4 and NVFP4 (OCP Microscaling Formats, 5.3.3)."""


@cache
def float8_table(dtype: str) -> np.ndarray:
    """The 256 numbers of an 8-bit float, float32, by code."""
    exponent_bits, bias, ieee, fnuz = FLOAT8[dtype]
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    values = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    values = np.where(codes & 0x80, -values, values)
    if fnuz:
        values[0x80] = np.nan
    elif ieee:
        top = exponent == 2**exponent_bits - 1
        values = np.where(top, np.where(mantissa == 0, np.copysign(np.inf, values), np.nan), values)
    else:
        values[[0x7F, 0xFF]] = np.nan
    return _frozen(values.astype(np.float32))


@cache
def exponent_table() -> np.ndarray:
    """The 256 powers of two of E8M0, 2**(code − 127); 255 is NaN."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return _frozen(values.astype(np.float32))


@cache
def pair_table(table: bytes, high_first: bool) -> np.ndarray:
    """Of sixteen float32 (as bytes): the two that each byte's nibbles stand for, (256,) of 8 bytes each."""
    values = np.frombuffer(table, np.float32)
    codes = np.arange(256)
    low, high = values[codes & 15], values[codes >> 4]
    pairs = np.stack((high, low) if high_first else (low, high), axis=1)
    return _frozen(np.ascontiguousarray(pairs).view(np.uint64).reshape(256))


def nibbles(codes: np.ndarray, table: np.ndarray, out: np.ndarray, *, high_first: bool = False) -> None:
    """Two numbers of `table` (16 float32) for each byte of `codes`, (rows, n), into `out`, float32 of (rows, 2n)."""
    pairs = pair_table(np.ascontiguousarray(table, np.float32).tobytes(), high_first)
    if out.flags.c_contiguous:
        np.take(pairs, codes, out=out.view(np.uint64), mode="clip")
    else:
        out[...] = np.take(pairs, codes).view(np.float32)


def numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """A copy of raw elements (`elements.raw_dtype`) of one of `SCALES` as float32."""
    if dtype == "BF16":
        wide: np.ndarray = np.left_shift(np.ascontiguousarray(raw), 16, dtype=np.uint32)
        return wide.view(np.float32)
    if dtype in ("U8", "F8_E8M0"):
        return np.take(exponent_table(), raw)
    if dtype in FLOAT8:
        return np.take(float8_table(dtype), raw)
    with np.errstate(over="ignore", invalid="ignore"):
        return raw.astype(np.float32)


def unpack(words: np.ndarray, bits: int, count: int, *, dense: bool = True) -> np.ndarray:
    """`count` integers of `bits` bits for each row of `words`, (rows, n) of little-endian integers, as uint8.

    The first integer is in the lowest bits. `dense`: one follows the other, across words too; else each word holds as
    many as fit into it.
    """
    if not dense and 8 * words.itemsize % bits:
        per = 8 * words.itemsize // bits
        plain = np.ascontiguousarray(words).view(f"u{words.itemsize}")
        out = np.empty((*plain.shape, per), np.uint8)
        for i in range(per):
            out[..., i] = (plain >> plain.dtype.type(i * bits)) & plain.dtype.type(2**bits - 1)
        return out.reshape(len(words), -1)[:, :count]
    data = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        per = 8 // bits
        out = np.empty((*data.shape, per), np.uint8)
        for i in range(per):
            np.right_shift(data, i * bits, out=out[..., i])
        out &= 2**bits - 1
        return out.reshape(len(words), -1)[:, :count]
    at = np.arange(count) * bits
    low = data[:, at // 8]
    high = data[:, np.minimum(at // 8 + 1, data.shape[1] - 1)]  # its bits are used only where there are some
    pair = low.astype(np.uint16) | high.astype(np.uint16) << 8
    pair >>= (at % 8).astype(np.uint16)
    pair &= 2**bits - 1
    return pair.astype(np.uint8)


def _frozen(table: np.ndarray) -> np.ndarray:
    table.flags.writeable = False
    return table
