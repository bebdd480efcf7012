"""BLAS syrk by its own interface: C += XXᵀ in place, one triangle, without the interpreter's lock.

numpy's ``X @ X.T`` calls syrk too, but can't add to what is there and copies the triangle: for a Gram accumulated over
blocks that is a second n × n array and three more passes over it. scipy.linalg.blas can, but holds the lock, so that
two threads would take turns. scipy publishes the same routines for C callers (`scipy.linalg.cython_blas`); ctypes
releases the lock while it calls them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np


def syrk(X_NK: np.ndarray, gram_NN: np.ndarray, beta: float) -> None:
    """gram ← beta·gram + XXᵀ, its lower triangle. Both float64 or both float32; gram in C order, X in C or F order."""
    assert X_NK.dtype == gram_NN.dtype
    assert gram_NN.flags.c_contiguous
    n, k = X_NK.shape
    real = ctypes.c_double if X_NK.dtype == np.float64 else ctypes.c_float
    # Fortran reads a C-ordered array as its transpose, and so the lower triangle of gram as the upper one.
    if X_NK.flags.f_contiguous:
        transposed, leading = b"N", n
    else:
        assert X_NK.flags.c_contiguous
        transposed, leading = b"T", k
    before = ctypes.c_char(b"U"), ctypes.c_char(transposed), ctypes.c_int(n), ctypes.c_int(k), real(1.0)
    between = ctypes.c_int(leading), real(beta)
    _routine("dsyrk" if real is ctypes.c_double else "ssyrk")(
        *map(ctypes.addressof, before),
        X_NK.ctypes.data,
        *map(ctypes.addressof, between),
        gram_NN.ctypes.data,
        ctypes.addressof(before[2]),
    )


@cache
def _routine(name: str) -> Callable[..., None]:
    from scipy.linalg import cython_blas

    capsule = cython_blas.__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsule, name_of(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 10)(address)
