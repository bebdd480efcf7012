"""Eigenvalues → numbers: which λ count, the power law on their tail, norms, ranks, entropy. Pure functions of arrays.

`measure` gives every metric column of a table's row, `measure_many` those of several rows; `keep` and `fit_power_law`
are its first two steps. `Scratch`, `merge` and `ranks` are for the statistics of tensors.
"""

from __future__ import annotations

from shardesd.metrics.kept import keep
from shardesd.metrics.measures import measure, measure_many
from shardesd.metrics.moments import NEARLY_ZERO, Moments, Scratch, merge
from shardesd.metrics.powerlaw import fit_power_law
from shardesd.metrics.ranks import Ranks, ranks

__all__ = [
    "NEARLY_ZERO",
    "Moments",
    "Ranks",
    "Scratch",
    "fit_power_law",
    "keep",
    "measure",
    "measure_many",
    "merge",
    "ranks",
]
