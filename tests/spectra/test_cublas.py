"""What cuBLAS is asked for: addresses and leading dimensions, answered by a stand-in that knows nothing else."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from gpu_on_cpu import staged

from shardesd import spectra
from shardesd.checkpoint import StoredMatrix
from shardesd.spectra import cublas, driver, policy

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _staged(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-11), (torch.float32, 2e-3)])
@pytest.mark.parametrize("gap", [0, 1, 7])
@pytest.mark.parametrize(
    "shape", [(3, 4, 4), (5, 9, 25), (2, 30, 3), (1, 1, 7), (4, 45, 33), (2, 384, 385), (2, 801, 800), (2, 5, 900)]
)
def test_grams_of_several_that_may_have_room_between_them(
    shape: tuple[int, int, int], gap: int, dtype: torch.dtype, error: float
) -> None:
    B, M, N = shape
    flat = torch.from_numpy(RNG.standard_normal(B * (M * N + gap))).to(dtype)
    W_BMN = flat.as_strided(shape, (M * N + gap, N, 1))
    right = W_BMN.mT @ W_BMN if N <= M else W_BMN @ W_BMN.mT
    grams = torch.full((B + 2, *right.shape[1:]), 7.0, dtype=dtype)
    cublas.multiply_each(W_BMN, grams, 1)
    torch.testing.assert_close(grams[1:-1].tril(), right.tril(), rtol=0, atol=error)
    assert (grams[0] == 7).all()
    assert (grams[-1] == 7).all()


@pytest.mark.parametrize(("K", "N"), [(1, 2), (1, 70), (51, 6), (30, 100)])
def test_lower_triangles_are_added_up_from_blocks_however_they_lie(K: int, N: int) -> None:
    wide = torch.from_numpy(RNG.standard_normal((K + 3, N + 5)))
    for block in (wide[:K, :N].contiguous(), wide[:K, :N].mT.contiguous().mT, wide[2 : K + 2, 4 : N + 4]):
        total = torch.full((N, N), 0.5, dtype=torch.float64)
        cublas.add_lower(total, block)
        cublas.add_lower(total, block)
        torch.testing.assert_close(total.tril(), (0.5 + 2 * (block.mT @ block)).tril(), rtol=0, atol=1e-12)


def test_float32_is_not_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """However torch's user has set it for the process; NVIDIA's containers of torch allow it."""
    staged(monkeypatch, 1 << 13)
    monkeypatch.setattr(cublas, "takes", lambda gram: True)
    W = RNG.standard_normal((200, 120)).astype(np.float32)
    expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
    for Ws in ([W], [W] * 3):  # by blocks, and together
        opened = [lambda: nullcontext([StoredMatrix(W, "F32")])] * len(Ws)
        for found in spectra.compute_many(opened, n=120, device="cpu", precision="float32"):
            assert isinstance(found, spectra.solve.Spectrum)
            assert found.precision == "float32"
            assert np.abs(found.eigs - expected).max() <= 2e-6 * expected[-1]


@pytest.mark.parametrize("by_cublas", [True, False])
@pytest.mark.parametrize("shape", [(45, 33), (33, 45), (7, 5), (5, 5), (400, 33)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_eigenvalues_of_packed_matrices_of_any_size(
    shape: tuple[int, int], dtype: Any, by_cublas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 needs no widening, so that an odd number of elements has room behind it."""
    staged(monkeypatch, 1 << 13)
    monkeypatch.setattr(cublas, "takes", lambda gram: by_cublas)
    Ws = [RNG.standard_normal(shape).astype(dtype) for _ in range(9)]
    word = {8: "F64", 4: "F32", 2: "F16"}[np.dtype(dtype).itemsize]
    opened = [lambda W=W: nullcontext([StoredMatrix(W, word)]) for W in Ws]
    for W, found in zip(Ws, spectra.compute_many(opened, n=min(shape), device="cpu"), strict=True):
        assert isinstance(found, spectra.solve.Spectrum)
        expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        assert np.abs(found.eigs - expected).max() <= 1e-12 * expected[-1]


def test_a_driver_that_knows_no_clusters_can_copy_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CUDA 11.8 none had the call that launches kernels in clusters."""

    class Old:
        def __init__(self, name: str) -> None:
            for call in ("cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent", "cuGetErrorName"):
                setattr(self, call, lambda *given: 0)

    monkeypatch.setattr(ctypes, "PyDLL", Old)
    driver.library.cache_clear()
    try:
        assert driver.library() is not None
        assert not hasattr(driver.library(), "cuLaunchKernelEx")
    finally:
        driver.library.cache_clear()


def test_a_copy_that_is_refused_means_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own refused copies do: its work goes elsewhere."""
    monkeypatch.setattr(driver, "_name", lambda status: "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(RuntimeError) as raised:
        driver.check(1, "a copy to the device", "CUDA error: ")
    assert str(raised.value) == "CUDA error: CUDA_ERROR_INVALID_VALUE: a copy to the device failed"
    assert policy.trouble(raised.value) == "device"
    monkeypatch.setattr(driver, "_name", lambda status: "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError) as raised:
        driver.check(2, "a copy to the device", "CUDA error: ")
    assert policy.trouble(raised.value) == "memory"
