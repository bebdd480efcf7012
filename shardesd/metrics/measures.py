"""All metric columns of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardesd.metrics import norms
from shardesd.metrics.kept import ascending, kept_counts
from shardesd.metrics.powerlaw import fit_power_laws
from shardesd.options import ScanOptions

BELOW_THRESHOLD = "below_threshold"
_AT_ONCE = 1 << 16
"""λ that are measured together: numpy's steps are long then, and their results lie in the cache. Larger ones the C
library takes from the system each time, which has to bring in their pages anew."""


def measure(eigs: ArrayLike, *, N: int, options: ScanOptions) -> dict[str, Any]:
    """Every metric column of a `Row`, from ``num_evals`` to ``xmax``, in its order, as Python numbers.

    `eigs` are all λ of one matrix in any order, `N` its columns (`matrix_rank` counts with them). ``fit_status`` is
    ``ok``; ``no_valid_fit`` (then α = -1, D = 1, and the fit's other columns are None); ``below_threshold`` where no
    λ exceeds `options.evals_thresh`, so that all were kept; or both of these, joined by ``+``.
    Raises `MatrixError` where a λ is NaN or infinite.
    """
    return measure_many(np.reshape(eigs, (1, -1)), N=[N], options=options)[0]


def measure_many(eigs_BN: ArrayLike, *, N: Sequence[int], options: ScanOptions) -> list[dict[str, Any]]:
    """`measure` of each row, with the same numbers bit by bit, in a few steps for all of them.

    Each of numpy's calls lets go of the interpreter's lock, for which the threads that feed a GPU wait.
    """
    eigs_BN = ascending(eigs_BN)
    counts, below = kept_counts(eigs_BN, evals_thresh=options.evals_thresh, filter_zeros=options.filter_zeros)
    found: dict[int, dict[str, Any]] = {}
    for count in set(counts):
        alike = [row for row, one in enumerate(counts) if one == count]
        first = eigs_BN.shape[1] - count
        most = max(1, _AT_ONCE // max(1, count))
        for begin in range(0, len(alike), most):
            rows = alike[begin : begin + most]
            together = rows[-1] - rows[0] < len(rows)
            measured = _of_one_length(
                eigs_BN[rows[0] : rows[-1] + 1, first:] if together else eigs_BN[rows, first:],
                [N[row] for row in rows],
                [below[row] for row in rows],
                options,
            )
            found.update(zip(rows, measured, strict=True))
    return [found[row] for row in range(len(counts))]


def _of_one_length(
    eigs_BK: NDArray[np.float64], N: Sequence[int], below: Sequence[bool], options: ScanOptions
) -> list[dict[str, Any]]:
    fits = fit_power_laws(eigs_BK, method=options.fix_fingers, bins=options.bins)
    totals = norms.norms(eigs_BK)
    largest = norms.spectral_norms(eigs_BK)
    ranks = norms.matrix_ranks(eigs_BK, N=N)
    entropies = norms.entropies(eigs_BK, ranks=ranks)
    alpha_norms = norms.log_alpha_norms(eigs_BK, alphas=[fit.alpha for fit in fits])
    least = eigs_BK[:, 0].tolist() if eigs_BK.size else []
    size = eigs_BK.shape[1]
    return [
        {
            "num_evals": size,
            "alpha": fit.alpha,
            "D": fit.D,
            "fit_xmin": fit.fit_xmin,
            "fit_xmax": fit.fit_xmax,
            "n_tail": fit.n_tail,
            "sigma": fit.sigma,
            "fit_status": _status(fit.fit_status, below=below[row]),
            "alpha_weighted": fit.alpha * norms.log_or_zero(largest[row]),
            "log_alpha_norm": alpha_norms[row],
            "norm": totals[row],
            "log_norm": norms.log_or_zero(totals[row]),
            "spectral_norm": largest[row],
            "log_spectral_norm": norms.log_or_zero(largest[row]),
            "stable_rank": totals[row] / largest[row] if largest[row] > 0 else 0.0,
            "matrix_rank": ranks[row],
            "entropy": entropies[row],
            "xmin": least[row] if size else None,
            "xmax": largest[row] if size else None,
        }
        for row, fit in enumerate(fits)
    ]


def _status(fit_status: str, *, below: bool) -> str:
    if not below:
        return fit_status
    return BELOW_THRESHOLD if fit_status == "ok" else f"{BELOW_THRESHOLD}+{fit_status}"
