"""What the first threads of a GPU load once, and who waits for it; with a CPU in the GPU's place."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shardesd.spectra import cublas, driver, two_stage, worker

torch = pytest.importorskip("torch")
CPU = torch.device("cpu")


class Gram:
    is_cuda, dtype, device = True, torch.float64, CPU


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_loaded", {})
    monkeypatch.setattr(cublas, "available", lambda: True)


def test_products_wait_until_cublas_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, taken = threading.Event(), threading.Event(), list[bool]()
    bmm = torch.bmm

    def slow(*given: Any) -> Any:
        begun.set()
        assert go.wait(10)
        return bmm(*given)

    assert cublas.takes(Gram()), "nobody is loading it"  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "bmm", slow)
    loading = threading.Thread(target=cublas.load, args=(CPU,))
    loading.start()
    assert begun.wait(10)
    waiting = threading.Thread(target=lambda: taken.append(cublas.takes(Gram())))  # type: ignore[arg-type]
    waiting.start()
    waiting.join(0.1)
    assert not taken
    go.set()
    waiting.join(10)
    loading.join(10)
    assert taken == [True]


def test_what_cannot_be_loaded_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "bmm", no_memory)
    cublas.load(CPU)
    assert cublas.takes(Gram())  # type: ignore[arg-type]


def test_each_of_the_first_two_threads_of_a_gpu_loads_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, str]] = []
    monkeypatch.setattr(worker, "_prepared", {})
    monkeypatch.setattr(worker, "_free_stream", lambda device: None)
    monkeypatch.setattr(worker, "staging_of", lambda device: None)
    monkeypatch.setattr(worker, "loaded_torch", lambda: torch)
    monkeypatch.setattr(torch, "eye", lambda n, **how: None)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda matrix: loaded.append(("eigvalsh", "")))
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given: None)
    monkeypatch.setattr(cublas, "load", lambda device: loaded.append(("cublas", str(device))))
    monkeypatch.setattr(two_stage, "load_kept", lambda device: loaded.append(("kernels", str(device))))
    for device in ("cuda:0", "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:1", "cpu"):
        worker.prepare_worker(device, 1)
    assert loaded == [
        *(("eigvalsh", ""), ("cublas", "cuda:0"), ("kernels", "cuda:0"), ("cublas", "cuda:1"), ("kernels", "cuda:1"))
    ]


def test_without_nvidia_s_driver_torch_has_pinned_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another maker's GPU."""
    monkeypatch.setattr(driver, "library", lambda: None)
    monkeypatch.setattr(driver, "_patient", lambda: pytest.fail("asked for the driver"))
    assert driver.pin(torch.zeros(8))


def test_it_is_pinned_where_the_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    class Patient:
        def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: int) -> int:
            asked.append((address.value, nbytes.value, flags))
            return 1  # refused, which is no fault

    memory = torch.zeros(8)
    monkeypatch.setattr(driver, "library", object)
    monkeypatch.setattr(driver, "_patient", Patient)
    assert not driver.pin(memory)
    assert asked == [(memory.data_ptr(), 32, 1)]
