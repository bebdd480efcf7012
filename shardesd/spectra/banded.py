"""Eigenvalues of a large symmetric matrix on a CPU by two stages: to a band of a few dozen diagonals, then to three.

LAPACK's dsyevd reduces to three diagonals at once, and reads what is left of the matrix for each of its columns: a
triangle that doesn't fit into the cache, or into the share of it that other solves leave, is waited for. Here it is
read for a few dozen columns at a time, by products of matrices. (Bischof, Lang and Sun: A framework for symmetric band
reduction. ACM TOMS 26, 2000.)
"""

from __future__ import annotations

import numpy as np

from shardesd.spectra.fortran import call, leading, unpublished


def available() -> bool:
    """Whether scipy's LAPACK has the first stage, dsytrd_sy2sb: since LAPACK 3.7, but scipy doesn't publish it."""
    return unpublished("dsytrd_sy2sb") is not None


def eigvalsh(A_NN: np.ndarray) -> np.ndarray | None:
    """Ascending eigenvalues (n,) of a symmetric float64 matrix; None where they don't converge.

    A_NN: as `empty_gram` lays it out, of norm between 1e-200 and 1e290, so that nothing over- or underflows. Its lower
    triangle is read, and it is overwritten.
    """
    n = len(A_NN)
    # The more diagonals, the faster the first stage and the slower the second.
    b = min(32 if n <= 2048 else 48, n - 1)
    band_BN = np.empty((b + 1, n), order="F")
    eigs_N, beside_N, work_N = np.empty((3, n))

    def to_band(work: np.ndarray, size: int) -> None:
        before = (b"L", n, b, A_NN, leading(A_NN), band_BN, b + 1)
        call("lapack", "sytrd_sy2sb", A_NN.dtype, *before, beside_N, work, size, 0)

    wanted = np.empty(1)
    to_band(wanted, -1)
    to_band(np.empty(int(wanted[0])), int(wanted[0]))
    after = (band_BN, b + 1, eigs_N, beside_N, work_N, 1, work_N, 0)  # the rotations aren't kept
    call("lapack", "sbtrd", A_NN.dtype, b"N", b"L", n, b, *after)
    return None if call("lapack", "sterf", A_NN.dtype, n, eigs_N, beside_N, 0) else eigs_N
