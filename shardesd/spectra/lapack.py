"""Eigenvalues by scipy's own LAPACK (OpenBLAS), where that is faster than torch's (MKL).

MKL is made for Intel's processors. On an AMD EPYC (Zen 4), one core, float64, OpenBLAS takes 0.68 of its time at
n = 384, 0.57 at 1024 and 0.88 at 2048. Above, MKL is faster there, too; below 200 by some microseconds, which don't
make up for the second that torch takes to import (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import numpy as np

from shardesd.spectra.fortran import routine

_LARGEST_N = 2048


def faster(n: int) -> bool:
    """Whether `eigvalsh` is faster than torch's on this machine. By rule, not by measuring: λ depend on the answer by
    rounding, and should not from run to run."""
    return n <= _LARGEST_N and _on_amd()


def eigvalsh(gram_NN: np.ndarray) -> np.ndarray | None:
    """Ascending eigenvalues (n,) of a symmetric matrix, in its dtype; None where they don't converge.

    gram_NN: float64 or float32 in F order. Its lower triangle is read, and it is overwritten: no second one is needed.
    """
    assert gram_NN.flags.f_contiguous
    name = {"float64": "dsyevd", "float32": "ssyevd"}[gram_NN.dtype.name]
    n = gram_NN.shape[0]
    eigs_N = np.empty(n, gram_NN.dtype)
    values, triangle, order = ctypes.c_char(b"N"), ctypes.c_char(b"L"), ctypes.c_int(n)
    integers, integers_size, info = ctypes.c_int(), ctypes.c_int(1), ctypes.c_int()
    address = ctypes.addressof

    def call(work: np.ndarray, size: int) -> None:
        work_size = ctypes.c_int(size)
        routine("cython_lapack", name, 11)(
            *(address(values), address(triangle), address(order), gram_NN.ctypes.data, address(order)),
            *(eigs_N.ctypes.data, work.ctypes.data, address(work_size)),
            *(address(integers), address(integers_size), address(info)),
        )

    wanted = np.empty(1, gram_NN.dtype)
    call(wanted, -1)
    size = int(wanted[0]) + 1  # as a float32 it may be rounded down
    call(np.empty(size, gram_NN.dtype), size)
    return None if info.value else eigs_N


@cache
def _on_amd() -> bool:
    return "AuthenticAMD" in _processor()


def _processor() -> str:
    """What the system says of it, its maker's name included."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # not Linux
        return platform.processor()
