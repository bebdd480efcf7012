"""The queue's promises: every task once, within memory, longest first, stopping as it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from shardesd.engine import Device, Engine, State, Task


def task(key: object, run: object, host_bytes: int = 0, **more: object) -> Task:
    return Task(key=key, run=run, host_bytes=host_bytes, **more)


def run(engine: Engine, tasks: object, **options: object) -> dict[object, object]:
    found = [(outcome.key, outcome) for outcome in engine.map(iter(tasks), **options)]
    assert len(dict(found)) == len(found), "a task came back twice"
    return dict(found)


def test_every_task_gets_one_outcome() -> None:
    engine = Engine((Device("cpu", slots=3),), budget=10**6)
    outcomes = run(engine, (task(i, lambda device, i=i: (i * i, device), 1) for i in range(500)))
    assert sorted(outcomes) == list(range(500))
    assert all(o.value == (key**2, "cpu") and o.error is None for key, o in outcomes.items())


def test_an_error_belongs_to_its_task_alone() -> None:
    def fail(device: str) -> None:
        raise ValueError("broken")

    outcomes = run(Engine((Device("cpu", slots=2),), budget=10), [task(0, fail), task(1, lambda device: "fine")])
    assert str(outcomes[0].error) == "broken"
    assert outcomes[1].value == "fine"


def test_the_budget_bounds_what_runs_at_once() -> None:
    lock, running, peak = threading.Lock(), 0, 0

    def work(device: str, size: int) -> None:
        nonlocal running, peak
        with lock:
            running += size
            peak = max(peak, running)
        time.sleep(0.003)
        with lock:
            running -= size

    engine = Engine((Device("cpu", slots=8),), budget=100)
    sizes = [10, 60, 50, 40, 90, 30, 30, 30, 100, 5] * 6
    run(engine, [task(i, lambda device, s=s: work(device, s), s, cost=s) for i, s in enumerate(sizes)])
    assert 60 <= peak <= 100


def test_a_task_beyond_the_budget_runs_alone() -> None:
    lock, running = threading.Lock(), 0

    def alone(device: str) -> None:
        nonlocal running
        with lock:
            running += 1
            assert running == 1
        time.sleep(0.01)
        with lock:
            running -= 1

    engine = Engine((Device("cpu", slots=4),), budget=100)
    assert all(o.error is None for o in run(engine, [task(i, alone, 250) for i in range(5)]).values())


def test_a_large_task_is_not_passed_over_for_ever() -> None:
    """Small ones that fit beside each other must not keep out a large one that needs nearly all."""
    order: list[object] = []
    engine = Engine((Device("cpu", slots=2),), budget=100)
    small = [task(i, lambda device, i=i: (time.sleep(0.002), order.append(i)), 20, cost=1) for i in range(300)]
    large = task("large", lambda device: order.append("large"), 95, cost=100)
    run(engine, [*small[:4], large, *small[4:]])
    assert order.index("large") < 100


def test_the_longest_of_what_is_ready_goes_first() -> None:
    gate, order = threading.Event(), []
    tasks = [task("first", lambda device: gate.wait(5))]
    tasks += [task(cost, lambda device, c=cost: order.append(c), cost=cost) for cost in (3, 9, 1, 7, 5)]
    threading.Timer(0.3, gate.set).start()
    run(Engine((Device("cpu"),), budget=1), tasks)
    assert order == [9, 7, 5, 3, 1]


def test_no_more_is_pulled_than_the_reach() -> None:
    pulled: list[int] = []

    def tasks() -> Iterator[Task]:
        for i in range(100):
            pulled.append(i)
            yield task(i, lambda device: None)

    outcomes = Engine((Device("cpu", slots=2),), budget=100, reach=10).map(tasks())
    next(outcomes)
    time.sleep(0.2)
    assert len(pulled) <= 12  # outcomes that the caller hasn't taken count too
    assert len(list(outcomes)) == 99


def test_an_error_of_the_feeder_comes_after_the_tasks_before_it() -> None:
    def tasks() -> Iterator[Task]:
        yield task(0, lambda device: time.sleep(0.05))
        raise RuntimeError("no more shards")

    outcomes = Engine((Device("cpu"),), budget=1).map(tasks())
    assert next(outcomes).key == 0
    with pytest.raises(RuntimeError, match="no more shards"):
        next(outcomes)


def test_stop_finishes_what_is_in_flight_and_no_more() -> None:
    stop = threading.Event()
    engine = Engine((Device("cpu", slots=2),), budget=100)
    seen = []
    for outcome in engine.map((task(i, lambda device: time.sleep(0.01)) for i in range(1000)), stop=stop):
        seen.append(outcome.key)
        stop.set()
    assert 1 <= len(seen) <= 6


@pytest.mark.parametrize("device", [Device("cpu", slots=2), Device("cuda:0", slots=2)], ids=lambda device: device.name)
def test_nothing_begins_after_stop_though_nobody_fetches(device: Device) -> None:
    stop, begun = threading.Event(), list[float]()

    def work(device: str) -> None:
        begun.append(time.perf_counter())
        time.sleep(0.01)

    outcomes = Engine((device,), budget=1).map((task(i, work) for i in range(200)), stop=stop)
    next(outcomes)
    stop.set()
    stopped = time.perf_counter()
    time.sleep(0.3)
    assert max(begun) < stopped + 0.05
    assert len(list(outcomes)) + 1 == len(begun), "what was in flight has an outcome"


def test_what_hung_is_not_begun_anew_after_stop() -> None:
    stop, free, where = threading.Event(), threading.Event(), list[str]()

    def hang(device: str) -> None:
        where.append(device)
        stop.set()
        free.wait(10)

    outcomes = Engine((Device("cuda:0"),), budget=1).map([task(0, hang, deadline=0.2)], stop=stop)
    assert not list(outcomes)
    free.set()
    time.sleep(0.3)
    assert where == ["cuda:0"]


def test_stop_does_not_wait_for_a_feeder_that_hangs() -> None:
    stop, never = threading.Event(), threading.Event()

    def tasks() -> Iterator[Task]:
        yield task(0, lambda device: None)
        never.wait(30)

    threading.Timer(0.3, stop.set).start()
    started = time.perf_counter()
    assert len(run(Engine((Device("cpu"),), budget=1), tasks(), stop=stop)) == 1
    assert time.perf_counter() - started < 10
    never.set()


def test_closing_early_ends_the_workers() -> None:
    before = threading.active_count()
    outcomes = Engine((Device("cpu", slots=2),), budget=1).map(task(i, lambda device: None) for i in range(1000))
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
    run(engine, [task(0, lambda device: time.sleep(0.1))])
    assert sorted(name for name, _ in prepared) == ["a", "a", "b"]
    assert len({thread for _, thread in prepared}) == 3


def test_the_state_tells_what_is_going_on() -> None:
    states: list[State] = []
    tasks = [task(i, lambda device: time.sleep(0.3), 7, cost=i) for i in range(4)]
    run(Engine((Device("cpu", slots=2),), budget=100), tasks, on_state=states.append)
    busy = [state for state in states if state.ready]
    assert busy
    assert busy[-1].host_bytes == 14
    assert len(busy[-1].devices[0].working) == 2
    assert max(state.devices[0].done for state in states) >= 2


def test_the_state_is_told_however_short_the_work_is() -> None:
    states: list[State] = []
    list(Engine((Device("cpu"),), budget=10).map([Task(key=0, run=lambda device: device)], on_state=states.append))
    assert states
