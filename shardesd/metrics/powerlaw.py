"""The power law p(λ) ∝ λ^-α on the tail of a spectrum.

For ascending λ_0 … λ_{N-1}, a start i and its tail of n = N - i values:

    α_i = 1 + n / S_i,   S_i = Σ_{j≥i} ln(λ_j/λ_i)                      (the Hill estimator)
    D_i = max_k |1 - (λ_{i+k}/λ_i)^(1-α_i) - k/n|,   k = 0 … n-1        (Kolmogorov-Smirnov)

A start is valid where λ_i > 0 and ln(λ_{N-1}/λ_i) > N·ε, ε = 2^-52: else all of the tail is one value, to within what
an eigensolver gets right of it, and α_i would measure rounding.
The start is chosen by one of three rules, see `fit_power_law`. Time is O(N) per start that is looked at in full,
memory O(N).
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardesd.errors import OptionError
from shardesd.metrics.kept import ascending
from shardesd.options import FIX_FINGERS
from shardesd.records import Fit

_SAMPLES = 128
"""Points of a tail at which a lower bound of its D is taken."""
_ROWS = 512
"""Starts whose bounds are taken at once: half a megabyte per work array."""
_SLACK = 1e-12
"""More than rounding can put between a term of a bound and the same term of D itself."""


def fit_power_law(eigs_K: ArrayLike, *, method: str, bins: int = 100) -> Fit:
    """Fit a power law to the kept eigenvalues `eigs_K`.

    `method` says how the tail's start i is found:

    - ``xmin_mid``: i = N // 2, at most N - 2.
    - ``xmin_peak``: p is the left edge of the fullest of `bins` bins of log10 λ (λ > 0); among the valid starts with
      0.95·p ≤ λ_i ≤ 1.5·p the one with the least D.
    - ``DKS``: of all valid starts the one with the least D (Clauset, Shalizi, Newman, arXiv:0706.1062).

    Of equal D the first wins. `Fit.fit_status` is ``ok``, or ``no_valid_fit`` where the rule leads to no valid start:
    then α = -1, D = 1 and the other fields are None. Raises `OptionError` for an unknown method, `MatrixError` where
    a λ is NaN or infinite.
    """
    return fit_power_laws(ascending(np.ravel(eigs_K))[None], method=method, bins=bins)[0]


def fit_power_laws(eigs_BK: NDArray[np.float64], *, method: str, bins: int) -> list[Fit]:
    """`fit_power_law` of each row, ascending and finite; a row's fit is the same whatever the rows beside it are."""
    if method not in FIX_FINGERS:
        raise OptionError(f"--fix-fingers '{method}' is invalid (expected one of: {', '.join(FIX_FINGERS)})")
    B, size = eigs_BK.shape
    if not size:
        return [_NO_FIT] * B
    if method == "xmin_mid":
        return _fits_from(eigs_BK, max(min(size // 2, size - 2), 0))
    tails = _Tails(eigs_BK, size)
    fits: list[Fit] = []
    for row, eigs in enumerate(eigs_BK):
        tail = tails.of(row)
        valid = tail.valid(*(_peak_window(eigs, bins) if method == "xmin_peak" else (0, size)))
        if valid.size:
            start, distance = _least_distance(tail, valid)
            fits.append(
                _fit(float(tails.hill[row, start]), distance, float(eigs[start]), float(eigs[-1]), size - start)
            )
        else:
            fits.append(_NO_FIT)
    return fits


def _fits_from(eigs_BK: NDArray[np.float64], start: int) -> list[Fit]:
    """Of each row, with its tail from `start` on. Nothing is computed of what lies below it."""
    tail_BT = eigs_BK[:, start:]
    tails = _Tails(tail_BT, eigs_BK.shape[1])
    columns = tails.hill[:, 0].tolist(), tails.distances(), tail_BT[:, 0].tolist(), tail_BT[:, -1].tolist()
    return [_fit(*row, tail_BT.shape[1]) if row[0] > 0 else _NO_FIT for row in zip(*columns, strict=True)]


_NO_FIT = Fit(alpha=-1.0, D=1.0, fit_xmin=None, fit_xmax=None, n_tail=None, sigma=None, fit_status="no_valid_fit")


def _fit(hill: float, distance: float, least: float, largest: float, n_tail: int) -> Fit:
    return Fit(
        alpha=1 + hill,
        D=distance,
        fit_xmin=least,
        fit_xmax=largest,
        n_tail=n_tail,
        sigma=hill / math.sqrt(n_tail),
        fit_status="ok",
    )


class _Distances(Protocol):
    def lower_bounds(self, starts: NDArray[np.intp]) -> NDArray[np.float64]: ...

    def distance(self, start: int) -> float: ...


class _Tails:
    """α - 1 of every tail of several ascending spectra of one length.

    It comes from the steps ln(λ_{j+1}/λ_j) ≥ 0, summed from the top: sums of terms of one sign, which lose nothing
    to cancellation, however close or far apart the λ are. (Differences of suffix sums of ln λ would.)
    """

    def __init__(self, eigs_BK: NDArray[np.float64], whole: int) -> None:
        """`eigs_BK`: all λ, or the largest, of spectra of `whole` λ."""
        B, size = eigs_BK.shape
        positive = eigs_BK > 0
        steps = np.zeros((B, size))
        steps[:, :-1] = _log_steps(eigs_BK)
        steps[~positive] = 0
        self._ranks = np.arange(size, dtype=np.float64)
        n_above = self._ranks[::-1]
        self._depth = _suffix_sums(steps)
        """ln(λmax/λ_j); for λ_j ≤ 0 without meaning, and not used."""
        spread = _suffix_sums(n_above * steps)
        valid = positive & (spread > 0) & (self._depth > whole * np.finfo(np.float64).eps)
        self.hill = np.divide(n_above + 1, spread, out=np.zeros((B, size)), where=valid)
        """α - 1 of every start; 0 where the start is not valid."""

    def of(self, row: int) -> _Tail:
        """Those of one spectrum."""
        return _Tail(self._depth[row], self.hill[row], self._ranks)

    def distances(self) -> list[float]:
        """D of each spectrum's longest tail; without meaning where that is not valid."""
        return _distances(self._depth, self.hill[:, :1], self._ranks)


class _Tail:
    """All tails of one spectrum, and D of any."""

    def __init__(self, depth: NDArray[np.float64], hill: NDArray[np.float64], ranks: NDArray[np.float64]) -> None:
        self._depth, self._hill, self._ranks = depth, hill, ranks

    def valid(self, begin: int, count: int) -> NDArray[np.intp]:
        """The valid ones of `count` starts from `begin` on."""
        return begin + np.flatnonzero(self._hill[begin : begin + count])

    def distance(self, start: int) -> float:
        """D of one tail."""
        return _distances(self._depth[None, start:], self._hill[None, start : start + 1], self._ranks)[0]

    def lower_bounds(self, starts: NDArray[np.intp]) -> NDArray[np.float64]:
        """For each start the largest of some of the terms whose maximum is its D."""
        bounds = np.empty(starts.size)
        sampled = np.arange(_SAMPLES)
        for begin in range(0, starts.size, _ROWS):
            rows = starts[begin : begin + _ROWS, None]
            n = self._ranks.size - rows
            k = (n - 1) * sampled // (_SAMPLES - 1)
            terms = self._depth[rows + k]
            terms -= self._depth[rows]
            terms *= self._hill[rows]
            np.exp(terms, out=terms)
            terms += k / n
            terms -= 1
            bounds[begin : begin + _ROWS] = np.maximum(terms.max(axis=1), -terms.min(axis=1))
        return bounds


def _distances(depth_BK: NDArray[np.float64], hill_B1: NDArray[np.float64], ranks: NDArray[np.float64]) -> list[float]:
    """D of tails of one length, whose first term is the first of each row."""
    terms = depth_BK - depth_BK[:, :1]
    terms *= hill_B1
    np.exp(terms, out=terms)
    size = terms.shape[1]
    terms += ranks[:size] / size
    terms -= 1
    distances: list[float] = np.maximum(terms.max(axis=1), -terms.min(axis=1)).tolist()
    return distances


def _least_distance(tails: _Distances, starts: NDArray[np.intp]) -> tuple[int, float]:
    """The first start with the least D, and that D.

    Starts are tried by ascending lower bound of their D, and no further than to where that bound exceeds the least D
    found: what is left can't win.
    """
    bounds = tails.lower_bounds(starts) if starts.size > 1 else np.zeros(starts.size)
    best = (math.inf, -1)
    for at in np.argsort(bounds, kind="stable").tolist():
        if bounds[at] > best[0] + _SLACK:
            break
        start = int(starts[at])
        best = min(best, (tails.distance(start), start))
    return best[1], best[0]


def _peak_window(eigs: NDArray[np.float64], bins: int) -> tuple[int, int]:
    """First and number of the starts with 0.95·p ≤ λ ≤ 1.5·p, p the left edge of the fullest bin of log10 λ."""
    first = int(np.searchsorted(eigs, 0.0, side="right"))
    logs = np.log10(eigs[first:])
    if logs.size == 0:
        return 0, 0
    # Not np.histogram, which refuses a range too narrow for its bins.
    edges = np.linspace(logs[0], logs[-1], bins + 1)
    counts = np.diff(np.searchsorted(logs, edges[:-1], side="left"), append=logs.size)
    peak = edges[np.argmax(counts)]
    begin = int(np.searchsorted(logs, peak + math.log10(0.95), side="left"))
    end = int(np.searchsorted(logs, peak + math.log10(1.5), side="right"))
    return first + begin, end - begin


def _log_steps(eigs_BK: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln(λ_{j+1}/λ_j) of ascending λ to full relative precision (0 for equal λ); without meaning where λ_j ≤ 0."""
    low, high = eigs_BK[:, :-1], eigs_BK[:, 1:]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        steps: NDArray[np.float64] = np.log1p((high - low) / low)
        beyond = np.isinf(steps)
        if beyond.any():
            steps[beyond] = np.log(high[beyond]) - np.log(low[beyond])
    return steps


def _suffix_sums(values_BK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ_{m≥j} of each row, for every j."""
    sums: NDArray[np.float64] = np.cumsum(values_BK[:, ::-1], axis=1)[:, ::-1]
    return sums
