"""Tasks of one group are solved together on a GPU, never on the CPU, and share its memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shardesd.engine import Device, Engine, Outcome, Task

GPU = Device("cuda:0", slots=1, budget=100)


def tasks(count: int, gate: threading.Event, **options: object) -> list[Task]:
    first = Task(key="first", run=lambda device: gate.wait(5), cost=99)
    return [first, *(Task(key=i, run=lambda device, i=i: ("single", i), **options) for i in range(count))]


def run(engine: Engine, work: list[Task], gate: threading.Event) -> tuple[dict[object, object], list[list[object]]]:
    batches: list[list[object]] = []

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        batches.append([t.key for t in batch])
        return [Outcome(key=t.key, value=("batch", t.key), device=device) for t in batch]

    threading.Timer(0.3, gate.set).start()
    return {o.key: o for o in engine.map(work, run_many=run_many)}, batches


def test_a_group_is_solved_together() -> None:
    gate = threading.Event()
    outcomes, batches = run(Engine((GPU,), budget=100), tasks(20, gate, group="n", most=8), gate)
    assert len(outcomes) == 21
    assert [*sorted(key for batch in batches for key in batch), "first"] == [*range(20), "first"]
    assert max(len(batch) for batch in batches) == 8


def test_memory_of_the_device_bounds_a_batch() -> None:
    gate = threading.Event()
    _, batches = run(Engine((GPU,), budget=100), tasks(20, gate, group="n", most=20, device_bytes=30), gate)
    assert max(len(batch) for batch in batches) == 3


def test_groups_are_not_mixed() -> None:
    gate = threading.Event()
    work = tasks(10, gate, group="a", most=99) + [
        Task(key=100 + i, run=lambda device: None, group="b", most=99) for i in range(10)
    ]
    _, batches = run(Engine((GPU,), budget=100), work, gate)
    assert all(all(key < 100 for key in batch) or all(key >= 100 for key in batch) for batch in batches)


def test_the_cpu_solves_one_at_a_time() -> None:
    gate = threading.Event()
    outcomes, batches = run(Engine((Device("cpu"),), budget=100), tasks(5, gate, group="n", most=8), gate)
    assert not batches
    assert outcomes[3].value == ("single", 3)


def test_the_slots_share_what_is_ready() -> None:
    gate = threading.Event()
    two = Device("cuda:0", slots=2)
    _, batches = run(Engine((two,), budget=100), tasks(16, gate, group="n", most=64), gate)
    assert max(len(batch) for batch in batches) < 16
