"""One code an element, times a grid of scales: FP8 and int8 of any origin.

W = (codes − zero points) · scales, each scale spread over its block of rows × columns; what a block has beyond the
weight's edge is cut off. DeepSeek's ``weight_scale_inv`` is multiplied too, whatever its name says; gptqmodel's is
what its name says, and its config says so (``weight_scale_semantics``): W = codes / scales. Scales of U8 and F8_E8M0
are powers of two, 2**(code − 127). bitsandbytes' int8 is W = codes · SCB · (1/127), row by row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shardesd.checkpoint.quantised.codes import FLOAT8, SCALES, float8_table, numbers
from shardesd.checkpoint.quantised.encoding import Encoding, Read, Undecodable, floats, part, strips
from shardesd.records import TensorRef

_USUAL_BLOCK = 128
_NAMES = {dtype: dtype.lower().replace("f8", "fp8") for dtype in FLOAT8} | {"I8": "int8", "U8": "uint8"}
CODES = frozenset(_NAMES)
"""Dtype words of the codes."""
_ZEROS = ("I8", "I32", "I64")
"""Of zero points, beside those of `SCALES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(Encoding):
    """See the module. A stack of matrices has a stack of grids, or one grid for all."""

    codes: TensorRef
    scale: TensorRef | None = None
    """(…, rows of the grid, columns of the grid); None: the codes are the weight."""
    zero: TensorRef | None = None
    """Zero points, one for each scale."""
    factor: TensorRef | None = None
    """One more scale for the whole tensor."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns that one scale holds for."""
    times: float = 1.0
    """Multiplied last."""
    divides: bool = False
    """Whether the codes are divided by the scales."""

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        count = prod(self.shape[:-2])
        codes = part(self.codes, matrix, count, self.shape[-2:])
        for first, last in strips(stop - start, codes.nbytes // self.shape[-2]):
            with read(codes.rows(start + first, start + last)) as raw:
                if codes.dtype in FLOAT8:
                    np.take(float8_table(codes.dtype), raw, out=out[first:last], mode="clip")
                else:
                    out[first:last] = raw
        if self.scale is None:
            return
        scale = self._grid(read, self.scale, matrix, start, stop)
        zero = self._grid(read, self.zero, matrix, start, stop) if self.zero is not None else None
        if self.factor is not None:
            scale *= floats(read, self.factor).reshape(-1)[0]
        self._apply(out, start, scale, zero)

    def _grid(self, read: Read, tensor: TensorRef, matrix: int, start: int, stop: int) -> np.ndarray:
        """The grid's rows that the rows `start`…`stop` need."""
        grid = _grid_shape(tensor.shape, self.shape)
        stacked = tensor.numel > prod(grid)
        one = part(tensor, matrix if stacked else 0, prod(self.shape[:-2]) if stacked else 1, grid)
        first, last = start // self.block[0], -(-stop // self.block[0])
        with read(one.rows(first, last)) as raw:
            if tensor.dtype in _ZEROS or (tensor is self.zero and tensor.dtype == "U8"):
                return raw.astype(np.float32)
            return numbers(raw, tensor.dtype)

    def _apply(self, out: np.ndarray, start: int, scale: np.ndarray, zero: np.ndarray | None) -> None:
        height, width = self.block
        columns = out.shape[1]
        for i in range(len(scale)):
            first = max(0, (start // height + i) * height - start)
            last = (start // height + i + 1) * height - start
            rows = out[first:last]
            if zero is not None:
                rows -= _spread(zero[i], width, columns)
            if self.divides:
                rows /= _spread(scale[i], width, columns)
            else:
                rows *= _spread(scale[i], width, columns)
            if self.times != 1.0:
                rows *= np.float32(self.times)


def plain(codes: TensorRef) -> Scaled:
    """FP8 that was merely cast, without scales."""
    codes = _rows(codes)
    return Scaled(label=_NAMES[codes.dtype], shape=codes.shape, codes=codes)


def scaled(
    codes: TensorRef,
    scale: TensorRef,
    *,
    zero: TensorRef | None = None,
    factor: TensorRef | None = None,
    sizes: tuple[tuple[int, int], ...] = (),
    divides: bool = False,
) -> Scaled:
    """The encoding of `codes` (2-D, or a stack) with a grid of scales; its block is one of `sizes` (as the config
    says), or found from the shapes. `divides`: W is codes / scales. Raises `Undecodable`."""
    if codes.dtype not in CODES:
        raise Undecodable(f"codes of {codes.dtype} with scales of {scale.dtype}")
    if len(codes.shape) < 2:
        raise Undecodable(f"its codes have {len(codes.shape)} dimensions")
    if scale.dtype not in SCALES:
        raise Undecodable(f"its scales are {scale.dtype}")
    if codes.dtype not in FLOAT8 and scale.dtype in ("U8", "F8_E8M0"):
        raise Undecodable(f"codes of {codes.dtype} with {scale.dtype} scales may be integers or pairs of 4-bit floats")
    if zero is not None and (zero.dtype not in (*SCALES, *_ZEROS) or zero.shape != scale.shape):
        raise Undecodable(f"its zero points are {zero.dtype} of shape {zero.shape}, its scales have {scale.shape}")
    if factor is not None and (factor.numel != 1 or factor.dtype not in SCALES):
        raise Undecodable(f"its second scale is {factor.dtype} of shape {factor.shape}")
    if len(codes.shape) > 3 and scale.numel in (1, codes.shape[0]):  # a convolution's kernel, by output channel
        scale = replace(scale, shape=(scale.numel, 1))
        zero = replace(zero, shape=scale.shape) if zero is not None else None
        codes = _rows(codes)
    # ModelOpt: (rows, 1, columns, 1)
    if len(codes.shape) == 2 and len(scale.shape) == 4 and scale.shape[1::2] == (1, 1):
        scale = replace(scale, shape=scale.shape[::2])
        zero = replace(zero, shape=scale.shape) if zero is not None else None
    if len(scale.shape) > len(codes.shape) and scale.numel > 1:
        raise Undecodable(f"its scales' shape {scale.shape} doesn't fit its codes' {codes.shape}")
    stack, (rows, columns) = prod(codes.shape[:-2]), codes.shape[-2:]
    grid = _grid_shape(scale.shape, codes.shape)
    if not codes.numel or not scale.numel or scale.numel not in (prod(grid), stack * prod(grid)):
        raise Undecodable(f"its scales' shape {scale.shape} doesn't fit its codes' {codes.shape}")
    block = _block((rows, columns), grid, sizes)
    return Scaled(
        label=f"{_NAMES[codes.dtype]}[{_block_name(block, (rows, columns), grid)}]",
        shape=codes.shape,
        codes=codes,
        scale=scale,
        zero=zero,
        factor=factor,
        block=block,
        divides=divides,
    )


def bnb_int8(codes: TensorRef, scale: TensorRef) -> Scaled:
    """bitsandbytes' LLM.int8(): ``weight`` and ``SCB``. Raises `Undecodable`."""
    if len(codes.shape) != 2 or scale.dtype != "F32" or scale.numel != codes.shape[0]:
        raise Undecodable(f"SCB is {scale.dtype} of shape {scale.shape}, the codes have {codes.shape}")
    column = replace(scale, shape=(codes.shape[0], 1))
    # 1/127 as bitsandbytes writes it (int8_vectorwise_dequant).
    return replace(scaled(codes, column), label="bnb_int8", times=7.874015718698502e-3)


def _rows(codes: TensorRef) -> TensorRef:
    """A convolution's kernel, or a vector, as a matrix, a row for each output; anything else as it is."""
    rows = codes.shape[0]
    return replace(codes, shape=(rows, codes.numel // max(1, rows))) if len(codes.shape) not in (2, 3) else codes


def _grid_shape(scale: tuple[int, ...], codes: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of one matrix's grid."""
    rows = codes[-2]
    if prod(scale) == 1 or (len(scale) < len(codes) and scale == codes[:-2]):
        return 1, 1
    if len(scale) == 1:
        return scale[0], 1
    if len(codes) > 2 and scale == (*codes[:-2], rows):
        return rows, 1
    if len(codes) > 2 and len(scale) == 1 + len(codes[:-2]):
        return 1, 1
    return scale[-2], scale[-1]


def _block(shape: tuple[int, int], grid: tuple[int, int], sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Rows and columns of a block: as the config says, else as only one block can be."""

    def fits(size: tuple[int, int]) -> bool:
        return all(-(-length // side) == count for length, count, side in zip(shape, grid, size, strict=True))

    def seen(size: tuple[int, int]) -> tuple[int, int]:
        """What of a block is there: one that is longer than the weight ends with it."""
        return min(size[0], shape[0]), min(size[1], shape[1])

    said = {seen(size): size for size in sizes if fits(size)}
    if len(said) == 1:
        return next(iter(said.values()))
    if said:
        raise Undecodable(f"its {grid} scales fit several of the config's blocks: {_listed(said.values())}")
    if all(count in (1, length) for length, count in zip(shape, grid, strict=True)):
        return shape[0] // grid[0], shape[1] // grid[1]
    usual = not sizes and fits((_USUAL_BLOCK, _USUAL_BLOCK))
    equal = 0 if shape[1] % grid[1] else shape[1] // grid[1]
    if usual and grid[0] == 1 and equal not in (0, _USUAL_BLOCK):
        raise Undecodable(f"its {grid} scales may be of blocks of {equal} or of {_USUAL_BLOCK} columns")
    if usual:
        return _USUAL_BLOCK, _USUAL_BLOCK
    if grid[0] == shape[0] and equal and all(size[0] > 1 for size in sizes):
        return 1, equal  # groups along a row are of one length
    if sizes:
        raise Undecodable(f"{grid} scales for {shape} codes are not of the config's blocks of {_listed(sizes)}")
    raise Undecodable(f"neither the config nor the shapes tell the block size of {grid} scales for {shape} codes")


def _listed(sizes: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{height}x{width}" for height, width in sizes)


def _block_name(block: tuple[int, int], shape: tuple[int, int], grid: tuple[int, int]) -> str:
    if grid == (1, 1):
        return "tensor"
    if grid == (shape[0], 1):
        return "channel"
    return f"g{block[1]}" if block[0] == 1 else f"{block[0]}x{block[1]}"


def _spread(values: np.ndarray, width: int, columns: int) -> np.ndarray:
    """One row of the grid, over the columns."""
    return values if len(values) == 1 else np.repeat(values, width)[:columns]
