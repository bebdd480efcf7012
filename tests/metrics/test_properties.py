"""All metrics against a slow computation straight from the formulas, in 50-digit decimals and loops."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardesd.metrics import fit_power_law, measure
from shardesd.options import ScanOptions
from shardesd.records import Fit

METHODS = ["xmin_mid", "xmin_peak", "DKS"]


def reference_fits(eigs: list[float]) -> dict[int, tuple[float, float]]:
    """α and D of every valid start, in Clauset's formulas as they stand. The last one has no second value."""
    fits = {}
    with localcontext() as context:
        context.prec = 50
        logs = [Decimal(x).ln() if x > 0 else Decimal("-Infinity") for x in eigs]
        for i in range(len(eigs) - 1):
            tail = logs[i:]
            n = len(tail)
            if tail[0].is_infinite() or tail[-1] - tail[0] <= len(eigs) * Decimal(2) ** -52:
                continue
            alpha = 1 + n / sum((x - tail[0] for x in tail), Decimal(0))
            distance = max(abs(1 - ((1 - alpha) * (tail[k] - tail[0])).exp() - Decimal(k) / n) for k in range(n))
            fits[i] = float(alpha), float(distance)
    return fits


def reference_window(eigs: list[float], bins: int) -> tuple[float, float]:
    logs = [math.log10(x) for x in eigs if x > 0]
    edges = [float(x) for x in np.linspace(logs[0], logs[-1], bins + 1)]
    counts = [0] * bins
    for x in logs:
        counts[max(b for b in range(bins) if edges[b] <= x)] += 1
    peak = edges[counts.index(max(counts))]
    return peak + math.log10(0.95), peak + math.log10(1.5)


def assert_fits(fit: Fit, eigs: list[float], method: str, bins: int = 100) -> None:
    fits = reference_fits(eigs)
    n = len(eigs)
    if method == "xmin_mid":
        fits = {i: fits[i] for i in fits if i == min(n // 2, n - 2)}
    elif method == "xmin_peak" and fits:
        low, high = reference_window(eigs, bins)
        fits = {i: fits[i] for i in fits if low <= math.log10(eigs[i]) <= high}
    if not fits:
        assert fit == Fit(
            alpha=-1, D=1, fit_xmin=None, fit_xmax=None, n_tail=None, sigma=None, fit_status="no_valid_fit"
        )
        return
    assert fit.fit_status == "ok"
    assert fit.n_tail is not None
    start = n - fit.n_tail
    alpha, distance = fits[start]
    assert fit.alpha == pytest.approx(alpha, rel=1e-12)
    assert abs(fit.D - distance) < 1e-12
    least = min(d for _, d in fits.values())
    close = [i for i, (_, d) in fits.items() if d <= least + 1e-12]  # nearer than that, rounding may choose
    assert start in close
    assert (fit.fit_xmin, fit.fit_xmax) == (eigs[start], eigs[-1])
    assert fit.sigma == pytest.approx((alpha - 1) / math.sqrt(fit.n_tail), rel=1e-12)


def assert_norms(found: dict[str, object], kept: list[float], N: int) -> None:
    total, largest, alpha = math.fsum(kept), kept[-1], float(found["alpha"])  # type: ignore[arg-type]
    rank = sum(math.sqrt(max(x, 0)) > math.sqrt(max(largest, 0)) * N * 2**-23 for x in kept)
    expected: dict[str, object] = {
        "num_evals": len(kept),
        "norm": total,
        "spectral_norm": largest,
        "log_norm": math.log10(total) if total > 0 else 0,
        "log_spectral_norm": math.log10(largest) if largest > 0 else 0,
        "alpha_weighted": alpha * math.log10(largest) if largest > 0 else 0,
        "stable_rank": total / largest if largest > 0 else 0,
        "matrix_rank": rank,
        "xmin": kept[0],
        "xmax": largest,
    }
    if alpha <= 0:
        expected["log_alpha_norm"] = -1
    else:
        with localcontext() as context:
            context.prec = 50
            exponent = Decimal(alpha)
            top = Decimal(largest).ln()
            powers = sum(((exponent * (Decimal(x).ln() - top)).exp() for x in kept if x > 0), Decimal(0))
            expected["log_alpha_norm"] = float(exponent * Decimal(largest).log10() + powers.log10())
    if largest <= 0:
        expected["entropy"] = 0
    else:
        p = [max(x, 0) / math.fsum(max(y, 0) for y in kept) + 6e-5 for x in kept]
        expected["entropy"] = -math.fsum(x * math.log(x) for x in p) / math.log(rank + 6e-5)
    for column, value in expected.items():
        assert found[column] == pytest.approx(value, rel=1e-11, abs=1e-300 if column == "norm" else 1e-11), column


normal = st.floats(0, 1, exclude_min=True).map(lambda u: -math.log(u))  # exponential
pareto = st.floats(1e-9, 1).map(lambda u: u**-0.7)
tied = st.sampled_from([0.5, 1.0, 2.0, 2.0, 7.25])
near = st.integers(0, 50).map(lambda ulps: 1 + ulps * 2.0**-52)
wild = st.floats(-300, 150).map(lambda e: 10.0**e)
with_zeros = st.one_of(st.just(0.0), st.just(-1e-17), normal)
spectra = st.one_of(
    *(st.lists(values, min_size=1, max_size=40) for values in (normal, pareto, tied, near, wild, with_zeros)),
    st.lists(st.one_of(wild, tied), min_size=1, max_size=3),
)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=250, deadline=None)
@given(eigs=spectra, scale=st.sampled_from([1.0, 1e-300, 1e-7, 1e30]))
@example(eigs=[1.0], scale=1.0)
@example(eigs=[1.0, 2.0], scale=1.0)
@example(eigs=[2.0, 2.0], scale=1.0)
@example(eigs=[1.0, 2.0, 2.0], scale=1.0)
@example(eigs=[0.0, 0.0, 0.0], scale=1.0)
@example(eigs=[0.0, 0.0, 3.0], scale=1.0)
@example(eigs=[-1.0, -2.0, -3.0], scale=1.0)
@example(eigs=[1e-300, 1e150], scale=1.0)
@example(eigs=[5e-324, 1e-320, 1.7e308], scale=1.0)
def test_fit_follows_the_formulas(method: str, eigs: list[float], scale: float) -> None:
    scaled = sorted(x * scale for x in eigs)
    assert_fits(fit_power_law(scaled, method=method), scaled, method)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=150, deadline=None)
@given(
    eigs=spectra,
    scale=st.sampled_from([1.0, 1e-6, 1e-150]),
    filter_zeros=st.booleans(),
    thresh=st.sampled_from([0.0, 1e-5, 1.0]),
    N=st.integers(1, 5000),
)
def test_every_column_follows_from_the_kept_eigenvalues(
    method: str, eigs: list[float], scale: float, filter_zeros: bool, thresh: float, N: int
) -> None:
    scaled = [x * scale for x in eigs]
    options = ScanOptions(fix_fingers=method, filter_zeros=filter_zeros, evals_thresh=thresh, bins=7)
    found = measure(scaled, N=N, options=options)
    kept = sorted(x for x in scaled if x > thresh or not filter_zeros)
    below = not kept
    kept = kept or sorted(scaled)
    status = str(found["fit_status"]).split("+")
    assert ("below_threshold" in status) == below
    fit = Fit(
        **{name: found[name] for name in ("alpha", "D", "fit_xmin", "fit_xmax", "n_tail", "sigma")},
        fit_status="no_valid_fit" if "no_valid_fit" in status else "ok",
    )
    assert_fits(fit, kept, method, bins=7)
    assert_norms(found, kept, N)


@pytest.mark.parametrize("sample", ["normal", "pareto", "lognormal", "bulk and spikes", "tied"])
@pytest.mark.parametrize("method", ["xmin_peak", "DKS"])
def test_a_long_scan_finds_the_least_distance(sample: str, method: str) -> None:
    """Long enough that bounds prune most starts: the same start as looking at each of them in full."""
    rng = np.random.default_rng(7)
    n = 900
    eigs = {
        "normal": rng.standard_normal(n) ** 2,
        "pareto": rng.pareto(1.5, n) + 1,
        "lognormal": np.exp(3 * rng.standard_normal(n)),
        "bulk and spikes": np.append(1 + 0.9 * np.cos(np.linspace(0, 3.1, n - 20)), 3 + rng.pareto(1, 20)),
        "tied": rng.integers(1, 30, n).astype(float),
    }[sample]
    eigs.sort()
    distances = []
    for i in range(n - 1):
        ratio = eigs[i:] / eigs[i]
        if ratio[-1] > 1:
            k = np.arange(ratio.size)
            alpha = 1 + ratio.size / np.log(ratio).sum()
            distances.append((float(np.abs(1 - ratio ** (1 - alpha) - k / ratio.size).max()), i))
    if method == "xmin_peak":
        low, high = reference_window(eigs.tolist(), 100)
        distances = [(d, i) for d, i in distances if low <= math.log10(eigs[i]) <= high]
    distances.sort()
    assert distances[1][0] - distances[0][0] > 1e-9, "the sample must have one winner"
    fit = fit_power_law(eigs, method=method)
    assert fit.n_tail == n - distances[0][1]
    assert abs(fit.D - distances[0][0]) < 1e-12
