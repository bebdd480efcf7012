"""What counts as hung: a group, a thread that is made ready; and what doesn't: a process that was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from shardesd import keys
from shardesd.engine import Device, Engine, Outcome, SharedEngine, Task, Trouble, attempt, places, queue
from shardesd.spectra import worker

GPUS = (Device("cuda:0", slots=2), Device("cuda:1", slots=2))


def classify(error: Exception) -> Trouble:
    return "memory" if "memory" in str(error) else "task"


def test_a_hung_group_is_given_its_patience_once() -> None:
    never, notices = threading.Event(), list[str]()

    def together(tasks: Sequence[Task[int, str]], device: str) -> list[Outcome[int, str]]:
        never.wait(60)
        return []

    engine = Engine((Device("cuda:0"),), budget=10**9, notice=notices.append)
    tasks = [Task(key=i, run=lambda d: d, group=1, most=64, patience=0.5, deadline=0.005) for i in range(64)]
    started = time.monotonic()
    outcomes = list(engine.map(tasks, run_many=together))
    assert time.monotonic() - started < 20  # of 64 × 0.505
    assert [outcome.device for outcome in outcomes] == ["cpu"] * 64
    assert len(notices) == 1
    assert "no answer" in notices[0]
    never.set()


def test_a_gpu_is_given_a_deadline_of_its_own() -> None:
    notices: list[str] = []
    engine = Engine((Device("cuda:0"),), budget=10**9, notice=notices.append)

    def run(device: str) -> str:
        time.sleep(1.0)
        return device

    (outcome,) = engine.map([Task(key=0, run=run, deadline=60.0, gpu_deadline=0.3)])
    assert outcome.value == "cpu"
    assert len(notices) == 1


@pytest.mark.parametrize(("M", "N"), [(512, 1408), (768, 2048), (2048, 8192), (4096, 11008), (8192, 28672)])
def test_no_group_is_waited_for_an_hour(M: int, N: int) -> None:
    class Shard:
        on_server = False

    size = keys.needs(M, N, 1, "auto")
    limits = keys.limits(size["cost"], 2 * M * N, Shard())  # type: ignore[arg-type]
    assert limits["patience"] + size["most"] * limits["gpu_deadline"] < 3600
    assert limits["deadline"] > 100 * size["cost"] / 1e11  # what one core does


@pytest.mark.parametrize("devices", [GPUS[:1], GPUS])
def test_a_gpu_that_hangs_before_it_begins_is_retired(
    devices: tuple[Device, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PREPARE_SECONDS", 0.5)
    never, notices = threading.Event(), list[str]()

    def prepare(device: Device) -> None:
        if device.name == "cuda:0":
            never.wait(60)

    engine = Engine(devices, budget=10**9, prepare=prepare, notice=notices.append)
    outcomes = list(engine.map(Task(key=i, run=lambda d: (time.sleep(0.05), d)[1]) for i in range(40)))
    assert len(outcomes) == 40
    assert "cuda:0" not in {outcome.value for outcome in outcomes}
    if len(devices) > 1:
        assert {outcome.value for outcome in outcomes} == {"cuda:1"}
    else:
        assert len(notices) == 1
        assert "no answer" in notices[0]
    never.set()


def test_a_thread_without_memory_to_begin_with_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_PAUSES", (0.01, 0.01))
    lacking, notices = [1, 1], list[str]()

    def prepare(device: Device) -> None:
        if device.name == "cuda:0" and lacking:
            lacking.pop()
            raise RuntimeError("no memory")

    engine = Engine(GPUS[:1], budget=10**9, prepare=prepare, classify=classify, notice=notices.append)
    outcomes = list(engine.map(Task(key=i, run=lambda d: d) for i in range(20)))
    assert {outcome.value for outcome in outcomes} == {"cuda:0"}
    assert not notices


def test_fewer_threads_do_where_there_is_no_memory_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_PAUSES", (0.05,))
    begun, notices = threading.Lock(), list[str]()
    begun.acquire()

    def prepare(device: Device) -> None:
        if device.name == "cuda:0" and not begun.acquire(blocking=False):
            raise RuntimeError("no memory")

    begun.release()
    engine = Engine(GPUS[:1], budget=10**9, prepare=prepare, classify=classify, notice=notices.append)
    outcomes = list(engine.map(Task(key=i, run=lambda d: (time.sleep(0.02), d)[1]) for i in range(30)))
    assert {outcome.value for outcome in outcomes} == {"cuda:0"}
    assert not notices


def test_one_that_never_has_memory_to_begin_with_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_PAUSES", (0.01,))
    notices: list[str] = []

    def prepare(device: Device) -> None:
        if device.name == "cuda:0":
            raise RuntimeError("no memory")

    engine = Engine(GPUS[:1], budget=10**9, prepare=prepare, classify=classify, notice=notices.append)
    assert {outcome.value for outcome in engine.map(Task(key=i, run=lambda d: d) for i in range(5))} == {"cpu"}
    assert len(notices) == 1


def test_fewer_threads_do_though_the_others_are_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_PAUSES", (0.05,))
    first, notices = threading.Lock(), list[str]()

    def prepare(device: Device) -> None:
        if device.name == "cuda:0":
            if not first.acquire(blocking=False):
                raise RuntimeError("no memory")
            time.sleep(0.6)  # libraries come from a slow disk

    engine = Engine(GPUS[:1], budget=10**9, prepare=prepare, classify=classify, notice=notices.append)
    outcomes = list(engine.map(Task(key=i, run=lambda d: d) for i in range(20)))
    assert {outcome.value for outcome in outcomes} == {"cuda:0"}
    assert not notices


def test_a_thread_that_is_never_ready_costs_no_gpu_on_which_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PREPARE_SECONDS", 0.5)
    first, never, notices = threading.Lock(), threading.Event(), list[str]()

    def prepare(device: Device) -> None:
        if device.name == "cuda:0" and not first.acquire(blocking=False):
            never.wait(60)

    engine = Engine(GPUS[:1], budget=10**9, prepare=prepare, classify=classify, notice=notices.append)
    outcomes = list(engine.map(Task(key=i, run=lambda d: (time.sleep(0.05), d)[1]) for i in range(30)))
    never.set()
    assert {outcome.value for outcome in outcomes} == {"cuda:0"}
    assert not notices


def test_a_slow_reader_of_rows_hides_no_hung_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_STOPPED", 0.2)
    never, found = threading.Event(), list[int]()

    def hang(device: str) -> str:
        if device != "cpu":
            never.wait(60)
        return device

    engine = Engine(GPUS[:1], budget=10**9, notice=lambda text: found.append(taken))
    tasks = [Task(key=i, run=(lambda d: d) if i else hang, deadline=1.0) for i in range(12)]
    taken = 0
    for _ in engine.map(tasks):
        taken += 1
        time.sleep(0.4)
    never.set()
    assert taken == 12
    assert len(found) == 1
    assert found[0] < 8  # not when all the others had been taken


def test_what_cannot_be_given_back_ends_the_scans_of_a_batch() -> None:
    def idle() -> None:
        raise AttributeError("a module that is half imported")

    shared = SharedEngine(lambda devices: Engine(devices, budget=1), (), budget=1, on_idle=idle)
    with shared, pytest.raises(AttributeError, match="half imported"):
        list(shared.map([Task(key=1, run=lambda d: d)]))


def test_no_two_threads_load_linear_algebra_at_once_though_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch loads it at the first call, and not safely."""
    monkeypatch.setattr(worker, "_PATIENCE", 0.3)
    monkeypatch.setattr(worker, "_loaded", threading.Event())
    never, guard, inside, most = threading.Event(), threading.Lock(), [0], [0]

    def eigvalsh(device: str) -> None:
        if device == "cuda:0":
            never.wait(60)
            return
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.2)
        with guard:
            inside[0] -= 1

    fake = SimpleNamespace(linalg=SimpleNamespace(eigvalsh=eigvalsh), eye=lambda n, dtype, device: device, float64=None)
    monkeypatch.setitem(sys.modules, "torch", fake)
    threads = [threading.Thread(target=worker._load_linalg, args=(f"cuda:{i}",), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads[1:]:
        thread.join(20)
    assert most[0] == 1
    assert not any(thread.is_alive() for thread in threads[1:])
    never.set()
    threads[0].join(20)


STOPPED = """
import sys, time
from shardesd.engine import Device, Engine, Task, queue
queue._STOPPED = 1.0
notices = []
for devices in ((Device("cuda:0", slots=2), Device("cuda:1", slots=2)), (Device("cpu", slots=2),)):
    engine = Engine(devices, budget=10**9, notice=notices.append)
    print("go", flush=True)
    tasks = (Task(key=i, run=lambda d: (time.sleep(0.1), d)[1], deadline=2.0) for i in range(40))
    notices += [str(outcome.error) for outcome in engine.map(tasks) if outcome.error]
print(notices)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_process_that_was_stopped_blames_no_device() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "go\n"
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "[]\n"
