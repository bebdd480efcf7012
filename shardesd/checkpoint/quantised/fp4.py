"""4-bit codes in pairs, the low nibble first, times a scale for each group of a row: MXFP4 and NVFP4.

- MXFP4, W = E2M1[code] · 2**(scale − 127), groups of 32. gpt-oss keeps ``X_blocks`` (experts, rows, groups, 16) and
  ``X_scales`` (experts, rows, groups); the weight that its model multiplies by, X, is the transpose of each expert.
- NVFP4, groups of 16 with FP8 scales and one scale for the tensor: compressed-tensors divides by
  ``weight_global_scale``, ModelOpt multiplies by ``weight_scale_2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from shardesd.checkpoint.quantised.codes import E2M1, SCALES, nibbles
from shardesd.checkpoint.quantised.encoding import Encoding, Read, Undecodable, floats, part, strips
from shardesd.records import TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4(Encoding):
    """See the module."""

    codes: TensorRef
    """U8, (…, rows, columns / 2) in whatever shape."""
    scale: TensorRef
    """(…, rows, groups)."""
    factor: TensorRef | None = None
    """One number, or one for each matrix."""
    divides: bool = False
    """Whether the scales are divided by the factor."""
    transposed: bool = False
    """Whether `shape` is that of the transposes of the stored matrices."""

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return not self.transposed

    def decode(self, read: Read, matrix: int, start: int, stop: int, out: np.ndarray) -> None:
        """See `Encoding.decode`."""
        count = prod(self.shape[:-2])
        rows, columns = self.shape[:-3:-1] if self.transposed else self.shape[-2:]
        codes = part(self.codes, matrix, count, (rows, columns // 2))
        groups = self.scale.numel // count // rows
        scales = part(self.scale, matrix, count, (rows, groups))
        factor = np.float32(1)
        if self.factor is not None:
            factor = floats(read, self.factor).reshape(-1)[matrix if self.factor.numel > 1 else 0]
        first_row, last_row = (0, rows) if self.transposed else (start, stop)
        for first, last in strips(last_row - first_row, columns // 2):
            span = first_row + first, first_row + last
            scale = floats(read, scales.rows(*span))
            scale = scale / factor if self.divides else scale * factor
            values = np.empty((last - first, columns), np.float32) if self.transposed else out[first:last]
            with read(codes.rows(*span)) as raw:
                nibbles(raw, E2M1, values)
            grouped = values.reshape(last - first, groups, -1)
            grouped *= scale[:, :, None]
            if self.transposed:
                out[:, first:last] = values[:, start:stop].T


def gpt_oss(codes: TensorRef, scale: TensorRef) -> Fp4:
    """``X_blocks`` and ``X_scales``. Raises `Undecodable`."""
    if len(codes.shape) != 4 or codes.dtype != "U8" or scale.dtype != "U8" or codes.shape[:3] != scale.shape:
        raise Undecodable(
            f"its blocks are {codes.dtype} of shape {codes.shape}, its scales {scale.dtype} of shape {scale.shape}"
        )
    experts, rows, groups, size = codes.shape
    if size != 16 or not codes.numel:
        raise Undecodable(f"its blocks of shape {codes.shape} are not MXFP4's, of 16 bytes each")
    return Fp4(
        label=f"mxfp4[g{2 * size}]",
        shape=(experts, 2 * groups * size, rows),
        codes=codes,
        scale=scale,
        transposed=True,
    )


def packed(codes: TensorRef, scale: TensorRef, *, factor: TensorRef | None = None, divides: bool = False) -> Fp4:
    """MXFP4 or NVFP4, as the scales' type tells, of a matrix or a stack. Raises `Undecodable`."""
    if codes.dtype != "U8" or len(codes.shape) < 2 or codes.shape[:-1] != scale.shape[:-1] or not scale.numel:
        raise Undecodable(f"its codes are {codes.dtype} of shape {codes.shape}, its scales have {scale.shape}")
    group, rest = divmod(2 * codes.shape[-1], scale.shape[-1])
    power = scale.dtype in ("U8", "F8_E8M0")
    if rest or group != (32 if power else 16):
        raise Undecodable(f"groups of {group} codes with scales of {scale.dtype} are neither MXFP4 nor NVFP4")
    if not power and (scale.dtype not in SCALES or factor is None):
        raise Undecodable(f"NVFP4 with scales of {scale.dtype} and {'one' if factor else 'no'} scale for the tensor")
    if factor is not None and (factor.numel not in (1, prod(codes.shape[:-2])) or factor.dtype not in SCALES):
        raise Undecodable(f"its second scale is {factor.dtype} of shape {factor.shape}")
    return Fp4(
        label=f"{'mxfp4' if power else 'nvfp4'}[g{group}]",
        shape=(*codes.shape[:-1], 2 * codes.shape[-1]),
        codes=codes,
        scale=scale,
        factor=factor,
        divides=divides,
    )
