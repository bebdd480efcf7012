"""Mean, variance, extremes and sparsity of a tensor's elements, chunk by chunk in float64, and merged without loss.

Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979): each chunk
is centred on its own mean, so that a large mean costs the variance no digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEARLY_ZERO = 1e-8
"""An element of this magnitude or less counts as zero for the sparsity."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What is known of `count` elements. NaN and Inf go into all values that they would make so in numpy."""

    count: int
    mean: float
    m2: float
    """Sum of squared distances from the mean."""
    low: float
    high: float
    zeros: int

    @property
    def var(self) -> float:
        """The population's variance (ddof = 0)."""
        return self.m2 / self.count

    @property
    def std(self) -> float:
        return math.sqrt(self.var)

    @property
    def sparsity(self) -> float:
        """Share of elements with |x| ≤ `NEARLY_ZERO`."""
        return self.zeros / self.count


def moments(values: NDArray[Any], work: NDArray[np.float64]) -> Moments:
    """Of one chunk, of one dimension and at least one element; `work` is as long, or longer, and is overwritten."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = work[: values.size]
        np.copyto(wide, values)
        # float32 is compared as it is, which is exact and quicker; every other type as float64.
        x = values if values.dtype == np.float32 else wide
        low, high = float(x.min()), float(x.max())
        zeros = int(np.count_nonzero(x <= NEARLY_ZERO)) - int(np.count_nonzero(x < -NEARLY_ZERO))
        mean = float(wide.sum()) / wide.size
        wide -= mean
        return Moments(wide.size, mean, float(np.dot(wide, wide)), low, high, zeros)


def merge(parts: Iterable[Moments]) -> Moments | None:
    """Of all elements together; None of no parts. The result depends on the parts' order only by rounding."""
    total: Moments | None = None
    for part in parts:
        total = part if total is None else _pair(total, part)
    return total


def _pair(a: Moments, b: Moments) -> Moments:
    count = a.count + b.count
    delta = b.mean - a.mean
    return Moments(
        count,
        a.mean + delta * (b.count / count),
        a.m2 + b.m2 + delta * delta * (a.count * (b.count / count)),
        float(np.minimum(a.low, b.low)),  # of which NaN is one, as in numpy
        float(np.maximum(a.high, b.high)),
        a.zeros + b.zeros,
    )
