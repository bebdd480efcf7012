"""Which eigenvalues count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardesd.errors import MatrixError


def ascending(eigs: ArrayLike) -> NDArray[np.float64]:
    """A sorted float64 copy of `eigs`. Raises `MatrixError` where one is NaN or infinite."""
    sorted_eigs = np.sort(np.asarray(eigs, dtype=np.float64), axis=None)
    bad = int(np.count_nonzero(~np.isfinite(sorted_eigs)))
    if bad:
        raise MatrixError(f"{bad} of {sorted_eigs.size} eigenvalues are NaN or infinite")
    return sorted_eigs


def keep(eigs: ArrayLike, *, evals_thresh: float, filter_zeros: bool) -> tuple[NDArray[np.float64], bool]:
    """The λ that all metrics are computed from, ascending, and whether the threshold had to be given up.

    With `filter_zeros` those are the λ > `evals_thresh`. Where there is none (a small layer can lie below it as a
    whole) they are all λ, and the second value is True. Without `filter_zeros` they are all λ.
    Raises `MatrixError` where a λ is NaN or infinite.
    """
    all_eigs = ascending(eigs)
    if not filter_zeros:
        return all_eigs, False
    kept = all_eigs[np.searchsorted(all_eigs, evals_thresh, side="right") :]
    if kept.size == 0:
        return all_eigs, all_eigs.size > 0
    return kept, False
