"""Which eigenvalues count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardesd.errors import MatrixError


def ascending(eigs: ArrayLike) -> NDArray[np.float64]:
    """A float64 copy of `eigs` whose last axis is sorted. Raises `MatrixError` where one is NaN or infinite."""
    sorted_eigs = np.sort(np.asarray(eigs, dtype=np.float64, order="C"), axis=-1)
    finite = np.isfinite(sorted_eigs)
    if not finite.all():
        bad = int(np.count_nonzero(~finite))
        raise MatrixError(f"{bad} of {sorted_eigs.size} eigenvalues are NaN or infinite")
    return sorted_eigs


def keep(eigs: ArrayLike, *, evals_thresh: float, filter_zeros: bool) -> tuple[NDArray[np.float64], bool]:
    """The λ that all metrics are computed from, ascending, and whether the threshold had to be given up.

    With `filter_zeros` those are the λ > `evals_thresh`. Where there is none (a small layer can lie below it as a
    whole) they are all λ, and the second value is True. Without `filter_zeros` they are all λ.
    Raises `MatrixError` where a λ is NaN or infinite.
    """
    all_eigs = ascending(np.ravel(eigs))
    (count,), (below,) = kept_counts(all_eigs[None], evals_thresh=evals_thresh, filter_zeros=filter_zeros)
    return all_eigs[all_eigs.size - count :], below


def kept_counts(
    eigs_BN: NDArray[np.float64], *, evals_thresh: float, filter_zeros: bool
) -> tuple[list[int], list[bool]]:
    """Of each row of ascending λ, how many of the largest count, and whether the threshold had to be given up.

    See `keep`.
    """
    B, size = eigs_BN.shape
    if not filter_zeros:
        return [size] * B, [False] * B
    above: list[int] = (eigs_BN > evals_thresh).sum(axis=1).tolist()
    return [count or size for count in above], [not count and size > 0 for count in above]
