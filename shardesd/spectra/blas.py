"""BLAS syrk by its own interface: C += XXᵀ in place, one triangle, without the interpreter's lock.

numpy's ``X @ X.T`` calls syrk too, but can't add to what is there and copies the triangle: for a Gram accumulated over
blocks that is a second n × n array and three more passes over it. scipy.linalg.blas can, but holds the lock, so that
two threads would take turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardesd.spectra.fortran import call, leading


def syrk(X_NK: np.ndarray, gram_NN: np.ndarray, beta: float) -> None:
    """gram ← beta·gram + XXᵀ, its lower triangle. Both float64 or both float32; gram in F order, X in C or F order."""
    assert X_NK.dtype == gram_NN.dtype
    n, k = X_NK.shape
    # Fortran reads what lies in C order as its transpose.
    transposed, given = (b"N", X_NK) if X_NK.flags.f_contiguous else (b"T", X_NK.T)
    before, after = (b"L", transposed, n, k, 1.0), (beta, gram_NN, leading(gram_NN))
    call("blas", "syrk", gram_NN.dtype, *before, given, leading(given), *after)


def empty_gram(n: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Memory for a Gram: an (n, n) view of an array in Fortran's order.

    Where its columns would lie a large power of two apart, all elements of a row compete for the same few places of
    the cache, and what reads rows (`banded`) takes a seventh longer; so they lie a cache line further apart.
    """
    apart = n + 64 // dtype.itemsize if n * dtype.itemsize % 2048 == 0 else n
    return np.empty((apart, n), dtype, order="F")[:n]
