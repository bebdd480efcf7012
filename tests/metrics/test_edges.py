"""What is kept, what a fit without a start says, ties, types, memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from shardesd.errors import MatrixError, OptionError
from shardesd.metrics import fit_power_law, keep, measure, powerlaw
from shardesd.options import ScanOptions
from shardesd.records import ROW_COLUMNS

NO_FIT = {"alpha": -1.0, "D": 1.0, "fit_xmin": None, "fit_xmax": None, "n_tail": None, "sigma": None}
ZERO = (
    "norm",
    "log_norm",
    "spectral_norm",
    "log_spectral_norm",
    "stable_rank",
    "matrix_rank",
    "entropy",
    "alpha_weighted",
)


def test_keep_takes_what_exceeds_the_threshold() -> None:
    eigs, gave_up = keep([3.0, 1e-5, 0.0, 2e-5, -1e-18], evals_thresh=1e-5, filter_zeros=True)
    assert (eigs.tolist(), gave_up) == ([2e-5, 3.0], False)


def test_keep_falls_back_to_all() -> None:
    eigs, gave_up = keep(np.array([3e-7, 0.0, 1e-7], dtype=np.float32), evals_thresh=1e-5, filter_zeros=True)
    assert (eigs.tolist(), gave_up) == ([0.0, float(np.float32(1e-7)), float(np.float32(3e-7))], True)
    assert eigs.dtype == np.float64


def test_keep_without_filter_keeps_all() -> None:
    eigs, gave_up = keep([1.0, 0.0, -1e-18], evals_thresh=1e-5, filter_zeros=False)
    assert (eigs.tolist(), gave_up) == ([-1e-18, 0.0, 1.0], False)


def test_keep_does_not_touch_its_input() -> None:
    eigs = np.array([2.0, 1.0])
    keep(eigs, evals_thresh=0, filter_zeros=False)[0][:] = 0
    assert eigs.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_eigenvalues_are_refused(bad: float) -> None:
    for call in (
        lambda: keep([1.0, bad, 2.0], evals_thresh=1e-5, filter_zeros=True),
        lambda: fit_power_law([1.0, bad, 2.0], method="DKS"),
    ):
        with pytest.raises(MatrixError, match="1 of 3 eigenvalues are NaN or infinite"):
            call()


def test_unknown_method() -> None:
    with pytest.raises(OptionError, match=r"'dks' is invalid \(expected one of: xmin_mid, xmin_peak, DKS\)"):
        fit_power_law([1.0, 2.0], method="dks")


def test_columns_are_a_rows_and_of_plain_types() -> None:
    for eigs in ([1.0, 2.0, 5.0], [0.0], [], [1e-9, 2e-9]):
        row = measure(np.array(eigs), N=3, options=ScanOptions())
        start, stop = ROW_COLUMNS.index("num_evals"), ROW_COLUMNS.index("xmax")
        assert tuple(row) == ROW_COLUMNS[start : stop + 1]
        assert {type(value) for value in row.values()} <= {int, float, str, type(None)}


@pytest.mark.parametrize("method", ["xmin_mid", "xmin_peak", "DKS"])
def test_all_zero_and_empty(method: str) -> None:
    for eigs in ([0.0] * 4, []):
        row = measure(eigs, N=4, options=ScanOptions(fix_fingers=method))
        assert {name: row[name] for name in NO_FIT} == NO_FIT
        for name in ZERO:
            assert row[name] == 0, name
        assert row["log_alpha_norm"] == -1
        assert row["num_evals"] == len(eigs)
    assert (row["xmin"], row["xmax"], row["fit_status"]) == (None, None, "no_valid_fit")


def test_fit_status_words() -> None:
    def status(eigs: list[float]) -> object:
        return measure(eigs, N=2, options=ScanOptions())["fit_status"]

    assert status([1.0, 2.0]) == "ok"
    assert status([2.0, 2.0]) == "no_valid_fit"
    assert status([1e-7, 2e-7]) == "below_threshold"
    assert status([2e-7, 2e-7]) == "below_threshold+no_valid_fit"


def test_zeros_count_for_the_middle_but_cannot_start_a_tail() -> None:
    options = ScanOptions(filter_zeros=False)
    assert measure([0.0, 0.0, 1.0, 2.0], N=4, options=options)["n_tail"] == 2
    assert measure([0.0, 0.0, 0.0, 1.0, 2.0], N=4, options=options)["fit_status"] == "no_valid_fit"


def test_a_peak_window_without_a_start() -> None:
    """One bin of 450 decades: every λ but the least lies far beyond 1.5·p, and the least one is what is left."""
    assert fit_power_law([1e-300, 1e100, 1e150], method="xmin_peak", bins=1).n_tail == 3
    empty = [1e-300, 1e-100, 1e-99, 1e-98, 1e150]  # two bins: the fullest begins at 1e-300
    assert fit_power_law(empty, method="xmin_peak", bins=2).n_tail == 5
    # Three bins: the fullest begins at 1e-150 and holds values only far above it.
    assert fit_power_law([1e-300, 1e-10, 1e-9, 1e-8, 1e150], method="xmin_peak", bins=3).fit_status == "no_valid_fit"


def test_equal_distances_go_to_the_first() -> None:
    class Flat:
        def lower_bounds(self, starts: NDArray[np.intp]) -> NDArray[np.float64]:
            return np.array([0.3, 0.2, 0.1, 0.4])

        def distance(self, start: int) -> float:
            return {10: 0.3, 11: 0.3, 12: 0.3, 13: 0.5}[start]

    assert powerlaw._least_distance(Flat(), np.array([10, 11, 12, 13])) == (10, 0.3)


def test_the_bounds_never_exceed_the_distance() -> None:
    eigs = np.sort(np.random.default_rng(3).pareto(1.2, 700) + 1)
    tails = powerlaw._Tails(eigs[None], eigs.size).of(0)
    starts = tails.valid(0, eigs.size)
    assert starts.tolist() == list(range(699))
    distances = np.array([tails.distance(start) for start in starts.tolist()])
    assert np.all(tails.lower_bounds(starts) <= distances + 1e-15)


def test_memory_is_linear() -> None:
    """N² float64 would be 1.8 GB."""
    eigs = np.sort(np.random.default_rng(5).pareto(2, 15_000) + 1)
    tracemalloc.start()
    try:
        fit_power_law(eigs, method="DKS")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6


@pytest.mark.parametrize("method", ["xmin_mid", "xmin_peak", "DKS"])
def test_rounding_is_no_tail(method: str) -> None:
    """The λ of an orthogonal matrix, as a solver gives them; and of one whose λ are told apart by more than that."""
    rng = np.random.default_rng(5)
    Q, _ = np.linalg.qr(rng.standard_normal((200, 200)))
    eigs = np.linalg.eigvalsh(Q @ Q.T)
    assert 0 < eigs[-1] - eigs[0] < 1e-13
    assert fit_power_law(eigs, method=method).fit_status == "no_valid_fit"
    assert fit_power_law(1 + np.arange(200) * 1e-9, method=method).fit_status == "ok"
    mixed = np.concatenate([np.linspace(0.1, 0.9, 100), 1 + 1e-15 * rng.integers(0, 9, 101)])
    fit = fit_power_law(np.sort(mixed), method="DKS")
    assert (fit.alpha < 100, fit.n_tail is not None and fit.n_tail > 101) == (True, True)
