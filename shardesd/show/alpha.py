"""What a value of α says about a matrix, in the ranges that the field uses.

HTSR (Martin and Mahoney, "Implicit Self-Regularization in Deep Neural Networks", JMLR 22, 2021) finds the α of well
trained layers between 2 and 6, the smaller the better; SETOL (Martin and Hinrichs, arXiv:2507.17912) puts the ideal at
2 and reads smaller values as over-training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaRange:
    """One of the ranges of α, or `NO_FIT`."""

    name: str
    mark: str
    """One letter that stands beside α, so that the meaning never hangs on a colour."""
    bounds: str
    """The range as text, with ``α`` in it."""
    style: str
    """A rich style that can be read on dark and on light backgrounds: colours that terminals fit to theirs, but for
    yellow, which hardly shows on white."""


OVER_TRAINED = AlphaRange(name="over-trained", mark="o", bounds="α < 2", style="magenta")
GOOD = AlphaRange(name="good", mark="g", bounds="2 ≤ α < 4", style="green")
WEAK = AlphaRange(name="weak", mark="w", bounds="4 ≤ α ≤ 6", style="color(166)")
UNDER_TRAINED = AlphaRange(name="under-trained", mark="u", bounds="α > 6", style="red")
NO_FIT = AlphaRange(name="no fit", mark="-", bounds="", style="dim")

RANGES: tuple[AlphaRange, ...] = (OVER_TRAINED, GOOD, WEAK, UNDER_TRAINED, NO_FIT)


def alpha_range(alpha: float | None) -> AlphaRange:
    """The range that `alpha` lies in; `NO_FIT` for −1 (the mark of a failed fit), None and what isn't finite.

    Under 2 over-trained, 2 to 4 good, 4 to 6 weak, above 6 under-trained (sources: this module's docstring).
    """
    if alpha is None or not math.isfinite(alpha) or alpha < 0:
        return NO_FIT
    if alpha < 2:
        return OVER_TRAINED
    if alpha < 4:
        return GOOD
    return WEAK if alpha <= 6 else UNDER_TRAINED


FIRST_EDGE, LAST_EDGE, STEP = 1.0, 8.0, 0.5
BINS = int((LAST_EDGE - FIRST_EDGE) / STEP) + 1
"""Bins of the histogram of α: [1, 1.5), [1.5, 2) … [7.5, 8), [8, ∞). The ranges' bounds are edges of it."""


def alpha_bins(alphas: Iterable[float]) -> list[int]:
    """How many of the fitted `alphas` fall into each of the `BINS` bins; values under 1 count in the first."""
    counts = [0] * BINS
    for alpha in alphas:
        counts[max(0, min(BINS - 1, math.floor((alpha - FIRST_EDGE) / STEP)))] += 1
    return counts


def bin_range(index: int) -> AlphaRange:
    """The range that the middle of a bin lies in."""
    return alpha_range(FIRST_EDGE + (index + 0.5) * STEP)
