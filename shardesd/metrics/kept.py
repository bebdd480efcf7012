"""Which eigenvalues count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardesd.errors import MatrixError


def ascending(eigs: ArrayLike) -> NDArray[np.float64]:
    """`eigs` in float64, each row of the last axis sorted: a copy, unless they are so already.

    Raises `MatrixError` where one is NaN or infinite.
    """
    values = np.asarray(eigs, dtype=np.float64, order="C")
    if not (values[..., 1:] >= values[..., :-1]).all():  # nor is it where one is NaN; to look takes less than to sort
        values = np.sort(values, axis=-1)
    ends = values[..., :: max(1, values.shape[-1] - 1)]
    if not np.isfinite(ends).all():
        bad = int(np.count_nonzero(~np.isfinite(values)))
        raise MatrixError(f"{bad} of {values.size} eigenvalues are NaN or infinite")
    return values


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
