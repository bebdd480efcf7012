"""Spectra that are measured together: each has the numbers that it has alone, to the last bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardesd.errors import MatrixError
from shardesd.metrics import measure, measure_many, ranks
from shardesd.options import ScanOptions

KINDS = ("tails", "zeros", "scattered zeros", "below", "wide", "negative", "equal")


def spectra(kind: str, B: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    eigs_BN = rng.pareto(1.5, (B, n)) + 1
    if kind == "zeros":
        eigs_BN[:, : n // 3] = 0
    elif kind == "scattered zeros":
        eigs_BN[rng.random((B, n)) < 0.2] = 0
    elif kind == "below":
        eigs_BN *= 1e-9
    elif kind == "wide":
        eigs_BN = 10.0 ** rng.uniform(-300, 300, (B, n))
    elif kind == "negative":
        eigs_BN = rng.standard_normal((B, n))
    elif kind == "equal":
        eigs_BN[:] = rng.random((B, 1))
    return eigs_BN


@given(
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.one_of(st.integers(1, 12), st.integers(500, 600)),
    st.sampled_from(["xmin_mid", "xmin_peak", "DKS"]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_each_is_measured_as_if_alone(kind: str, B: int, n: int, method: str, filter_zeros: bool, seed: int) -> None:
    eigs_BN = spectra(kind, B, n, seed)
    options = ScanOptions(fix_fingers=method, filter_zeros=filter_zeros)
    N = np.random.default_rng(seed).integers(n, 3 * n + 1, B).tolist()
    many = measure_many(eigs_BN, N=N, options=options)
    assert len(many) == B
    for eigs, columns, found in zip(eigs_BN, N, many, strict=True):
        assert plain(found) == plain(measure(eigs, N=columns, options=options))


def test_in_whatever_order_they_lie() -> None:
    eigs_BN = spectra("tails", 7, 301, 0)
    options = ScanOptions()
    assert measure_many(np.asfortranarray(eigs_BN), N=[400] * 7, options=options) == measure_many(
        eigs_BN, N=[400] * 7, options=options
    )


def plain(values: dict[str, Any]) -> list[tuple[str, Any, type]]:
    """Which tells 0 from -0, and types."""
    return [(name, value.hex() if isinstance(value, float) else value, type(value)) for name, value in values.items()]


def test_the_norms_are_those_of_their_formulas() -> None:
    """Of several rows at once, by Python's own sums."""
    eigs_BN = np.sort(spectra("tails", 5, 400, 3), axis=1)
    eigs_BN[2, :37] = 0
    for eigs, found in zip(eigs_BN, measure_many(eigs_BN, N=[500] * 5, options=ScanOptions()), strict=True):
        kept = [x for x in eigs.tolist() if x > 1e-5]
        total, alpha = math.fsum(kept), found["alpha"]
        middle = min(len(kept) // 2, len(kept) - 2)
        tail = kept[middle:]
        assert alpha == pytest.approx(1 + len(tail) / math.fsum(math.log(x / tail[0]) for x in tail), rel=1e-12)
        assert found["norm"] == pytest.approx(total, rel=1e-13)
        assert found["log_alpha_norm"] == pytest.approx(math.log10(math.fsum(x**alpha for x in kept)), rel=1e-12)
        p = [x / total + 6e-5 for x in kept]
        entropy = -math.fsum(x * math.log(x) for x in p) / math.log(found["matrix_rank"] + 6e-5)
        assert found["entropy"] == pytest.approx(entropy, rel=1e-12)
        D = max(abs(1 - (x / tail[0]) ** (1 - alpha) - k / len(tail)) for k, x in enumerate(tail))
        assert found["D"] == pytest.approx(D, rel=1e-10)


def test_one_that_is_not_finite_is_refused_with_all() -> None:
    eigs_BN = np.ones((3, 4))
    eigs_BN[1, 2] = np.nan
    with pytest.raises(MatrixError, match="1 of 12 eigenvalues are NaN or infinite"):
        measure_many(eigs_BN, N=[4] * 3, options=ScanOptions())


def test_ranks_of_several() -> None:
    rng = np.random.default_rng(0)
    sigma_BN = np.sort(rng.random((6, 50)) ** 12, axis=1)
    sigma_BN[3, :20] = 0
    for sigma, found in zip(sigma_BN, ranks(sigma_BN**2), strict=True):
        energy = np.cumsum(sigma[::-1] ** 2)
        assert found.actual == (sigma > 1e-6 * sigma[-1]).sum()
        assert found.svd_90 == np.argmax(energy >= 0.9 * energy[-1]) + 1
