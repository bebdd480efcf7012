"""All metric columns of one row."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from shardesd.metrics import norms
from shardesd.metrics.kept import keep
from shardesd.metrics.powerlaw import fit_power_law
from shardesd.options import ScanOptions

BELOW_THRESHOLD = "below_threshold"


def measure(eigs: ArrayLike, *, N: int, options: ScanOptions) -> dict[str, Any]:
    """Every metric column of a `Row`, from ``num_evals`` to ``xmax``, in its order, as Python numbers.

    `eigs` are all λ of one matrix in any order, `N` its columns (`matrix_rank` counts with them). ``fit_status`` is
    ``ok``; ``no_valid_fit`` (then α = -1, D = 1, and the fit's other columns are None); ``below_threshold`` where no
    λ exceeds `options.evals_thresh`, so that all were kept; or both of these, joined by ``+``.
    Raises `MatrixError` where a λ is NaN or infinite.
    """
    eigs_K, below = keep(eigs, evals_thresh=options.evals_thresh, filter_zeros=options.filter_zeros)
    fit = fit_power_law(eigs_K, method=options.fix_fingers, bins=options.bins)
    total = norms.norm(eigs_K)
    largest = norms.spectral_norm(eigs_K)
    rank = norms.matrix_rank(eigs_K, N=N)
    return {
        "num_evals": eigs_K.size,
        "alpha": fit.alpha,
        "D": fit.D,
        "fit_xmin": fit.fit_xmin,
        "fit_xmax": fit.fit_xmax,
        "n_tail": fit.n_tail,
        "sigma": fit.sigma,
        "fit_status": _status(fit.fit_status, below=below),
        "alpha_weighted": fit.alpha * norms.log_or_zero(largest),
        "log_alpha_norm": norms.log_alpha_norm(eigs_K, alpha=fit.alpha),
        "norm": total,
        "log_norm": norms.log_or_zero(total),
        "spectral_norm": largest,
        "log_spectral_norm": norms.log_or_zero(largest),
        "stable_rank": norms.stable_rank(eigs_K),
        "matrix_rank": rank,
        "entropy": norms.entropy(eigs_K, rank=rank),
        "xmin": float(eigs_K[0]) if eigs_K.size else None,
        "xmax": float(eigs_K[-1]) if eigs_K.size else None,
    }


def _status(fit_status: str, *, below: bool) -> str:
    if not below:
        return fit_status
    return BELOW_THRESHOLD if fit_status == "ok" else f"{BELOW_THRESHOLD}+{fit_status}"
