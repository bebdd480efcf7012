"""What GPUs take first, and how long they wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from shardesd.engine import Device, Engine, Outcome, Task, queue

Batch = tuple[str, list[object]]


def run(devices: tuple[Device, ...], work: Iterator[Task]) -> list[Batch]:
    """Batches as they begin, once all work is there; each ends when as many have begun as there are devices."""
    batches: list[Batch] = []
    all_begun, all_there = threading.Event(), threading.Event()

    def fed() -> Iterator[Task]:
        yield from work
        all_there.set()

    def prepare(device: Device) -> None:
        assert all_there.wait(10)

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        batches.append((device, [task.key for task in batch]))
        if len(batches) >= len(devices):
            all_begun.set()
        assert all_begun.wait(10), f"only {batches} began"
        return [Outcome(key=task.key, device=device) for task in batch]

    engine = Engine(devices, budget=100, prepare=prepare)
    assert not any(outcome.error for outcome in engine.map(fed(), run_many=run_many))
    return batches


def group(costs: Sequence[int]) -> Iterator[Task]:
    return (Task(key=cost, run=fail, group="n", most=4, cost=cost) for cost in costs)


def fail(device: str) -> None:
    raise AssertionError("solved alone")


def test_several_gpus_begin_with_what_is_read_soonest() -> None:
    """And read it, too, the longest first; what they take later are the longest."""
    devices = Device("cuda:0", slots=1), Device("cuda:1", slots=1)
    batches = run(devices, group([*range(24, 0, -2), *range(23, 0, -2)]))
    assert [keys for _, keys in batches[:2]] == [[24, 3, 2, 1], [23, 6, 5, 4]]
    assert {device for device, _ in batches[:2]} == {"cuda:0", "cuda:1"}
    assert sorted(keys for _, keys in batches[2:4]) == [[18, 17, 16, 15], [22, 21, 20, 19]]


def test_one_gpu_begins_with_the_longest() -> None:
    """It waits for no other's bytes, and makes Grams while it reads."""
    batches = run((Device("cuda:0", slots=1),), group([*range(16, 0, -2), *range(15, 0, -2)]))
    assert [keys for _, keys in batches] == [[16, 15, 14, 13], [12, 11, 10, 9], [8, 7, 6, 5], [4, 3, 2, 1]]


def test_equals_are_begun_in_their_order() -> None:
    """They lie in the file as they come."""
    devices = Device("cuda:0", slots=1), Device("cuda:1", slots=1)
    batches = run(devices, (Task(key=i, run=fail, group="n", most=4, cost=1) for i in range(8)))
    assert [keys for _, keys in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_gpu_does_not_wait_for_what_another_one_has_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_GATHER", 100.0)  # 5 s a look
    begun = threading.Event()

    def slowly() -> Iterator[Task]:
        yield from group([8, 7, 6, 5, 4, 3, 2, 1])
        assert begun.wait(20), "both waited for more"

    devices = Device("cuda:0", slots=1), Device("cuda:1", slots=1)
    lock, sizes = threading.Lock(), list[int]()

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        with lock:
            sizes.append(len(batch))
            if len(sizes) == 2:
                begun.set()
        assert begun.wait(20)
        return [Outcome(key=task.key, device=device) for task in batch]

    assert len(list(Engine(devices, budget=100).map(slowly(), run_many=run_many))) == 8
    assert sizes == [4, 4]
