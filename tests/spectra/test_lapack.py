"""scipy's LAPACK beside torch's, and where it is taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import one_file, random_weights

import shardesd
from shardesd.spectra import banded, eigen, lapack
from shardesd.spectra.blas import empty_gram


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
        assert not lapack.in_two_stages(n, G.dtype)
        eigs = lapack.eigvalsh(G)
        assert eigs is not None
        assert eigs.dtype == dtype
        assert np.all(np.diff(eigs) >= 0)
        assert np.abs(eigs - expected).max() <= bound * expected[-1]


@pytest.mark.parametrize("kind", ["random", "low rank", "graded"])
@pytest.mark.parametrize("n", [2, 31, 32, 33, 34, 65, 200, 257, 530, 2049])
def test_two_stages_give_numpys_eigenvalues(n: int, kind: str) -> None:
    if not banded.available():
        pytest.skip("scipy's library has no dsytrd_sy2sb")
    G = empty_gram(n, np.dtype(np.float64))
    G[:] = gram(n, np.float64, kind)
    expected = np.linalg.eigvalsh(G)
    G[np.triu_indices(n, 1)] = np.nan  # not read
    for exponent in (0, -650, 900):  # as far as a Gram's norm may lie from 1
        eigs = banded.eigvalsh(np.ldexp(G, exponent, order="F"))
        assert eigs is not None
        assert np.all(np.diff(eigs) >= 0)
        assert np.abs(np.ldexp(eigs, -exponent) - expected).max() <= 1e-13 * expected[-1]


def test_matrices_whose_triangle_is_larger_than_the_cache_take_two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banded, "eigvalsh", lambda G: np.zeros(len(G)))
    found = lapack.eigvalsh(empty_gram(2048, np.dtype(np.float64)))
    assert found is not None
    assert (not found.any()) is banded.available()
    assert not lapack.in_two_stages(2047, np.dtype(np.float64))
    assert not lapack.in_two_stages(4096, np.dtype(np.float32))


def test_without_the_first_stage_one_does_all_and_torch_s_the_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lapack, "_on_amd", lambda: True)
    monkeypatch.setattr(banded, "unpublished", lambda name: None)
    assert lapack.faster(2048, np.dtype(np.float64))
    assert not lapack.faster(2049, np.dtype(np.float64))
    G = gram(65, np.float64, "random")
    expected = np.linalg.eigvalsh(G)
    monkeypatch.setattr(lapack, "_TWO_STAGES_N", 2)
    eigs = lapack.eigvalsh(G)
    assert eigs is not None
    assert np.abs(eigs - expected).max() <= 1e-13 * expected[-1]


@pytest.mark.parametrize(
    ("processor", "n", "taken"),
    [
        ("vendor_id\t: AuthenticAMD", 1, True),
        ("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", 2048, True),
        ("vendor_id\t: AuthenticAMD", 8192, True),
        ("vendor_id\t: GenuineIntel", 384, False),
        ("arm", 384, False),
    ],
)
def test_it_is_taken_on_amd(monkeypatch: pytest.MonkeyPatch, processor: str, n: int, taken: bool) -> None:
    monkeypatch.setattr(lapack, "_on_amd", lapack._on_amd.__wrapped__)
    monkeypatch.setattr(lapack, "_processor", lambda: processor)
    monkeypatch.setattr(banded, "available", lambda: True)
    assert lapack.faster(n, np.dtype(np.float64)) is taken
    assert lapack.faster(n, np.dtype(np.float32)) is (taken and n <= 2048)


WITHOUT_TORCH = """
import sys
from shardesd.spectra import lapack
lapack._processor = lambda: "AuthenticAMD"
from shardesd.cli import app
try:
    app(["scan", sys.argv[1], "--out", sys.argv[2], "--no-cache", "--device", sys.argv[3], "--stats"])
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_scan_on_a_cpu_does_without_torch(tmp_path: Path, device: str) -> None:
    """It takes a second to import, and more memory than small models."""
    if device == "auto" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    folder = one_file(tmp_path / "model", random_weights(size=40))
    words = [sys.executable, "-c", WITHOUT_TORCH, str(folder), str(tmp_path / "out"), device]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "summary.csv").exists()


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
    for on_amd in (True, False):
        monkeypatch.setattr(lapack, "_on_amd", lambda answer=on_amd: answer)
        found[on_amd] = shardesd.scan(folder, device="cpu", cache=False).spectra
        assert len(called) == 2
    for name, W in tensors.items():
        expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        for spectra in found.values():
            assert np.abs(spectra[name.removesuffix(".weight")] - expected).max() <= 1e-13 * expected[-1]


def test_what_does_not_converge_is_left_to_the_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lapack, "faster", lambda n, dtype: True)
    monkeypatch.setattr(lapack, "eigvalsh", lambda G: None)
    found = eigen.eigvalsh_cpu(gram(5, np.float64, "random"))
    assert np.isnan(found.eigs).all()
    assert found.eigs.shape == (1, 5)


@pytest.mark.parametrize("first", ["", "import scipy.linalg"])
def test_scipy_s_libraries_come_without_the_rest_of_it_and_the_rest_may_follow(first: str) -> None:
    script = f"""
import sys
{first}
import numpy as np
from shardesd.spectra import fortran
from shardesd.spectra.blas import syrk

gram = np.zeros((3, 3), order="F")
syrk(np.ones((3, 2)), gram, 0.0)
fortran.routine("cython_lapack", "dsyevd", 11)
assert (np.tril(gram) == np.tril(np.full((3, 3), 2.0))).all()
assert ("scipy.linalg" in sys.modules) == {bool(first)}
import scipy.linalg, scipy.optimize, scipy.sparse.linalg
from scipy.linalg import cython_blas, cython_lapack

assert np.allclose(scipy.linalg.svdvals(np.eye(3)), 1)
assert cython_blas is sys.modules["scipy.linalg.cython_blas"]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_scans_that_overlap_share_one_limit_of_threads_and_the_last_takes_it_away() -> None:
    """In a process of its own: the setting is the whole process's."""
    script = """
import numpy as np, threadpoolctl
from shardesd.spectra import blas_threads

threadpoolctl.threadpool_limits(3, user_api="blas")
used = lambda: {one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"}
first, second = blas_threads(1, on_cpu=False), blas_threads(2, on_cpu=True)
first.__enter__()
assert used() == {1}, used()
second.__enter__()  # loads a library
assert used() == {1}, used()
first.__exit__(None, None, None)
assert used() == {2}, used()
third = blas_threads(2, on_cpu=True)
third.__enter__()
second.__exit__(None, None, None)
assert used() == {2}, used()
third.__exit__(None, None, None)
assert 3 in used(), used()  # what was there before; what was loaded since has its own number
"""
    subprocess.run([sys.executable, "-c", script], check=True)
