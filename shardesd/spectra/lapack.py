"""Eigenvalues by scipy's own LAPACK (OpenBLAS), where that is faster than torch's (MKL).

MKL is made for Intel's processors. On an AMD EPYC (Zen 4), one core, float64, OpenBLAS takes 0.68 of its time at
n = 384, 0.57 at 1024 and 0.83 at 2048 and above, there in two stages (`banded`); below 200 more by some microseconds,
which don't make up for the second that torch takes to import (docs/performance.md).
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardesd.spectra import banded
from shardesd.spectra.fortran import call, leading

_ONE_STAGE_N = 2048
"""Above, MKL's one stage is faster on AMD's processors, too."""
_TWO_STAGES_N = 2048
"""From here on a float64 triangle doesn't fit into a core's share of the cache, and two stages are faster."""


def faster(n: int, dtype: np.dtype[Any]) -> bool:
    """Whether `eigvalsh` is faster than torch's on this machine. By rule, not by measuring: λ depend on the answer by
    rounding, and should not from run to run."""
    return _on_amd() and (n <= _ONE_STAGE_N or in_two_stages(n, dtype))


def in_two_stages(n: int, dtype: np.dtype[Any]) -> bool:
    """Whether `eigvalsh` uses `banded`."""
    return n >= _TWO_STAGES_N and dtype == np.float64 and banded.available()


def eigvalsh(gram_NN: np.ndarray) -> np.ndarray | None:
    """Ascending eigenvalues (n,) of a symmetric matrix, in its dtype; None where they don't converge.

    gram_NN: float64 or float32, as `empty_gram` lays it out. Its lower triangle is read, and it is overwritten: no
    second one is needed.
    """
    in_two = in_two_stages(len(gram_NN), gram_NN.dtype)
    return banded.eigvalsh(gram_NN) if in_two else one_stage(gram_NN)


def one_stage(gram_NN: np.ndarray) -> np.ndarray | None:
    """As `eigvalsh`, by LAPACK's dsyevd or ssyevd."""
    n, dtype = gram_NN.shape[0], gram_NN.dtype
    eigs_N = np.empty(n, dtype)

    def solve(work: np.ndarray, size: int) -> int:
        integers = np.empty(1, np.intc)
        before = (b"N", b"L", n, gram_NN, leading(gram_NN), eigs_N)
        return call("lapack", "syevd", dtype, *before, work, size, integers, 1, 0)

    wanted = np.empty(1, dtype)
    solve(wanted, -1)
    size = int(wanted[0]) + 1  # as a float32 it may be rounded down
    return None if solve(np.empty(size, dtype), size) else eigs_N


@cache
def _on_amd() -> bool:
    return "AuthenticAMD" in _processor()


def _processor() -> str:
    """What the system says of it, its maker's name included."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # not Linux
        return platform.processor()
