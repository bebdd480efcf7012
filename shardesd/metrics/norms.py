"""Norms, ranks and entropy of a spectrum: everything that needs no power law but, at most, its α.

`eigs_K` are the kept λ, ascending. With no positive λ (an empty or an all-zero spectrum) each of these is 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

EPS_FLOAT32 = float(np.finfo(np.float32).eps)
EPS_ENTROPY = 6e-5
"""Added to every probability and to the rank in `entropy`; the value in the Model-Zoo pipeline's tables."""


def norm(eigs_K: NDArray[np.float64]) -> float:
    """Σλ: the squared Frobenius norm of what was kept."""
    return float(eigs_K.sum())


def spectral_norm(eigs_K: NDArray[np.float64]) -> float:
    """λmax: the squared largest singular value."""
    return float(eigs_K[-1]) if eigs_K.size else 0.0


def log_or_zero(value: float) -> float:
    """log10 of a positive value, else 0."""
    return math.log10(value) if value > 0 else 0.0


def stable_rank(eigs_K: NDArray[np.float64]) -> float:
    """Σλ/λmax."""
    largest = spectral_norm(eigs_K)
    return norm(eigs_K) / largest if largest > 0 else 0.0


def matrix_rank(eigs_K: NDArray[np.float64], *, N: int) -> int:
    """How many √λ exceed √λmax·N·eps, N the matrix's columns and eps float32's (1.2e-7)."""
    singular = np.sqrt(np.maximum(eigs_K, 0.0))
    return int(np.count_nonzero(singular > singular[-1:] * (N * EPS_FLOAT32)))


def entropy(eigs_K: NDArray[np.float64], *, rank: int) -> float:
    """-Σ p ln p / ln(rank + ε), p = λ/Σλ + ε, ε = 6e-5; a negative λ counts as 0."""
    weights = np.maximum(eigs_K, 0.0)
    total = float(weights.sum())
    if total <= 0:
        return 0.0
    p = weights / total + EPS_ENTROPY
    return float(-(p * np.log(p)).sum() / math.log(rank + EPS_ENTROPY))


def log_alpha_norm(eigs_K: NDArray[np.float64], *, alpha: float) -> float:
    """log10 Σλ^α over the positive λ; -1 where α ≤ 0. Holds where Σλ^α itself would overflow."""
    if alpha <= 0:
        return -1.0
    logs = np.log(eigs_K[eigs_K > 0])
    if logs.size == 0:
        return 0.0
    relative = float(np.exp(alpha * (logs - logs[-1])).sum())
    return float(alpha * np.log10(eigs_K[-1])) + math.log10(relative)
