"""scipy's LAPACK beside torch's, and where it is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import one_file

import shardesd
from shardesd.spectra import eigen, lapack


def gram(n: int, dtype: type, kind: str) -> np.ndarray:
    rng = np.random.default_rng(n)
    W = rng.standard_normal((n, n + n // 2))
    if kind == "low rank":
        W = W[:, : n // 4 + 1]
    elif kind == "graded":
        W *= np.logspace(0, -6, n)[:, None]
    return np.asfortranarray(W @ W.T, dtype)


@pytest.mark.parametrize("kind", ["random", "low rank", "graded"])
@pytest.mark.parametrize("n", [1, 2, 3, 33, 192, 257])
def test_the_eigenvalues_are_numpys(n: int, kind: str) -> None:
    for dtype, bound in ((np.float64, 1e-13), (np.float32, 1e-5)):
        G = gram(n, dtype, kind)
        expected = np.linalg.svd(G.astype(np.float64), compute_uv=False)[::-1]
        G[np.triu_indices(n, 1)] = np.nan  # not read
        eigs = lapack.eigvalsh(G)
        assert eigs is not None
        assert eigs.dtype == dtype
        assert np.all(np.diff(eigs) >= 0)
        assert np.abs(eigs - expected).max() <= bound * expected[-1]


@pytest.mark.parametrize(
    ("mkl", "processor", "n", "taken"),
    [
        (True, "vendor_id\t: AuthenticAMD", 384, True),
        (True, "AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", 2048, True),
        (True, "vendor_id\t: AuthenticAMD", 2049, False),
        (True, "vendor_id\t: AuthenticAMD", 64, False),
        (True, "vendor_id\t: GenuineIntel", 384, False),
        (False, "vendor_id\t: AuthenticAMD", 384, False),
        (False, "arm", 384, False),
    ],
)
def test_it_is_taken_where_torch_has_mkl_on_amd(
    monkeypatch: pytest.MonkeyPatch, mkl: bool, processor: str, n: int, taken: bool
) -> None:
    monkeypatch.setattr(lapack, "_mkl_on_amd", lapack._mkl_on_amd.__wrapped__)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(lapack, "_processor", lambda: processor)
    assert lapack.faster(n) is taken


def test_a_scan_gives_the_same_whichever_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"layers.{i}.fc.weight": rng.standard_normal((200, 300)).astype(np.float32) for i in range(2)}
    folder = one_file(tmp_path / "model", tensors)
    called: list[int] = []
    eigvalsh = lapack.eigvalsh

    def noted(G: np.ndarray) -> np.ndarray | None:
        called.append(len(G))
        return eigvalsh(G)

    monkeypatch.setattr(lapack, "eigvalsh", noted)
    found = {}
    for mkl_on_amd in (True, False):
        monkeypatch.setattr(lapack, "_mkl_on_amd", lambda answer=mkl_on_amd: answer)
        found[mkl_on_amd] = shardesd.scan(folder, device="cpu", cache=False).spectra
        assert len(called) == 2
    for name, W in tensors.items():
        expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        for spectra in found.values():
            assert np.abs(spectra[name.removesuffix(".weight")] - expected).max() <= 1e-13 * expected[-1]


def test_what_does_not_converge_is_left_to_the_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lapack, "faster", lambda n: True)
    monkeypatch.setattr(lapack, "eigvalsh", lambda G: None)
    found = eigen.eigvalsh(torch.from_numpy(gram(5, np.float64, "random")))
    assert np.isnan(found.eigs).all()
    assert found.eigs.shape == (1, 5)
