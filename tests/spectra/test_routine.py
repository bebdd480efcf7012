"""Which solver is taken for a batch, and what is said where the fastest one can't be; without a GPU."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardesd
from shardesd import scanner, spectra
from shardesd.engine import Device, Engine, Task
from shardesd.events import Event, Notice
from shardesd.spectra import cublas, cusolver, eigen, two_stage
from shardesd.spectra.two_stage import loaded

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card whose float64 is fast, of which nothing is known yet."""
    monkeypatch.setattr(eigen, "_missing", {})
    monkeypatch.setattr(scanner, "_told", set())
    monkeypatch.setattr(eigen, "single_to_double_ratio", lambda index: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    loaded.unavailable_reason.cache_clear()
    yield
    loaded.unavailable_reason.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compile."""

    class Kernels:
        largest_n = 8192

    monkeypatch.setattr(loaded, "kernels", lambda index: Kernels())
    monkeypatch.setattr(cusolver, "available", lambda: True)


def test_without_torch_s_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert "the cuBLAS that torch uses is not found" in str(spectra.why_not_batched(0))


def no_package(index: int) -> Any:
    raise ImportError("No module named 'cuda.core'")


def no_compiler(index: int) -> Any:
    raise RuntimeError("NVRTC_ERROR_COMPILATION: chase.cu(3): error")


class CUDAError(Exception):
    """cuda-core's: no RuntimeError."""


MISSING = 'Failure finding "libnvrtc.so.13": No such file: libnvrtc.so.13\n  listdir("/usr/lib"):\n    a.so\n'
BUILTINS = """7: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE, compilation log:

nvrtc: error: failed to open libnvrtc-builtins.so.13.5.
  Make sure that libnvrtc-builtins.so.13.5 is installed correctly."""
LOG = """6: NVRTC_ERROR_COMPILATION, compilation log:

default_program(12): warning #177-D: variable "unused" was declared but never referenced
  int unused; // an error of rounding
      ^

default_program(335): error: identifier "Tile" is   undefined
  __global__ void f() { Tile t; }
                        ^

1 error detected in the compilation of "default_program".
"""


@pytest.mark.parametrize(
    ("n", "batch", "taken"),
    [
        *((1, 8, False), (2, 8, False), (32, 64, False), (64, 64, False)),
        *((65, 31, False), (65, 32, True), (128, 2, False), (129, 2, True), (1024, 64, True)),
        *((767, 1, False), (768, 1, True), (4096, 1, True), (8192, 4, True), (8193, 2, False)),
    ],
)
def test_sizes(compiled: None, n: int, batch: int, taken: bool) -> None:
    """As measured (docs/performance.md)."""
    assert eigen._two_stage_takes(CUDA, n, batch) is taken


def test_small_batches_are_taken_where_cusolver_has_no_batched_solver(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cusolver, "available", lambda: False)
    assert eigen._two_stage_takes(CUDA, 64, 8)
    assert not eigen._two_stage_takes(CUDA, 64, 1)
    assert not eigen._two_stage_takes(CUDA, 16, 8)


def test_a_card_with_slow_float64_never_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigen, "single_to_double_ratio", lambda index: 64)
    monkeypatch.setattr(loaded, "kernels", no_compiler)
    assert not eigen._two_stage_takes(CUDA, 1024, 8)
    assert spectra.why_not_batched(0) == "its float64 is slow"
    assert spectra.missing_batched(0) is None, "it is no fault"


@pytest.mark.parametrize(
    ("kernels", "capability", "cuda", "said"),
    [
        (no_package, (9, 0), "13.0", "pip install 'shardesd[gpu]'"),
        (no_compiler, (9, 0), "13.0", "NVRTC_ERROR_COMPILATION"),
        (no_compiler, (8, 0), "13.0", "compute capability 9.0"),
        (no_compiler, (9, 0), None, "CUDA build of torch"),
    ],
)
def test_why_not(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, capability: tuple[int, int], cuda: str | None, said: str
) -> None:
    monkeypatch.setattr(loaded, "kernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    reason = two_stage.unavailable_reason(CUDA)
    assert reason is not None
    assert said in reason
    assert spectra.missing_batched(0) is None, "not asked for yet"
    assert not eigen._two_stage_takes(CUDA, 1024, 8)
    assert spectra.missing_batched(0) == reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CUDAError(LOG), """did not compile or load: default_program(335): error: identifier "Tile" is undefined"""),
        (CUDAError("\n\n CUDA_ERROR_NO_BINARY_FOR_GPU:\tno\n kernel"), "load: CUDA_ERROR_NO_BINARY_FOR_GPU: no"),
        (CUDAError(""), "load: CUDAError"),
        (CUDAError("error: " + 4000 * "x"), "x…"),
        (ImportError("cannot import name 'Device'\nfrom 'cuda.core'"), "(cannot import name 'Device')"),
        (RuntimeError(MISSING), """(Failure finding "libnvrtc.so.13": No such file: libnvrtc.so.13)"""),
        (CUDAError(BUILTINS), "(nvrtc: error: failed to open libnvrtc-builtins.so.13.5.)"),
    ],
)
def test_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    """The logs are NVRTC 13.5's own."""

    def kernels(index: int) -> Any:
        raise error

    monkeypatch.setattr(loaded, "kernels", kernels)
    reason = str(spectra.why_not_batched(0))
    assert reason.endswith(said)
    assert reason == " ".join(reason.split())
    assert len(reason) < 350
    assert ("pip install 'shardesd[gpu]'" in reason) == ("libnvrtc" in said or isinstance(error, ImportError))
    assert ("nvidia-cuda-nvrtc" in reason) == ("libnvrtc" in said)


def test_a_refused_launch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(grams: torch.Tensor) -> Any:
        raise CUDAError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: a launch\n did not occur" + 4000 * "x")

    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: True)
    monkeypatch.setattr(two_stage, "eigvalsh_batched", refused)
    monkeypatch.setattr(cusolver, "available", lambda: False)
    monkeypatch.setattr(eigen, "_index", lambda device: 0)
    eigen.eigvalsh_many(torch.eye(40).expand(3, 40, 40))
    assert spectra.missing_batched(0) == (
        "the batched eigensolver failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: a launch"
    )


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed"), "memory"),
        (CUDAError("1: NVRTC_ERROR_OUT_OF_MEMORY"), "memory"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "memory"),
        (MemoryError(), "memory"),
        (CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel"), "device"),
        (CUDAError("CUDA_ERROR_ECC_UNCORRECTABLE: This indicates"), "device"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device"),
    ],
)
def test_trouble_while_the_kernels_load_goes_to_the_engine_and_is_forgotten(
    compiled: None, monkeypatch: pytest.MonkeyPatch, error: Exception, trouble: str
) -> None:
    works = loaded.kernels

    def kernels(index: int) -> Any:
        raise error

    monkeypatch.setattr(loaded, "kernels", kernels)
    for ask in (lambda: eigen._two_stage_takes(CUDA, 1024, 8), lambda: spectra.why_not_batched(0)):
        with pytest.raises(type(error)) as caught:
            ask()
        assert spectra.trouble(caught.value) == trouble
    assert spectra.missing_batched(0) is None
    monkeypatch.setattr(loaded, "kernels", works)
    assert eigen._two_stage_takes(CUDA, 1024, 8), "there is memory again"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`", "memory"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "memory"),
        ("std::bad_alloc", "memory"),
        ("[Errno 12] Cannot allocate memory", "memory"),
        ("can't start new thread", "memory"),
        ("CUDA_ERROR_INVALID_CONTEXT: invalid device context", "device"),
        ("CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized", "device"),
        ("CUDA_ERROR_MPS_RPC_FAILURE: MPS client failed to connect", "device"),
        ("CUDA error: an illegal memory access was encountered", "device"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasDgemm`", "device"),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", "task"),
        ("CUDA error: invalid configuration argument", "task"),
    ],
)
def test_what_an_error_means(text: str, meant: str) -> None:
    assert spectra.trouble(RuntimeError(text)) == meant


@pytest.mark.parametrize(
    ("status", "meant"), [(1, "memory"), (2, "memory"), (3, "task"), (6, "device"), (7, "device"), (9, "task")]
)
def test_what_cusolver_s_status_means(status: int, meant: str) -> None:
    with pytest.raises(RuntimeError, match="CUSOLVER_STATUS_") as raised:
        cusolver._check(status, "XsyevBatched")
    assert spectra.trouble(raised.value) == meant


def test_what_cusolver_refuses_is_solved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    W = np.random.default_rng(0).standard_normal((3, 40, 50))
    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: False)
    monkeypatch.setattr(eigen, "_cusolver_takes", lambda n, batch: True)
    monkeypatch.setattr(cusolver, "eigvalsh_batched", lambda grams: cusolver._check(9, "XsyevBatched"))
    eigs, routine, again = eigen.eigvalsh_many(torch.from_numpy(W @ W.swapaxes(1, 2)))
    assert (routine, list(again)) == ("eigvalsh", [])
    expected = np.linalg.svd(W, compute_uv=False)[:, ::-1] ** 2
    assert np.abs(eigs - expected).max() <= 1e-12 * expected.max()


def test_what_the_driver_refuses_is_no_lost_device() -> None:
    """A kernel's attribute, or machine code that is too new: another solver takes over on the same GPU."""
    for words in ("cuKernelSetAttribute failed: CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: …"):
        for error in (RuntimeError(words), CUDAError(words)):
            assert spectra.trouble(error) == "task"


def test_the_engine_tries_again_where_there_was_no_memory_for_the_kernels(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, tries = loaded.kernels, iter(range(100))

    def kernels(index: int) -> Any:
        if next(tries) == 0:
            raise CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed")
        return works(index)

    monkeypatch.setattr(loaded, "kernels", kernels)
    engine = Engine((Device("cuda:0"),), budget=10**9, classify=spectra.trouble)
    outcomes = list(engine.map(Task(key=i, run=lambda device: eigen._two_stage_takes(CUDA, 1024, 1)) for i in range(3)))
    assert [(outcome.value, outcome.device) for outcome in outcomes] == [(True, "cuda:0")] * 3


def test_threads_that_need_the_kernels_at_once_load_them_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first found no batched solver, for good, when each imported cuda-core and found half a package."""
    made: list[int] = []
    compiled: list[list[bytes]] = []

    class Kernels:
        def __init__(self, index: int, codes: object) -> None:
            made.append(index)

    def compile_code(arch: str) -> list[bytes]:
        compiled.append([b""])
        time.sleep(0.05)
        assert len(compiled) == 1
        return compiled[0]

    monkeypatch.setattr(cublas, "available", lambda: True)
    monkeypatch.setattr(loaded, "Kernels", Kernels)
    monkeypatch.setattr(loaded, "compiled_code", compile_code)
    monkeypatch.setattr(loaded, "kept_code", lambda arch: compiled[0] if made else None)
    monkeypatch.setattr(loaded, "_arch", lambda index: "sm_90")
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(loaded.kernels, [0, 1] * 8))
    assert sorted(made) == [0, 1]
    assert [kernels is found[at % 2] for at, kernels in enumerate(found)] == [True] * 16


def test_a_device_that_does_not_answer_keeps_nobody_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Kernels:
        def __init__(self, index: int, codes: object) -> None:
            assert index or answers.wait(30)

    monkeypatch.setattr(cublas, "available", lambda: True)
    monkeypatch.setattr(loaded, "Kernels", Kernels)
    monkeypatch.setattr(loaded, "kept_code", lambda arch: [b""])
    monkeypatch.setattr(loaded, "_arch", lambda index: "sm_90")
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(loaded.kernels, 0)
        assert isinstance(pool.submit(loaded.kernels, 1).result(10), Kernels)
        assert not first.done()
        answers.set()
        assert isinstance(first.result(10), Kernels)


def test_one_that_cannot_be_launched_is_replaced_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refused(grams: torch.Tensor) -> Any:
        asked.append(len(grams))
        raise RuntimeError("LAUNCH_OUT_OF_RESOURCES")

    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: eigen.why_not_batched(0) is None)
    monkeypatch.setattr(two_stage, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(two_stage, "eigvalsh_batched", refused)
    monkeypatch.setattr(cusolver, "available", lambda: False)
    monkeypatch.setattr(eigen, "_index", lambda device: 0)
    W = np.random.default_rng(0).standard_normal((3, 50, 40))
    for _ in range(2):
        found = eigen.eigvalsh_many(torch.from_numpy(W.swapaxes(1, 2) @ W))
        assert found.routine == "eigvalsh"
        for eigs, w in zip(found.eigs, W, strict=True):
            assert np.allclose(eigs, np.linalg.svd(w, compute_uv=False)[::-1] ** 2, rtol=1e-10)
    assert asked == [3]
    assert "LAUNCH_OUT_OF_RESOURCES" in str(spectra.missing_batched(0))


def test_no_memory_is_not_taken_for_a_broken_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(grams: torch.Tensor) -> Any:
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: the API call failed")

    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: True)
    monkeypatch.setattr(two_stage, "eigvalsh_batched", full)
    with pytest.raises(RuntimeError) as caught:
        eigen.eigvalsh_many(torch.eye(40).expand(3, 40, 40))
    assert spectra.trouble(caught.value) == "memory"
    assert spectra.missing_batched(0) is None


def test_tiny_ones_are_solved_together_and_a_hopeless_one_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: False)
    W = np.random.default_rng(1).standard_normal((5, 30, 20))
    expected = np.linalg.svd(W, compute_uv=False)[:, ::-1] ** 2
    eigvalsh = torch.linalg.eigvalsh

    def diverges(grams: torch.Tensor) -> torch.Tensor:
        if grams.ndim == 3 or torch.equal(grams, grams_all[2]):
            raise torch.linalg.LinAlgError("failed to converge")  # type: ignore[attr-defined]
        return eigvalsh(grams)

    grams_all = torch.from_numpy(W.swapaxes(1, 2) @ W)
    assert np.allclose(eigen.eigvalsh_many(grams_all).eigs, expected, rtol=1e-10)
    monkeypatch.setattr(torch.linalg, "eigvalsh", diverges)
    found = eigen.eigvalsh_many(grams_all).eigs
    assert np.isnan(found[2]).all()
    assert np.allclose(np.delete(found, 2, 0), np.delete(expected, 2, 0), rtol=1e-10)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {f"layers.{i}.fc.weight": rng.standard_normal((60, 40)).astype(np.float32) for i in range(4)}


def provenance(model: Path, out: Path, **options: Any) -> dict[str, Any]:
    shardesd.scan(model, device="cpu", out=out, **options)
    (run,) = (out / "runs").glob("*.json")
    found: dict[str, Any] = json.loads(run.read_bytes())
    return found


def test_the_provenance_counts_what_computed_the_eigenvalues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    save_file(weights(), model / "model.safetensors")
    plain = provenance(model, tmp_path / "plain", cache_dir=cache)
    assert (plain["eigensolvers"], plain["recomputed"]) == ({"eigvalsh": 4}, 0)
    kept = provenance(model, tmp_path / "kept", cache_dir=cache)
    assert (kept["rows_kept"], kept["eigensolvers"]) == (4, {}), "they were computed in another run"
    svd = provenance(model, tmp_path / "svd", solver="svd", cache=False)
    assert svd["eigensolvers"] == {"svd": 4}
    eigvalsh = eigen.eigvalsh_cpu

    def denied(gram: np.ndarray) -> eigen.Eigenvalues:
        return eigvalsh(gram)._replace(routine="two_stage", again=[0])

    monkeypatch.setattr("shardesd.spectra.solve.eigvalsh_cpu", denied)
    again = provenance(model, tmp_path / "denied", cache=False)
    assert (again["eigensolvers"], again["recomputed"]) == ({"eigvalsh": 4}, 4)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """λ that the CPU computes are said to be a GPU's."""
    compute = spectra.compute
    monkeypatch.setattr(
        spectra, "compute", lambda *args, **options: replace(compute(*args, **options), device="cuda:0")
    )


def notices() -> list[str]:
    events: list[Event] = []
    shardesd.scan(weights(), device="cpu", cache=False, on_event=events.append)
    return [event.message for event in events if isinstance(event, Notice)]


NEEDS_PACKAGE = "the batched eigensolver needs cuda-core 1.0 or newer: pip install 'shardesd[gpu]' (…)"


def test_a_missing_solver_is_said_once(on_a_gpu: None) -> None:
    assert notices() == []
    eigen._missing[0] = NEEDS_PACKAGE
    (said,) = notices()
    assert "cuda:0" in said
    assert "shardesd[gpu]" in said
    assert notices() == []


def test_a_missing_solver_is_in_the_notes_of_every_run(on_a_gpu: None, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(weights(), model / "model.safetensors")
    assert provenance(model, tmp_path / "with", cache=False)["notes"] == []
    eigen._missing[0] = NEEDS_PACKAGE
    for out in ("first", "second"):
        (note,) = provenance(model, tmp_path / out, cache=False)["notes"]
        assert note.startswith(f"cuda:0: {NEEDS_PACKAGE}")


def test_two_scans_at_once_say_it_once(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    class Told(set[str]):
        """Looked into by both before either writes, if both may."""

        def __contains__(self, device: object) -> bool:
            found = super().__contains__(device)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return found

    monkeypatch.setattr(scanner, "_told", Told())
    eigen._missing[0] = NEEDS_PACKAGE
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda _: notices(), range(2)))
    assert sorted(map(len, said)) == [0, 1]
