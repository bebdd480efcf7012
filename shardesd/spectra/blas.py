"""BLAS syrk by its own interface: C += XXᵀ in place, one triangle, without the interpreter's lock.

numpy's ``X @ X.T`` calls syrk too, but can't add to what is there and copies the triangle: for a Gram accumulated over
blocks that is a second n × n array and three more passes over it. scipy.linalg.blas can, but holds the lock, so that
two threads would take turns.
"""

from __future__ import annotations

import ctypes

import numpy as np

from shardesd.spectra.fortran import routine


def syrk(X_NK: np.ndarray, gram_NN: np.ndarray, beta: float) -> None:
    """gram ← beta·gram + XXᵀ, its lower triangle. Both float64 or both float32; gram in F order, X in C or F order."""
    assert X_NK.dtype == gram_NN.dtype
    assert gram_NN.flags.f_contiguous
    n, k = X_NK.shape
    real = ctypes.c_double if X_NK.dtype == np.float64 else ctypes.c_float
    if X_NK.flags.f_contiguous:
        transposed, leading = b"N", n
    else:
        assert X_NK.flags.c_contiguous  # which Fortran reads as its transpose
        transposed, leading = b"T", k
    before = ctypes.c_char(b"L"), ctypes.c_char(transposed), ctypes.c_int(n), ctypes.c_int(k), real(1.0)
    between = ctypes.c_int(leading), real(beta)
    routine("cython_blas", "dsyrk" if real is ctypes.c_double else "ssyrk", 10)(
        *map(ctypes.addressof, before),
        X_NK.ctypes.data,
        *map(ctypes.addressof, between),
        gram_NN.ctypes.data,
        ctypes.addressof(before[2]),
    )
