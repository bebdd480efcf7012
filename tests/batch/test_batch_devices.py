"""The GPUs of a batch when they are refused, lost, left or counted otherwise: with fakes of NVML and CUDA."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shardesd.batch import devices
from shardesd.engine import Device, SharedEngine, Task, Visible, discover
from shardesd.events import BatchEvent
from shardesd.options import GpuOptions, ScanOptions

UUIDS = [f"{number:08x}-1111-2222-3333-444444444444" for number in range(3)]
HEX = [uuid.replace("-", "") for uuid in UUIDS]


def visible(*prefixed: str) -> list[Visible]:
    return [Visible(index, object(), uuid, uuid) for index, uuid in enumerate(prefixed)]


def test_gpus_are_watched_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = visible(*(f"GPU-{uuid}" for uuid in UUIDS))
    for told in ([HEX[2], HEX[0], HEX[1]], [HEX[1]]):
        monkeypatch.setattr(devices, "cuda_uuids", lambda count, told=told: told)
        found = devices._as_cuda_counts(gpus, len(told))
        assert found is not None
        assert [(gpu.index, gpu.uuid.replace("-", "")) for gpu in found] == [
            (index, f"GPU{uuid}") for index, uuid in enumerate(told)
        ]


def test_a_part_of_a_gpu_is_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_uuids", lambda count: ["f" * 32])
    assert devices._as_cuda_counts(visible(f"GPU-{UUIDS[0]}"), 1) is None
    assert devices._as_cuda_counts(visible("MIG-ffffffff-ffff-ffff-ffff-ffffffffffff"), 1) is not None
    assert devices._as_cuda_counts(visible(f"MIG-GPU-{UUIDS[0]}/1/0"), 1) is not None


def test_where_cuda_tells_no_uuids_the_number_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_uuids", lambda count: None)
    gpus = visible(f"GPU-{UUIDS[0]}")
    assert devices._as_cuda_counts(gpus, 1) == gpus
    assert devices._as_cuda_counts(gpus, 2) is None


def cuda(monkeypatch: pytest.MonkeyPatch, **calls: Callable[..., Any]) -> None:
    """A torch whose CUDA answers so."""
    fake = {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 2}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**(fake | calls))))


def test_one_gpu_that_cuda_refuses_keeps_nobody_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In exclusive mode, or where its memory is full: said when it is to be used, and no thread dies of it."""

    def free(name: str) -> tuple[int, int]:
        if name == "cuda:0":
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return 10**9, 10**9

    cuda(monkeypatch, mem_get_info=free, memory_reserved=lambda name: 3 * 10**8, memory_allocated=lambda name: 10**8)
    first, second = discover("cuda", 0.5)
    assert (first.name, first.budget) == ("cuda:0", 0)
    assert (second.name, second.budget) == ("cuda:1", 0.6 * 10**9)  # with what torch keeps for the next scan


def engine_on(
    monkeypatch: pytest.MonkeyPatch, first: tuple[Device, ...]
) -> tuple[Any, Callable[[tuple[Device, ...]], None], list[BatchEvent]]:
    """A batch's engine on devices that a test changes by hand."""
    use: list[Callable[[tuple[Device, ...]], None]] = []
    said: list[BatchEvent] = []

    @contextmanager
    def watched(scan: ScanOptions, gpu: GpuOptions, *, emit: Any, use: Any) -> Iterator[None]:
        using.append(use)
        use(first)
        yield None

    using = use
    monkeypatch.setattr(devices, "_watched", watched)
    monkeypatch.setattr("shardesd.spectra.prepare_worker", lambda *given: None)
    context = devices.shared_engine(
        ScanOptions(),
        GpuOptions(),
        emit=said.append,
        on_busy=lambda *given: None,
        on_change=lambda: None,
    )
    return context, lambda these: using[0](these), said


def outcomes(engine: SharedEngine, tasks: Iterator[Task[int, str]], stop: threading.Event, found: list[Any]) -> None:
    try:
        found.extend(engine.map(tasks, stop=stop))
    except Exception as error:
        found.append(error)


def test_a_gpu_that_is_lost_ends_no_scan_though_nothing_can_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After such an error torch raises it anew whatever it is asked, of any GPU."""
    lost = threading.Event()

    def empty_cache() -> None:
        if lost.is_set():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", empty_cache)
    two = (Device("cuda:0"), Device("cuda:1"))
    context, use, said = engine_on(monkeypatch, two)

    def run(device: str) -> str:
        time.sleep(0.02)
        if device == "cuda:0":
            lost.set()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return device

    with context as (engine, _):
        found: list[Any] = []
        given = (Task(key=i, run=run) for i in range(60))
        scan = threading.Thread(target=outcomes, args=(engine, given, threading.Event(), found), daemon=True)
        scan.start()
        assert lost.wait(10)
        use(two[1:])
        scan.join(30)
    assert [type(outcome).__name__ for outcome in found] == ["Outcome"] * 60
    assert {outcome.value for outcome in found} == {"cuda:1"}
    assert any("cuda:0" in str(event) for event in said)


def test_the_last_gpu_that_is_left_is_given_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(devices, "_give_back", given_back.release)
    context, use, _ = engine_on(monkeypatch, (Device("cuda:0"),))
    running, at_work = threading.Event(), []

    def run(device: str) -> str:
        running.set()
        at_work.append(device)
        time.sleep(0.01)
        at_work.remove(device)
        return device

    with context as (engine, _watch):
        stop, found = threading.Event(), list[Any]()
        given = (Task(key=i, run=run) for i in range(10**6))
        scan = threading.Thread(target=outcomes, args=(engine, given, stop, found), daemon=True)
        scan.start()
        assert running.wait(10)
        while given_back.acquire(blocking=False):  # before it began
            pass
        use(())
        assert given_back.acquire(timeout=10)
        assert not at_work
        stop.set()
        scan.join(10)
