"""Norms, ranks and entropy of spectra: everything that needs no power law but, at most, its α.

`eigs_BK` are the kept λ of B matrices, each row ascending. With no positive λ (an empty or an all-zero spectrum) each
of these is 0. A row's numbers are the same, bit by bit, whatever the rows beside it are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EPS_FLOAT32 = float(np.finfo(np.float32).eps)
EPS_ENTROPY = 6e-5
"""Added to every probability and to the rank in `entropies`; the value in the Model-Zoo pipeline's tables."""


def norms(eigs_BK: NDArray[np.float64]) -> list[float]:
    """Σλ: the squared Frobenius norm of what was kept."""
    sums: list[float] = eigs_BK.sum(axis=1).tolist()
    return sums


def spectral_norms(eigs_BK: NDArray[np.float64]) -> list[float]:
    """λmax: the squared largest singular value."""
    largest: list[float] = eigs_BK[:, -1].tolist() if eigs_BK.size else [0.0] * len(eigs_BK)
    return largest


def log_or_zero(value: float) -> float:
    """log10 of a positive value, else 0."""
    return math.log10(value) if value > 0 else 0.0


def matrix_ranks(eigs_BK: NDArray[np.float64], *, N: Sequence[int]) -> list[int]:
    """How many √λ exceed √λmax·N·eps, N the matrix's columns and eps float32's (1.2e-7)."""
    singular_BK = np.sqrt(np.maximum(eigs_BK, 0.0))
    least_B1 = singular_BK[:, -1:] * (np.asarray(N)[:, None] * EPS_FLOAT32)
    counts: list[int] = (singular_BK > least_B1).sum(axis=1).tolist()
    return counts


def entropies(eigs_BK: NDArray[np.float64], *, ranks: Sequence[int]) -> list[float]:
    """-Σ p ln p / ln(rank + ε), p = λ/Σλ + ε, ε = 6e-5; a negative λ counts as 0."""
    weights_BK = np.maximum(eigs_BK, 0.0)
    total_B = weights_BK.sum(axis=1)
    p_BK = weights_BK / np.where(total_B > 0, total_B, 1.0)[:, None] + EPS_ENTROPY
    sums = (p_BK * np.log(p_BK)).sum(axis=1).tolist()
    return [
        -each / math.log(rank + EPS_ENTROPY) if total > 0 else 0.0
        for each, rank, total in zip(sums, ranks, total_B.tolist(), strict=True)
    ]


def log_alpha_norms(eigs_BK: NDArray[np.float64], *, alphas: Sequence[float]) -> list[float]:
    """log10 Σλ^α over the positive λ; -1 where α ≤ 0. Holds where Σλ^α itself would overflow."""
    largest = spectral_norms(eigs_BK)
    positive_BK = eigs_BK > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        logs_BK = np.log(np.where(positive_BK, eigs_BK, 0.0))  # ln 0 = -inf, and its power 0
        relative_BK = np.exp(np.maximum(alphas, 0.0)[:, None] * (logs_BK - logs_BK[:, -1:]))
    sums = relative_BK.sum(axis=1).tolist()
    return [
        (alpha * math.log10(top) + math.log10(each) if top > 0 else 0.0) if alpha > 0 else -1.0
        for alpha, top, each in zip(alphas, largest, sums, strict=True)
    ]
