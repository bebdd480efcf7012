"""The queue's promises: every task once, within the budget, stopping and failing as it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from shardesd.engine import Device, Engine, Task


def run(engine: Engine, tasks: list[Task], **options: object) -> dict[object, object]:
    return {outcome.key: outcome for outcome in engine.map(iter(tasks), **options)}


def test_every_task_gets_one_outcome() -> None:
    engine = Engine((Device("cpu", slots=3),), budget=10**6)
    outcomes = list(engine.map(Task(i, lambda device, i=i: (i * i, device), 1) for i in range(100)))
    assert sorted(o.key for o in outcomes) == list(range(100))
    assert all(o.value == (o.key**2, "cpu") and o.error is None for o in outcomes)


def test_an_error_belongs_to_its_task_alone() -> None:
    def fail(device: str) -> None:
        raise ValueError("broken")

    engine = Engine((Device("cpu", slots=2),), budget=10)
    outcomes = run(engine, [Task(0, fail), Task(1, lambda device: "fine")])
    assert str(outcomes[0].error) == "broken"
    assert outcomes[1].value == "fine"


def test_the_budget_bounds_what_runs_at_once() -> None:
    lock, running, peak = threading.Lock(), 0, 0

    def work(device: str, size: int) -> None:
        nonlocal running, peak
        with lock:
            running += size
            peak = max(peak, running)
        time.sleep(0.005)
        with lock:
            running -= size

    engine = Engine((Device("cpu", slots=8),), budget=100)
    sizes = [10, 60, 50, 40, 90, 30, 30, 30, 100, 5] * 3
    run(engine, [Task(i, lambda device, s=s: work(device, s), s) for i, s in enumerate(sizes)])
    assert peak <= 100


def test_a_task_beyond_the_budget_runs_alone() -> None:
    engine = Engine((Device("cpu", slots=4),), budget=100)
    assert len(run(engine, [Task(i, lambda device: None, 250) for i in range(3)])) == 3


def test_few_tasks_are_pulled_ahead() -> None:
    release = threading.Event()
    pulled: list[int] = []

    def tasks() -> Iterator[Task]:
        for i in range(50):
            pulled.append(i)
            yield Task(i, lambda device: release.wait(5))

    engine = Engine((Device("cpu", slots=2),), budget=100)
    outcomes = engine.map(tasks())
    threading.Timer(0.3, release.set).start()
    next(outcomes)
    assert len(pulled) <= 8
    assert len(list(outcomes)) == 49


def test_an_error_of_the_feeder_comes_after_the_tasks_before_it() -> None:
    def tasks() -> Iterator[Task]:
        yield Task(0, lambda device: time.sleep(0.05))
        raise RuntimeError("no more shards")

    outcomes = Engine((Device("cpu"),), budget=1).map(tasks())
    assert next(outcomes).key == 0
    with pytest.raises(RuntimeError, match="no more shards"):
        next(outcomes)


def test_stop_finishes_what_is_in_flight_and_no_more() -> None:
    stop = threading.Event()
    engine = Engine((Device("cpu", slots=2),), budget=100)
    seen = []
    for outcome in engine.map((Task(i, lambda device: time.sleep(0.01)) for i in range(1000)), stop=stop):
        seen.append(outcome.key)
        stop.set()
    assert 1 <= len(seen) <= 6


def test_stop_does_not_wait_for_a_feeder_that_hangs() -> None:
    stop, never = threading.Event(), threading.Event()

    def tasks() -> Iterator[Task]:
        yield Task(0, lambda device: None)
        never.wait(30)

    threading.Timer(0.3, stop.set).start()
    started = time.perf_counter()
    assert len(run(Engine((Device("cpu"),), budget=1), tasks(), stop=stop)) == 1
    assert time.perf_counter() - started < 10
    never.set()


def test_no_memory_on_a_gpu_means_the_cpu() -> None:
    def work(device: str) -> str:
        if device != "cpu":
            raise MemoryError
        return device

    outcome = run(Engine((Device("cuda:0"),), budget=1), [Task(0, work)])[0]
    assert outcome.value == "cpu"
    assert outcome.device == "cpu"


def test_closing_early_ends_the_workers() -> None:
    before = threading.active_count()
    outcomes = Engine((Device("cpu", slots=2),), budget=1).map(Task(i, lambda device: None) for i in range(1000))
    next(outcomes)
    outcomes.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_each_worker_is_prepared_in_its_own_thread() -> None:
    prepared: list[tuple[str, str]] = []
    engine = Engine(
        (Device("a", slots=2), Device("b")),
        budget=1,
        prepare=lambda device: prepared.append((device.name, threading.current_thread().name)),
    )
    run(engine, [Task(0, lambda device: time.sleep(0.05))])
    assert sorted(name for name, _ in prepared) == ["a", "a", "b"]
    assert len({thread for _, thread in prepared}) == 3
