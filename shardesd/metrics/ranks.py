"""Ranks that a spectrum shows, whatever the thresholds of the other metrics are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RELATIVE = 1e-6
"""A singular value counts towards the rank when it exceeds this share of the largest one."""
ENERGY = 0.9


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of one matrix, or summed over several."""

    actual: int
    """How many σ exceed 1e-6·σmax."""
    svd_90: int
    """The least k for which the k largest σ² make up 90 % of their sum."""


def ranks(eigs_BN: ArrayLike) -> list[Ranks]:
    """Of all λ = σ² of matrices of one size, each row ascending; the largest is positive."""
    descending = np.asarray(eigs_BN, np.float64)[:, ::-1]
    energy = np.cumsum(descending, axis=1)
    size = descending.shape[1]
    actual = (np.sqrt(descending) > RELATIVE * np.sqrt(descending[:, :1])).sum(axis=1)
    below = (energy < ENERGY * energy[:, -1:]).sum(axis=1)
    return [Ranks(one, min(k + 1, size)) for one, k in zip(actual.tolist(), below.tolist(), strict=True)]
