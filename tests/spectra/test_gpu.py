"""On a GPU: each batched solver against float64 SVD on the CPU, and what happens without memory or convergence."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardesd
from shardesd import spectra
from shardesd.checkpoint import StoredMatrix
from shardesd.engine import Device, Engine, Task
from shardesd.spectra import cublas, cusolver, driver, eigen, staging, two_stage

pytestmark = pytest.mark.gpu


def kinds(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    W = rng.standard_normal((n, n + n // 2))
    return {
        "gaussian": W,
        "heavy": rng.standard_t(1.5, W.shape),
        "low rank": W[:, :2] @ W[:2],
        "zero rows": np.where(np.arange(n)[:, None] % 3 == 0, 0.0, W),
        "duplicate rows": W[np.arange(n) // 2],
        "clustered": np.eye(n, n + n // 2) + 1e-9 * W,
        "graded": W * np.logspace(0, -12, n)[:, None],
        "identity": np.eye(n, n + n // 2),
        "zero": 0 * W,
        "all equal": np.ones(W.shape),
        "bf16": (W.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64),
        "block diagonal": np.where((np.arange(n)[:, None] // 7) == (np.arange(n + n // 2) // 7), W, 0.0),
        "tridiagonal": np.where(np.abs(np.arange(n)[:, None] - np.arange(n + n // 2)) <= 1, W, 0.0),
    }


def solvers() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    found = {"engine's choice": lambda grams: torch.from_numpy(eigen.eigvalsh_many(grams).eigs)}
    if two_stage.unavailable_reason(torch.device("cuda", 0)) is None:

        def ours(grams: torch.Tensor) -> torch.Tensor:
            eigs, verdict = two_stage.eigvalsh_batched(grams)
            two_stage.recompute(grams, eigs, verdict)
            return eigs

        found["two_stage"] = ours
    if cusolver.available():
        found["cusolver"] = lambda grams: cusolver.eigvalsh_batched(grams.clone())[0]
    return found


@pytest.mark.parametrize("n", [2, 3, 31, 32, 33, 64, 65, 127, 300, 517])
def test_every_solver_and_kind(n: int) -> None:
    matrices = kinds(n)
    grams = torch.from_numpy(np.stack([W @ W.T for W in matrices.values()])).cuda()
    for solver, solve in solvers().items():
        eigs = solve(grams.clone()).cpu().numpy()
        for at, (kind, W) in enumerate(matrices.items()):
            expected = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
            error = np.abs(np.maximum(eigs[at], 0) - expected).max()
            assert error <= 1e-13 * max(expected[-1], 1e-300) * 10, f"{solver}, {kind}, n = {n}: {error}"


@pytest.mark.parametrize("n", [33, 384, 768, 1000])
def test_what_lies_above_the_diagonal_is_not_read(n: int) -> None:
    """Nothing is computed there, so that it can be anything."""
    W = torch.randn(3, n, n + 50, dtype=torch.float64, device="cuda", generator=torch.Generator("cuda").manual_seed(n))
    grams = W @ W.mT
    expected = torch.linalg.eigvalsh(grams)
    lower = torch.where(torch.ones_like(grams).tril() > 0, grams, torch.nan)
    for name, solve in solvers().items():
        eigs = solve(lower.clone()).to("cuda")
        assert ((eigs - expected).abs().amax(1) <= 1e-12 * expected[:, -1]).all(), name


def test_hopeless_matrices_do_not_harm_the_others_of_their_batch() -> None:
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal((200, 90)).astype(np.float32) for _ in range(12)]
    matrices[3][5, 5] = np.nan
    matrices[7][:] = 0
    matrices[9][0, 0] = np.inf

    def opened(W: np.ndarray) -> Callable[[], object]:
        from contextlib import nullcontext

        return lambda: nullcontext([StoredMatrix(W, "F32")])

    results = spectra.compute_many([opened(W) for W in matrices], n=90, device="cuda:0", resolve=1e-5)
    for at, (W, result) in enumerate(zip(matrices, results, strict=True)):
        if at in (3, 7, 9):
            assert isinstance(result, Exception)
            assert ("all zeros" if at == 7 else "NaN or Inf") in str(result)
        else:
            assert not isinstance(result, Exception)
            expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
            assert np.abs(result.eigs - expected).max() <= 1e-12 * expected[-1]


@pytest.mark.parametrize(("n", "batch"), [(160, 256), (768, 96)])
def test_batches_that_fill_the_gpu_are_solved_in_turn(n: int, batch: int) -> None:
    """Launched by several threads, each on a stream of its own: no λ differs from what a batch alone has."""
    if reason := two_stage.unavailable_reason(torch.device("cuda", 0)):
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(n)
    W = torch.randn(6, batch, n, n + 9, dtype=torch.float64, device="cuda", generator=generator)
    grams = W @ W.mT
    alone = [eigen.eigvalsh_many(gram.clone()) for gram in grams]
    assert eigen._fills(n, batch)

    def in_a_stream(gram: torch.Tensor) -> list[np.ndarray]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [eigen.eigvalsh_many(gram.clone()).eigs for _ in range(5)]

    torch.cuda.synchronize()
    with ThreadPoolExecutor(6) as pool:
        for found, expected in zip(pool.map(in_a_stream, grams), alone, strict=True):
            assert expected.routine == "two_stage"
            assert all(np.array_equal(eigs, expected.eigs) for eigs in found)


def test_no_memory_on_a_real_gpu_means_the_cpu() -> None:
    free, _ = torch.cuda.mem_get_info(0)

    def hungry(device: str) -> str:
        if device != "cpu":
            torch.empty(free * 2, dtype=torch.uint8, device=device)
        return device

    engine = Engine(
        (Device("cuda:0", slots=2),),
        budget=10**9,
        prepare=lambda device: spectra.prepare_worker(device.name, device.threads),
        classify=spectra.trouble,
    )
    outcomes = list(engine.map(Task(key=i, run=hungry if i == 2 else lambda device: device) for i in range(6)))
    assert {o.key: o.value for o in outcomes} == {i: "cpu" if i == 2 else "cuda:0" for i in range(6)}


def test_no_convergence_falls_back_to_the_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(grams: torch.Tensor) -> eigen.Eigenvalues:
        return eigen.Eigenvalues(np.full(grams.shape[:2], np.nan), "two_stage", [0])

    monkeypatch.setattr("shardesd.spectra.solve.eigvalsh_many", diverge)
    W = np.random.default_rng(1).standard_normal((50, 80)).astype(np.float32)
    from contextlib import nullcontext

    (result,) = spectra.compute_many([lambda: nullcontext([StoredMatrix(W, "F32")])], n=50, device="cuda:0")
    assert not isinstance(result, Exception)
    assert (result.solver, result.routine, result.recomputed) == ("svd", "svd", True)
    expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
    assert np.abs(result.eigs - expected).max() <= 1e-12 * expected[-1]


def test_repeated_batches_are_bit_identical() -> None:
    grams = torch.from_numpy(np.stack([W @ W.T for W in kinds(300).values()])).cuda()
    first = eigen.eigvalsh_many(grams.clone()).eigs
    assert all(np.array_equal(first, eigen.eigvalsh_many(grams.clone()).eigs) for _ in range(1000))


FIRST_USE = """
import sys
import shardesd
shardesd.scan(sys.argv[1], device=sys.argv[2], cache=False, out=sys.argv[3])
"""


def test_threads_of_all_cards_find_the_batched_solver_at_its_first_use(tmp_path: Path) -> None:
    """A process of its own each time: what goes wrong does so while the libraries are loaded."""
    if eigen.why_not_batched(0):
        pytest.skip("no batched solver on this card")
    rng = np.random.default_rng(5)
    weights = {f"layers.{i}.fc.weight": rng.standard_normal((900, 900)).astype(np.float32) for i in range(64)}
    save_file(weights, tmp_path / "model.safetensors")
    cards = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    for attempt in range(4):
        out = tmp_path / str(attempt)
        subprocess.run([sys.executable, "-c", FIRST_USE, str(tmp_path), cards, str(out)], check=True)
        (path,) = (out / "runs").glob("*.json")
        run = json.loads(path.read_bytes())
        assert run["eigensolvers"] == {"two_stage": 64}, run["notes"]


def test_the_card_counts_for_the_statistics_what_it_is_sent(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    shapes = [(300, 200), (200, 300), (200, 200), (20_000, 1000), (1000, 20_000), *[(64, 48)] * 20]
    weights = {f"layers.{i}.fc.weight": rng.standard_normal(shape) * 0.02 + 0.1 for i, shape in enumerate(shapes)}
    weights["layers.3.fc.weight"][::7] = 1e-9
    for dtype in (np.float32, np.float16, np.float64):
        folder = tmp_path / np.dtype(dtype).name
        folder.mkdir()
        save_file({name: W.astype(dtype) for name, W in weights.items()}, folder / "model.safetensors")
        found, expected = (
            shardesd.scan(folder, device=device, cache=False, stats=True, max_aspect=0).stats
            for device in ("cuda:0", "cpu")
        )
        assert found is not None
        assert expected is not None
        for column in ("mean", "std", "var", "min", "max", "sparsity"):
            np.testing.assert_allclose(found[column], expected[column], rtol=1e-9, err_msg=column)


def test_a_result_that_is_denied_is_counted_in_the_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if eigen.why_not_batched(0):
        pytest.skip("no batched solver on this card")
    solve = two_stage.eigvalsh_batched

    def doubted(grams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        eigs, verdicts = solve(grams)
        verdicts[0] |= two_stage.TRACE
        eigs[0] = 0.0
        return eigs, verdicts

    rng = np.random.default_rng(2)
    weights = {f"layers.{i}.fc.weight": rng.standard_normal((300, 200)).astype(np.float32) for i in range(6)}
    expected = shardesd.scan(weights, device="cpu", cache=False).spectra
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr(two_stage, "eigvalsh_batched", doubted)
    result = shardesd.scan(tmp_path, device="cuda:0", cache=False, out=tmp_path / "out")
    (path,) = (tmp_path / "out" / "runs").glob("*.json")
    run = json.loads(path.read_bytes())
    assert run["eigensolvers"]["eigvalsh"] >= run["recomputed"] >= 1  # one left by itself is eigvalsh's anyway
    assert sum(run["eigensolvers"].values()) == 6
    for name, eigs in result.spectra.items():
        assert np.abs(eigs - expected[name]).max() <= 1e-12 * expected[name][-1]


def test_a_solver_that_cannot_be_launched_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigen, "_missing", {})

    def refused(grams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("CUDA_LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setattr(two_stage, "eigvalsh_batched", refused)
    matrices = kinds(200)
    grams = torch.from_numpy(np.stack([W @ W.T for W in matrices.values()])).cuda()
    found = eigen.eigvalsh_many(grams)
    assert found.routine != "two_stage"
    for eigs, W in zip(found.eigs, matrices.values(), strict=True):
        expected = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
        assert np.abs(np.maximum(eigs, 0) - expected).max() <= 1e-12 * max(expected[-1], 1e-300)


@pytest.mark.parametrize(("K", "N"), [(1, 2), (1, 700), (513, 64), (300, 1000), (1024, 4096)])
def test_lower_triangles_are_added_up_from_blocks_however_they_lie(K: int, N: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn(K + 3, N + 5, dtype=torch.float64, device="cuda", generator=generator)
    as_it_is, transposed = wide[:K, :N].contiguous(), wide[:K, :N].mT.contiguous().mT
    for block in (
        as_it_is,
        transposed,
        wide[2 : K + 2, 4 : N + 4],
        wide.flatten()[: N * (K + 2)].view(N, -1)[:, :K].mT,
    ):
        total = torch.full((N, N), 0.5, dtype=torch.float64, device="cuda")
        cublas.add_lower(total, block)
        cublas.add_lower(total, block)
        right = 0.5 + 2 * (block.mT @ block)
        torch.testing.assert_close(total.tril(), right.tril(), rtol=0, atol=1e-11)


def test_products_of_a_batch_are_torch_s() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    B, N, columns = 5, 96, 32
    A_BNN = torch.randn(B, N, N, dtype=torch.float64, device="cuda", generator=generator)
    W_BNc = torch.randn(B, N, columns, dtype=torch.float64, device="cuda", generator=generator)
    Z_BNc = torch.zeros_like(W_BNc)
    multiply = cublas.batched(columns, B)
    for s in (0, 32, 64):
        at = [A_BNN[0, s, s].data_ptr(), W_BNc[0, s].data_ptr(), Z_BNc[0, s].data_ptr()]
        multiply(*at, N, N - s)
        torch.testing.assert_close(Z_BNc[:, s:], A_BNN[:, s:, s:] @ W_BNc[:, s:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 40, 40), (5, 96, 250), (2, 300, 33), (1, 1, 7), (4, 768, 2048), (3, 900, 777)])
def test_grams_of_several_at_once(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    W_BMN = torch.randn(*shape, dtype=torch.float64, device="cuda", generator=generator)
    right = W_BMN.mT @ W_BMN if shape[2] <= shape[1] else W_BMN @ W_BMN.mT
    grams = torch.full((shape[0] + 2, *right.shape[1:]), 7.0, dtype=torch.float64, device="cuda")
    padded = torch.nn.functional.pad(W_BMN.flatten(1), (0, 3)).flatten()
    for given in (W_BMN, padded.as_strided(shape, (shape[1] * shape[2] + 3, shape[2], 1))):
        grams[1:-1] = 7
        cublas.multiply_each(given, grams, 1)
        torch.testing.assert_close(grams[1:-1].tril(), right.tril(), rtol=0, atol=1e-11)
    assert (grams[0] == 7).all()
    assert (grams[-1] == 7).all()


@pytest.mark.parametrize("by", ["driver", "torch"])
def test_bytes_arrive_in_order_and_are_not_overtaken(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer is used again and again while what came before is still worked on."""
    if by == "torch":
        monkeypatch.setattr(driver, "library", lambda: None)
    device = torch.device("cuda", torch.cuda.current_device())
    shared = staging.Staging(device)
    sums = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for number in range(60):
            buffer = shared.take()
            buffer.here.fill_(number)
            there = shared.send(buffer, staging.UPLOAD_BYTES - number).flat[: staging.UPLOAD_BYTES - number]
            torch.cuda._sleep(3_000_000)  # work that takes longer than the next copies
            sums.append(there.sum(dtype=torch.int64))
            shared.worked(buffer)
            shared.give(buffer)
    torch.cuda.synchronize()
    assert [int(one) for one in sums] == [number * (staging.UPLOAD_BYTES - number) for number in range(60)]


def test_what_is_sent_is_pinned_and_kept_for_the_next() -> None:
    """Or copies would take several times as long, with the interpreter's lock held."""
    device = torch.device("cuda", torch.cuda.current_device())
    first = staging.Staging(device)
    buffer = first.take()
    first.send(buffer, 1000)
    address = buffer.here.data_ptr()
    assert buffer.here.is_pinned()
    del buffer, first
    gc.collect()
    again = staging.Staging(device)
    held = [again.take() for _ in range(staging.BUFFERS)]
    assert address in [buffer.here.data_ptr() for buffer in held]
    assert len({buffer.here.data_ptr() for buffer in held}) == staging.BUFFERS


def test_a_call_that_the_driver_refuses_is_told_in_its_words() -> None:
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: a copy failed"):
        driver.check(driver.library().cuMemcpyHtoDAsync_v2(0, 0, 64, None), "a copy")


def test_a_refused_product_is_told_in_torch_s_words() -> None:
    with pytest.raises(
        RuntimeError, match="CUBLAS_STATUS_INVALID_VALUE when calling cublasDgemmStridedBatched"
    ) as told:
        cublas.batched(-1, 1)(0, 0, 0, 8, 8)
    assert spectra.trouble(told.value) == "task"


@pytest.mark.parametrize("together", [False, True])
def test_float32_is_never_tf32(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However torch's user has set it for the process; NVIDIA's containers of torch allow it."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    W = np.random.default_rng(0).standard_normal((3000, 600)).astype(np.float32)
    count = 3 if together else 1
    result = shardesd.scan(
        {f"layers.{i}.up_proj.weight": torch.from_numpy(W * 2.0**i) for i in range(count)},
        **{"device": "cuda:0", "precision": "float32", "cache": False},
    )
    expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
    assert len(result.spectra) == count
    for i in range(count):
        eigs = result.spectra[f"layers.{i}.up_proj"] / 4.0**i
        assert np.abs(eigs - expected).max() <= 2e-6 * expected[-1]


@pytest.mark.parametrize("n", [4096, 8192])
def test_others_run_while_a_device_stands_still(n: int) -> None:
    """A stream takes about 1,000 launches; the next one waits, and must not keep the interpreter's lock."""
    if two_stage.unavailable_reason(torch.device("cuda", 0)) is not None:
        pytest.skip("the batched solver can't run here")
    G = torch.randn(1, n, n, dtype=torch.float64, device="cuda")
    G += G.mT.clone()
    for _ in range(2):
        two_stage.eigvalsh_batched(G)
        torch.cuda.synchronize()
    over, longest = threading.Event(), [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.002)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    torch.cuda._sleep(4_000_000_000)  # two seconds and more
    two_stage.eigvalsh_batched(G)
    torch.cuda.synchronize()
    over.set()
    ticking.join()
    assert longest[0] < 0.5


@pytest.mark.skipif(not cusolver.available() if torch.cuda.is_available() else True, reason="needs XsyevBatched")
def test_threads_that_come_and_go_leave_no_handles_behind() -> None:
    G = torch.randn(8, 64, 64, dtype=torch.float64, device="cuda")
    G += G.mT.clone()

    def once() -> None:
        torch.cuda.set_device(0)
        cusolver.eigvalsh_batched(G.clone())

    def left(threads: int) -> int:
        for _ in range(threads):
            thread = threading.Thread(target=once)
            thread.start()
            thread.join()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(0)[0])

    before = left(2)
    assert before - left(20) < 1 << 25
