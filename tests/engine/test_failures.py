"""Devices that have no memory, are lost, or hang: nothing is lost, and nothing is computed twice into the table."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest

from shardesd.engine import Device, Engine, Outcome, Task, Trouble, queue
from shardesd.errors import SourceError


class NoMemory(Exception):
    pass


class Lost(Exception):
    pass


def classify(error: Exception) -> Trouble:
    return {NoMemory: "memory", Lost: "device"}.get(type(error), "task")


Found = tuple[dict[object, Outcome], list[str]]


def scan(devices: Sequence[Device], tasks: Sequence[Task], **options: object) -> Found:
    notices: list[str] = []
    engine = Engine(
        tuple(devices), budget=10**9, fallback=Device("cpu", slots=2), classify=classify, notice=notices.append
    )
    outcomes = list(engine.map(iter(tasks), **options))
    assert sorted(o.key for o in outcomes) == sorted(t.key for t in tasks)
    return {o.key: o for o in outcomes}, notices


GPUS = [Device("cuda:0", slots=2), Device("cuda:1", slots=2)]


def many(run: Callable[[str], object], count: int = 40) -> list[Task]:
    return [Task(key=i, run=run) for i in range(count)]


def test_no_memory_is_retried_alone_then_done_by_the_cpu() -> None:
    lock = threading.Lock()
    working: set[str] = set()
    tried: list[tuple[str, bool]] = []

    def hungry(device: str) -> str:
        with lock:
            tried.append((device, working == set()))
            working.add("hungry")
        time.sleep(0.02)
        with lock:
            working.discard("hungry")
        if device != "cpu":
            raise NoMemory
        return device

    def modest(device: str) -> str:
        with lock:
            working.add("modest" + threading.current_thread().name)
        time.sleep(0.01)
        with lock:
            working.discard("modest" + threading.current_thread().name)
        return device

    tasks = [Task(key=i, run=modest) for i in range(20)]
    tasks.insert(3, Task(key=99, run=hungry))
    outcomes, _ = scan(GPUS[:1], tasks)
    assert outcomes[99].value == "cpu"
    assert [device for device, _ in tried] == ["cuda:0", "cuda:0", "cpu"]
    assert tried[1][1], "the second try was not alone on its device"
    assert all(outcomes[i].value == "cuda:0" for i in range(20))


def test_no_memory_for_a_batch_means_one_by_one() -> None:
    def run_many(tasks: Sequence[Task], device: str) -> list[Outcome]:
        raise NoMemory

    tasks = [Task(key=i, run=lambda device: device, group="n", most=8) for i in range(30)]
    outcomes, _ = scan(GPUS, tasks, run_many=run_many)
    assert {o.value for o in outcomes.values()} <= {"cuda:0", "cuda:1"}


def test_a_fault_of_a_batch_is_not_every_tasks_fault() -> None:
    def run_many(tasks: Sequence[Task], device: str) -> list[Outcome]:
        return [Outcome(key=t.key, error=ValueError("bad") if t.key == 7 else None, value=device) for t in tasks]

    tasks = [Task(key=i, run=lambda device: "single", group="n", most=8) for i in range(30)]
    outcomes, _ = scan(GPUS, tasks, run_many=run_many)
    assert [key for key, o in outcomes.items() if o.error] in ([7], [])


def test_a_lost_device_is_retired_and_its_work_goes_on_elsewhere() -> None:
    calls: list[str] = []

    def run(device: str) -> str:
        calls.append(device)
        if device == "cuda:0" and calls.count("cuda:0") > 3:
            raise Lost("CUDA error: an illegal memory access was encountered")
        time.sleep(0.005)
        return device

    outcomes, notices = scan(GPUS, many(run))
    assert all(o.error is None for o in outcomes.values())
    assert len(notices) == 1
    assert "cuda:0 is used no more" in notices[0]
    assert "illegal memory access" in notices[0]
    assert calls.count("cuda:0") <= 5


def test_all_devices_lost_means_the_cpu() -> None:
    def run(device: str) -> str:
        if device != "cpu":
            raise Lost("gone")
        return device

    outcomes, notices = scan(GPUS, many(run))
    assert {o.value for o in outcomes.values()} == {"cpu"}
    assert len(notices) == 2


def test_a_device_that_cannot_be_prepared_is_retired() -> None:
    def prepare(device: Device) -> None:
        if device.name == "cuda:1":
            raise Lost("no such device")

    notices: list[str] = []
    engine = Engine(tuple(GPUS), budget=1, prepare=prepare, classify=classify, notice=notices.append)
    outcomes = list(engine.map(many(lambda device: device)))
    assert {o.value for o in outcomes} == {"cuda:0"}
    assert "cuda:1" in notices[0]


def test_a_hung_solve_is_noticed_and_its_late_answer_not_taken() -> None:
    release = threading.Event()

    def run(device: str) -> str:
        if device == "cuda:0":
            release.wait(20)
        time.sleep(0.02)
        return device

    tasks = [Task(key=i, run=run, deadline=0.5) for i in range(30)]
    threading.Timer(1.0, release.set).start()
    outcomes, notices = scan([Device("cuda:0"), Device("cuda:1")], tasks)
    assert {o.value for o in outcomes.values()} <= {"cuda:1", "cpu"}
    assert any("cuda:0" in text and "no answer" in text for text in notices)
    time.sleep(1.0)  # the hung thread has answered by now: nobody listens


def test_a_hung_cpu_costs_one_row() -> None:
    never = threading.Event()
    tasks = [
        Task(key=0, run=lambda device: never.wait(20), deadline=0.3),
        *(Task(key=i, run=lambda device: device, deadline=30.0) for i in range(1, 10)),
    ]
    outcomes, _ = scan([Device("cpu", slots=1)], tasks)
    assert isinstance(outcomes[0].error, TimeoutError)
    assert all(outcomes[i].value == "cpu" for i in range(1, 10))
    never.set()


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_doubled_whatever_happens(seed: int) -> None:
    import random

    rng = random.Random(seed)
    plan = {i: rng.choice(["fine"] * 6 + ["memory", "lost", "fault"]) for i in range(120)}

    def run(key: int) -> Callable[[str], str]:
        def work(device: str) -> str:
            time.sleep(0.001)
            if plan[key] == "fault":
                raise ValueError(key)
            if device != "cpu" and plan[key] == "memory":
                raise NoMemory
            if device == "cuda:0" and plan[key] == "lost":
                raise Lost
            return device

        return work

    tasks = [Task(key=i, run=run(i), cost=rng.random(), host_bytes=rng.randrange(10**8)) for i in plan]
    outcomes, _ = scan(GPUS, tasks)
    assert all((o.error is not None) == (plan[key] == "fault") for key, o in outcomes.items())


def test_a_cpu_that_helps_out_leaves_the_rest_to_the_gpus_and_they_say_so_once() -> None:
    def work(key: int) -> Callable[[str], str]:
        def run(device: str) -> str:
            time.sleep(0.005)
            if key % 10 == 0 and device != "cpu":
                raise NoMemory
            return device

        return run

    tasks = [Task(key=at, run=work(at), cost=100.0 if at % 10 == 0 else 50.0 - at) for at in range(60)]
    outcomes, notices = scan([Device("cuda:0", slots=2)], tasks)
    assert {key for key, outcome in outcomes.items() if outcome.value == "cpu"} == {0, 10, 20, 30, 40, 50}
    assert notices == ["cuda:0 has no memory for some of the work, which the CPU does instead"]


def test_a_cpu_worker_that_can_not_be_prepared_ends_the_scan() -> None:
    def prepare(device: Device) -> None:
        raise MemoryError("no memory for torch")

    engine = Engine((Device("cpu", slots=2),), budget=100, prepare=prepare)
    with pytest.raises(MemoryError, match="no memory for torch"):
        list(engine.map([Task(key=i, run=lambda device: device) for i in range(3)]))


def test_what_is_no_exception_of_a_task_ends_the_scan() -> None:
    """pyo3's panics, say."""

    class Panic(BaseException):
        pass

    def run(device: str) -> None:
        raise Panic("at the disco")

    engine = Engine((Device("cpu", slots=2),), budget=100)
    with pytest.raises(Panic, match="at the disco"):
        list(engine.map([Task(key=i, run=run) for i in range(3)]))


def test_no_thread_for_the_cpu_that_takes_over_ends_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    real = queue.start

    def start(target: Callable[..., None], name: str, *args: object) -> None:
        if name.startswith("shardesd-cpu"):
            raise RuntimeError("can't start new thread")
        real(target, name, *args)

    def run(device: str) -> None:
        raise Lost("gone")

    monkeypatch.setattr(queue, "start", start)
    engine = Engine((Device("cuda:0", slots=2),), budget=100, classify=classify)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(engine.map([Task(key=i, run=run) for i in range(3)]))


@pytest.mark.parametrize("refused", ["shardesd-cpu-1", "shardesd-cuda:0-3", "shardesd-feeder"])
def test_where_a_thread_cannot_start_the_others_end(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for what is done aside, one of a device's, or the one that feeds them."""
    real = queue.start

    def start(target: Callable[..., None], name: str, *args: object) -> None:
        if name == refused:
            raise RuntimeError("can't start new thread")
        real(target, name, *args)

    monkeypatch.setattr(queue, "start", start)
    before = set(threading.enumerate())
    engine = Engine((Device("cuda:0", slots=4),), budget=100)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(engine.map([Task(key=i, run=lambda device: None, aside=i == 1) for i in range(3)]))
    until = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


class Large:
    """What a task works on."""


@pytest.mark.parametrize("together", [True, False])
def test_an_outcome_holds_its_error_and_nothing_that_was_worked_on(together: bool) -> None:
    made: list[ref[Large]] = []

    def fail(*given: object) -> Any:
        large = Large()
        made.append(ref(large))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    work = [Task(key=i, run=fail, group="n" if together else None, most=4) for i in range(4)]
    gc.disable()
    try:
        outcomes = list(Engine((Device("cuda:0"),), budget=100).map(work, run_many=fail))
        assert made
        assert all(one() is None for one in made)
    finally:
        gc.enable()
    assert [str(outcome.error) for outcome in outcomes] == ["outer"] * 4


def test_an_error_that_ends_the_command_keeps_where_it_came_from() -> None:
    def fail(device: str) -> None:
        raise SourceError("the file is gone")

    (outcome,) = Engine((Device("cpu"),), budget=100).map([Task(key=1, run=fail)])
    assert outcome.error is not None
    assert outcome.error.__traceback__ is not None
