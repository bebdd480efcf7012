"""What is little work for a CPU is done beside what the devices solve."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from shardesd.engine import Device, Engine, SharedEngine, State, Task

GPU = Device("cuda:0", slots=1)
CPU = Device("cpu", slots=1)


def aside(key: object, run: Any, **more: Any) -> Task[Any, Any]:
    return Task(key=key, run=run, aside=True, **more)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("shared", [False, True])
def test_while_all_slots_are_taken(device: Device, shared: bool) -> None:
    counted = threading.Event()

    def solve(device: str) -> str:
        assert counted.wait(20)
        return device

    def count(device: str) -> str:
        counted.set()
        return device

    tasks = [Task(key="solve", run=solve, cost=2.0), aside("count", count, cost=1.0)]
    engine = Engine((device,), budget=100)
    if shared:
        with SharedEngine(lambda devices: Engine(devices, budget=100), (device,), budget=100) as both:
            found = {outcome.key: outcome.value for outcome in both.map(iter(tasks))}
    else:
        found = {outcome.key: outcome.value for outcome in engine.map(iter(tasks))}
    assert found == {"solve": device.name, "count": "cpu"}


def test_never_on_a_gpu_and_without_a_row_of_its_own() -> None:
    states: list[State[Any]] = []

    def count(device: str) -> str:
        time.sleep(0.15)
        return device

    engine = Engine((GPU,), budget=100, notice=lambda text: pytest.fail(text))
    tasks = [aside(number, count, cost=float(number)) for number in range(4)]
    outcomes = list(engine.map(iter(tasks), on_state=states.append))
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [("cpu", None)] * 4
    assert {tuple(device.name for device in state.devices) for state in states} == {("cuda:0",)}


@pytest.mark.timeout(30)
def test_a_cpu_that_has_nothing_else_to_do_helps() -> None:
    both = threading.Barrier(2, timeout=20)
    tasks = [aside(number, lambda device: both.wait()) for number in range(2)]
    outcomes = list(Engine((CPU,), budget=100).map(iter(tasks)))
    assert [outcome.error for outcome in outcomes] == [None, None]


def test_but_solves_go_first() -> None:
    """The thread aside is kept busy until all is ready; the one slot then takes what only it may."""
    begun: list[object] = []
    here = threading.Event()

    def work(key: object) -> Any:
        def run(device: str) -> None:
            begun.append(key)
            here.wait(10)
            time.sleep(0.01)

        return run

    def tasks() -> Any:
        yield aside("first", work("first"))
        yield Task(key="holds the slot", run=work("holds the slot"))
        for number in range(6):
            yield aside(number, work(number), cost=100.0)
        yield Task(key="solve", run=work("solve"), cost=1.0)
        here.set()

    list(Engine((CPU,), budget=100).map(tasks()))
    assert begun.index("solve") < 6, begun


def test_memory_is_counted_together() -> None:
    lock, running, peak = threading.Lock(), 0, 0

    def work(size: int) -> Any:
        def run(device: str) -> None:
            nonlocal running, peak
            with lock:
                running += size
                peak = max(peak, running)
            time.sleep(0.002)
            with lock:
                running -= size

        return run

    tasks = [Task(key=("solve", at), run=work(60), host_bytes=60) for at in range(20)]
    tasks += [aside(("count", at), work(50), host_bytes=50) for at in range(20)]
    outcomes = list(Engine((Device("cpu", slots=2),), budget=100).map(iter(tasks)))
    assert len(outcomes) == 40
    assert 60 <= peak <= 100


@pytest.mark.timeout(30)
def test_one_that_hangs_is_given_up_and_the_others_go_on() -> None:
    never = threading.Event()
    tasks = [aside("hangs", lambda device: never.wait(), cost=2.0, deadline=0.2)]
    tasks += [aside(number, lambda device: device) for number in range(3)]
    outcomes = {outcome.key: outcome for outcome in Engine((GPU,), budget=100).map(iter(tasks))}
    never.set()
    assert isinstance(outcomes["hangs"].error, TimeoutError)
    assert [outcomes[number].value for number in range(3)] == ["cpu"] * 3
