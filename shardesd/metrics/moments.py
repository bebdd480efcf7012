"""Mean, variance, extremes and sparsity of a tensor's elements, chunk by chunk in float64, and merged without loss.

Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), over
chunks. Within a chunk the sum of squares less the sum's share of it, or, where that would cancel (a mean far above the
spread), the sum of squares about the chunk's own mean: so a large mean costs the variance no digits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NEARLY_ZERO = 1e-8
"""An element of this magnitude or less counts as zero for the sparsity."""
_CANCELS = 1e-3
"""Where less than this share of the sum of squares is left, the mean is taken off first; above it, at most three of
float64's digits are lost."""
_LINE = 512
_CHUNK = 1 << 16
"""Elements in float64 at a time: they stay in the cache beside what they are made of."""
_SIGN, _INFINITE = 1 << 31, 0x7F800000
_NEARLY_ZERO_BITS = struct.unpack("<I", struct.pack("<f", NEARLY_ZERO))[0]
"""Of the largest float32 up to `NEARLY_ZERO`, which is the one nearest to it."""


class Moments(NamedTuple):
    """What is known of `size` elements. NaN and Inf go into all values that they would make so in numpy."""

    size: int
    mean: float
    m2: float
    """Sum of squared distances from the mean."""
    low: float
    high: float
    zeros: int

    @property
    def var(self) -> float:
        """The population's variance (ddof = 0)."""
        return self.m2 / self.size

    @property
    def std(self) -> float:
        return math.sqrt(self.var)

    @property
    def sparsity(self) -> float:
        """Share of elements with |x| ≤ `NEARLY_ZERO`."""
        return self.zeros / self.size


class Scratch:
    """What `moments` needs for up to `size` elements, made once and used again: one thread's at a time."""

    def __init__(self, size: int) -> None:
        self._wide = np.empty(_CHUNK)
        self._lines = self._wide.reshape(-1, _LINE)
        self._ones = np.ones(_LINE)
        self._line_sums = np.empty(size // _LINE)
        self._flags = np.empty(_CHUNK, np.bool_)

    def moments(self, values: NDArray[Any]) -> Moments:
        """Of real numbers, of one dimension and at least one element; numpy's warnings are the caller's to silence.

        Each step is one pass of numpy or BLAS over a chunk that is in the cache, or over all of the float32 numbers.
        """
        n = values.size
        total, squares = self._sums(values)
        if values.dtype == np.float32:
            low, high, some_zeros = _extremes(values)
        else:
            low, high, some_zeros = float(np.minimum.reduce(values)), float(np.maximum.reduce(values)), True
        mean = total / n
        m2 = squares - total * mean
        if not m2 > _CANCELS * squares:  # NaN, too
            m2 = sum(self._about(wide, mean) for wide in self._chunks(values))
        zeros = sum(self._zeros(wide) for wide in self._chunks(values)) if some_zeros else 0
        return Moments(n, mean, m2, low, high, zeros)

    def _chunks(self, values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
        """In float64, each valid until the next."""
        for start in range(0, values.size, _CHUNK):
            part = values[start : start + _CHUNK]
            wide = self._wide if part.size == _CHUNK else self._wide[: part.size]
            np.copyto(wide, part)
            yield wide

    def _sums(self, values: NDArray[Any]) -> tuple[float, float]:
        """Of themselves, and of their squares."""
        rest = squares = 0.0
        done = 0
        for wide in self._chunks(values):
            lines = self._lines[: wide.size // _LINE]
            np.dot(lines, self._ones, out=self._line_sums[done : done + len(lines)])  # half the time of a sum
            done += len(lines)
            if wide.size % _LINE:
                rest += float(np.add.reduce(wide[len(lines) * _LINE :]))
            squares += float(np.dot(wide, wide))
        return float(np.add.reduce(self._line_sums[:done])) + rest, squares

    def _about(self, wide: NDArray[np.float64], mean: float) -> float:
        wide -= mean
        return float(np.dot(wide, wide))

    def _zeros(self, wide: NDArray[np.float64]) -> int:
        flags = self._flags[: wide.size]
        return int(np.count_nonzero(np.less_equal(np.abs(wide, out=wide), NEARLY_ZERO, out=flags)))


def merge(parts: Iterable[Moments]) -> Moments | None:
    """Of all elements together; None of no parts. The result depends on the parts' order only by rounding."""
    each = list(parts)
    if len(each) < 2:
        return each[0] if each else None
    with np.errstate(all="ignore"):  # NaN and Inf go into what they make so
        return _merged(each)


def _merged(each: Sequence[Moments]) -> Moments:
    sizes, means, m2s, lows, highs, zeros = zip(*each, strict=True)
    size = sum(sizes)
    # About the first mean, so that a large one costs no digits.
    first = means[0] if math.isfinite(means[0]) else 0.0
    shift = np.array(means) - first
    weights = np.array(sizes, np.float64)
    mean = float(np.dot(weights, shift)) / size
    m2 = float(np.sum(m2s)) + float(np.dot(weights, (shift - mean) ** 2))
    return Moments(size, first + mean, m2, float(np.min(lows)), float(np.max(highs)), sum(zeros))


def _extremes(x: NDArray[np.float32]) -> tuple[float, float, bool]:
    """The least and the largest of float32 numbers, and whether one of them counts as zero.

    By their bits, in fewer passes than numbers would take. As unsigned integers, negative numbers are above all others
    and grow with their magnitude; as signed ones, they are below all others, and grow with it too.
    """
    unsigned, signed = x.view(np.uint32), x.view(np.int32)
    least, most = int(np.minimum.reduce(unsigned)), int(np.maximum.reduce(unsigned))
    below, above = int(np.minimum.reduce(signed)) & 0xFFFFFFFF, int(np.maximum.reduce(signed)) & 0xFFFFFFFF
    # below: the negative number of least magnitude; least: the positive one; where there is none, one of the others.
    zeros = least <= _NEARLY_ZERO_BITS or (below >= _SIGN and below - _SIGN <= _NEARLY_ZERO_BITS)
    if most > _SIGN + _INFINITE or _INFINITE < above < _SIGN:
        return math.nan, math.nan, zeros
    low = most if most >= _SIGN else least
    high = above if above < _SIGN else below
    first, last = struct.unpack("<ff", struct.pack("<II", low, high))
    return first, last, zeros
