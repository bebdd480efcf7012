from __future__ import annotations

import numpy as np
import pytest

from shardesd.spectra.blas import syrk


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (30, 50), (50, 30)])
def test_one_triangle_is_added_to_and_the_other_left_alone(dtype: type, order: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    X_NK = np.array(rng.standard_normal(shape), dtype=dtype, order=order)
    gram = np.full((shape[0], shape[0]), np.nan, dtype, order="F")
    syrk(X_NK, gram, 0.0)
    syrk(X_NK, gram, 1.0)
    lower = np.tril_indices(shape[0])
    expected = 2 * X_NK.astype(np.float64) @ X_NK.T.astype(np.float64)
    np.testing.assert_allclose(gram[lower], expected[lower], rtol=1e-12 if dtype is np.float64 else 1e-4, atol=1e-4)
    assert np.isnan(gram[np.triu_indices(shape[0], 1)]).all()
