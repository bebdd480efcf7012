"""Rows and spectra for the tests of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardesd.records import Row


@pytest.fixture
def row() -> Callable[..., Row]:
    """Makes an analysed row with made-up numbers that differ from name to name."""

    def make(longname: str, **changes: Any) -> Row:
        rng = np.random.default_rng(list(longname.encode()))
        values: dict[str, Any] = {
            "model_id": "org/name",
            "longname": longname,
            "layer_index": int(rng.integers(40)),
            "block_type": "q_proj",
            "dtype": "BF16",
            "M": 8,
            "N": 6,
            "num_evals": 6,
            "alpha": float(rng.uniform(1.5, 8)),
            "D": float(rng.uniform()),
            "n_tail": 3,
            "fit_status": "ok",
            "alpha_weighted": float(rng.normal()),
            "log_alpha_norm": float(rng.normal()),
            "spectral_norm": float(rng.uniform(1, 100)),
            "stable_rank": float(rng.uniform(1, 6)),
            "matrix_rank": 6,
            "entropy": float(rng.uniform()),
            "params": 48,
            "solver": "gram",
            "precision": "float64",
            "device": "cpu",
            "seconds": float(rng.uniform(0, 0.1)),
        }
        return Row(**{**values, **changes})

    return make


@pytest.fixture
def eigs() -> Callable[[str, int], np.ndarray]:
    """Makes K ascending λ that follow from the name."""

    def make(longname: str, K: int = 6) -> np.ndarray:
        return np.sort(np.random.default_rng(list(longname.encode())).pareto(2.0, K))

    return make
