"""Tasks of one group are solved together on a GPU, never on the CPU, and share its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shardesd.engine import Device, Engine, Outcome, Task, queue
from shardesd.engine.places import Place, Worker
from shardesd.engine.ready import Ready, share
from shardesd.engine.work import Ticket

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


def test_memory_that_a_group_shares_counts_once() -> None:
    gate = threading.Event()
    """Of each task, up to a bound for all of them."""
    work = tasks(20, gate, group="n", most=20, device_bytes=10, passing_bytes=20, passing_most=45)
    _, batches = run(Engine((GPU,), budget=100), work, gate)
    assert max(len(batch) for batch in batches) == 5
    work = tasks(20, gate, group="n", most=20, device_bytes=10, passing_bytes=20, passing_most=900)
    _, batches = run(Engine((GPU,), budget=100), work, gate)
    assert max(len(batch) for batch in batches) == 3


def test_a_group_never_takes_more_than_there_is() -> None:
    """Though the last of it makes more pass through than the first would."""
    work = [
        Task(key=i, run=lambda device: None, group="n", most=9, device_bytes=10, passing_bytes=p, passing_most=p)
        for i, p in enumerate((5, 5, 90, 90))
    ]
    taken: list[int] = []

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        passing = min(sum(t.passing_bytes for t in batch), max(t.passing_most for t in batch))
        taken.append(sum(t.device_bytes for t in batch) + passing)
        return together(batch, device)

    assert len(list(Engine((GPU,), budget=100).map(work, run_many=run_many))) == 4
    assert taken == [25], "the others each by itself"


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


def test_gpus_share_what_is_ready() -> None:
    gate = threading.Event()
    two = Device("cuda:0", slots=2), Device("cuda:1", slots=2)
    _, batches = run(Engine(two, budget=100), tasks(40, gate, group="n", most=64), gate)
    assert max(len(batch) for batch in batches) < 40
    assert min(len(batch) for batch in batches[:-1]) >= 16, "a few take nearly as long as many"


@pytest.mark.parametrize(
    ("left", "here", "others", "taken"),
    [(40, 0, [0], 16), (16, 16, [32], 16), (16, 32, [16], 4), (10, 0, [0], 5), (10, 0, [], 10), (3, 8, [0], 4)],
)
def test_each_gpu_has_as_many_in_work(left: int, here: int, others: list[int], taken: int) -> None:
    """Though never so few that they take as long as many."""
    assert share(left, 16, here, others) == taken


def test_large_ones_are_never_taken_together() -> None:
    assert share(3, 1, 1, [0, 0, 0]) == 1
    work = [Task(key=i, run=lambda device: time.sleep(0.05), group="n", most=1) for i in range(12)]
    devices = tuple(Device(f"cuda:{i}", slots=2) for i in range(4))
    assert len(list(Engine(devices, budget=100).map(work, run_many=refuse))) == 12


def test_nothing_is_begun_once_the_outcomes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_GATHER", 0.4)
    begun: list[object] = []

    def slowly() -> Iterator[Task]:
        yield Task(key="first", run=lambda device: None, cost=99)
        yield from (Task(key=i, run=fail, group="n", most=64) for i in range(30))
        time.sleep(2)

    outcomes = Engine((GPU,), budget=100).map(slowly(), run_many=refuse, on_start=lambda key, device: begun.append(key))
    next(outcomes)
    time.sleep(0.1)
    outcomes.close()
    time.sleep(0.6)
    assert begun == ["first"]


def test_one_slot_gathers_a_group_and_the_others_leave_it_to_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_GATHER", 20.0)
    solved = threading.Event()
    batches: list[list[object]] = []

    def slowly() -> Iterator[Task]:
        yield from (Task(key=f"a{i}", run=fail, group="a", most=5) for i in range(2))
        yield from (Task(key=f"b{i}", run=fail, group="b", most=3) for i in range(3))
        assert solved.wait(10), "b waited for a"
        yield from (Task(key=f"a{i}", run=fail, group="a", most=5) for i in range(2, 5))
        time.sleep(0.1)

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        batches.append(sorted(str(task.key) for task in batch))
        solved.set()
        return together(batch, device)

    started = time.monotonic()
    found = list(Engine((Device("cuda:0", slots=3),), budget=100).map(slowly(), run_many=run_many))
    assert len(found) == 8
    assert batches == [["b0", "b1", "b2"], ["a0", "a1", "a2", "a3", "a4"]]
    assert time.monotonic() - started < 15, "it waited after enough were there"


def test_slots_of_one_gpu_do_not_divide_a_group() -> None:
    gate = threading.Event()
    first = [Task(key=f"first {i}", run=lambda device: gate.wait(5), cost=99) for i in range(2)]
    work = [*first, *(Task(key=i, run=fail, group="n", most=64) for i in range(40))]
    _, batches = run(Engine((Device("cuda:0", slots=2),), budget=100), work, gate)
    assert [len(batch) for batch in batches] == [40]


def most_at_once(device: Device, large: Sequence[bool]) -> tuple[int, int]:
    """Of tasks that are large or not: how many ran at a time, and how many large ones."""
    lock, running, seen = threading.Lock(), list[bool](), list[tuple[int, int]]()

    def work(one: bool) -> None:
        with lock:
            running.append(one)
            seen.append((len(running), sum(running)))
        time.sleep(0.02)
        with lock:
            running.remove(one)

    work_of = [Task(key=i, run=lambda name, one=one: work(one), large=one, group="n") for i, one in enumerate(large)]
    outcomes = list(Engine((device,), budget=100).map(work_of))
    assert len(outcomes) == len(large)
    assert not any(outcome.error for outcome in outcomes)
    return max(count for count, _ in seen), max(large for _, large in seen)


def test_large_ones_leave_a_slot_to_others() -> None:
    gpu = Device("cuda:0", slots=4)
    assert most_at_once(gpu, [False] * 30) == (4, 0)
    assert most_at_once(gpu, [True] * 30) == (3, 3)
    count, large = most_at_once(gpu, [False, True] * 30)
    assert count == 4, "a slot was left empty beside large ones"
    assert large <= 3
    assert most_at_once(Device("cuda:0", slots=1), [True] * 5) == (1, 1)
    assert most_at_once(Device("cuda:0", slots=2), [True] * 5) == (1, 1)
    assert most_at_once(Device("cpu", slots=3), [True] * 30) == (3, 3), "only of a GPU's"


def test_small_ones_run_beside_large_ones_however_many_they_are() -> None:
    """What waits for a slot that it can't have isn't passed over, as what waits for memory is."""
    done = threading.Semaphore(0)

    def large(device: str) -> None:
        for _ in range(50):
            assert done.acquire(timeout=10), "no small one runs"

    def feed() -> Iterator[Task]:
        yield from (Task(key=f"large {i}", run=large, cost=9, group="n", large=True) for i in range(6))
        yield from (Task(key=i, run=lambda device: done.release(), cost=1, group="m") for i in range(300))

    outcomes = list(Engine((Device("cuda:0", slots=4),), budget=100).map(feed()))
    assert len(outcomes) == 306
    assert not any(outcome.error for outcome in outcomes)


def test_a_gpu_that_has_its_large_ones_does_not_look_through_those_that_wait() -> None:
    place = Place[Any, Any](Device("cuda:0", slots=4))
    ready = Ready[Any, Any]()
    for number in range(5):
        ready.add(Ticket(Task(key=number, run=fail, large=True), number))
    for number in range(3):
        worker = Worker(place)
        worker.add(Ticket(Task(key=f"at work {number}", run=fail, large=True), number))
        place.workers.append(worker)
        assert place.has_its_large == (number == 2)
    assert ready.all_large
    assert not place.is_open_to(Task(key="large", run=fail, large=True))
    assert place.is_open_to(Task(key="small", run=fail))
    small = Ticket(Task(key="small", run=fail, group="m"), 9)
    ready.add(small)
    assert not ready.all_large
    assert ready.take(lambda ticket: True, lambda ticket: not ticket.task.large) is small
    assert ready.all_large


@pytest.mark.parametrize(("count", "at_once"), [(12, 3), (11, 2)])
def test_a_third_group_of_large_ones_begins_where_there_is_a_whole_one(count: int, at_once: int) -> None:
    """Else what is left would be divided into groups so small that they take as long as large ones."""
    lock, running, seen = threading.Lock(), [0], list[tuple[int, int]]()

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        with lock:
            running[0] += 1
            seen.append((running[0], len(batch)))
        time.sleep(0.2)
        with lock:
            running[0] -= 1
        return together(batch, device)

    work = [Task(key=i, run=fail, group="n", most=4, cost=1, large=True) for i in range(count)]
    assert len(list(Engine((Device("cuda:0", slots=4),), budget=100).map(work, run_many=run_many))) == count
    assert max(number for number, _ in seen) == at_once
    assert [size for _, size in seen] == [4, 4, count - 8]


def test_a_third_group_of_large_ones_is_whole_or_not_begun() -> None:
    """Where a GPU's memory holds two and a half."""
    work = [Task(key=i, run=fail, group="n", most=4, cost=1, large=True, device_bytes=10) for i in range(32)]
    sizes: list[int] = []

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        sizes.append(len(batch))
        time.sleep(0.02)
        return together(batch, device)

    assert len(list(Engine((Device("cuda:0", slots=4, budget=100),), budget=100).map(work, run_many=run_many))) == 32
    assert sizes == [4] * 8


def test_a_few_large_ones_are_divided_evenly() -> None:
    """Of those that are solved one by one each is a group."""
    lock, devices = threading.Lock(), list[str]()

    def run_one(device: str) -> None:
        with lock:
            devices.append(device)
        time.sleep(0.1)

    def feed() -> Iterator[Task]:
        yield from (Task(key=i, run=lambda device: None, group="small", cost=0.1) for i in range(8))
        time.sleep(0.2)  # all GPUs are there
        yield from (Task(key=i, run=run_one, group="n", most=1, cost=9, large=True) for i in range(8, 12))

    for _ in range(10):
        devices.clear()
        gpus = tuple(Device(f"cuda:{i}", slots=4) for i in range(2))
        assert len(list(Engine(gpus, budget=100).map(feed(), run_many=refuse))) == 12
        assert sorted(devices) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_large_ones_are_left_to_gpus_that_have_none() -> None:
    lock, devices = threading.Lock(), list[str]()

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        with lock:
            devices.extend(device for task in batch if task.group != "small")
        time.sleep(0.1)
        return together(batch, device)

    def run_one(device: str) -> None:
        with lock:
            devices.append(device)
        time.sleep(0.1)

    def feed() -> Iterator[Task]:
        yield from (Task(key=i, run=lambda device: None, group="small", most=128, cost=0.1) for i in range(30))
        time.sleep(0.2)  # all GPUs are there
        yield from (Task(key=i, run=run_one, group=i, most=4, cost=99, large=True) for i in range(30, 33))
        yield from (Task(key=i, run=lambda device: None, group="small", most=128, cost=0.1) for i in range(33, 90))

    for _ in range(10):
        devices.clear()
        gpus = tuple(Device(f"cuda:{i}", slots=4) for i in range(3))
        assert len(list(Engine(gpus, budget=100).map(feed(), run_many=run_many))) == 90
        assert sorted(devices) == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_large_one_does_not_wait_for_many_small_ones() -> None:
    order: list[object] = []
    lock = threading.Lock()

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        with lock:
            order.extend(task.key for task in batch)
        time.sleep(0.01)
        return together(batch, device)

    def feed() -> Iterator[Task]:
        yield from (Task(key=i, run=fail, group="small", most=4, cost=1) for i in range(400))
        time.sleep(0.05)  # all slots are at work
        yield Task(key="large", run=lambda device: order.append("large"), group="large", most=4, cost=40, large=True)

    assert len(list(Engine((Device("cuda:0", slots=4),), budget=100).map(feed(), run_many=run_many))) == 401
    assert order.index("large") < 300


def test_a_group_of_which_no_more_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_GATHER", 20.0)  # 1 s a look
    begun = threading.Event()

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        begun.set()
        return together(batch, device)

    def feed() -> Iterator[Task]:
        yield from (Task(key=i, run=fail, group="few", most=8, cost=9) for i in range(2))
        for i in range(2, 1000):
            if not begun.wait(0.01):
                yield Task(key=i, run=fail, group="many", most=2000, cost=1)
        assert begun.is_set()

    outcomes = list(Engine((GPU,), budget=100).map(feed(), run_many=run_many))
    assert {0, 1} < {outcome.key for outcome in outcomes}


def test_the_first_of_a_group_waits_for_those_that_are_about_to_come() -> None:
    _, batches = run_all(Engine((GPU,), budget=100), [Task(key=i, run=fail, group="n", most=8) for i in range(24)])
    assert [len(batch) for batch in batches] == [8, 8, 8]


def test_a_group_does_not_wait_for_what_is_not_about_to_come() -> None:
    came = threading.Event()

    def slowly() -> Iterator[Task]:
        yield from (Task(key=i, run=fail, group="n", most=8) for i in range(2))
        assert came.wait(5), "the first two were not solved before the third came"
        yield Task(key=2, run=lambda device: "alone", group="n", most=8)

    found = {}
    for outcome in Engine((GPU,), budget=100).map(slowly(), run_many=together):
        found[outcome.key] = outcome
        came.set()
    assert sorted(found) == [0, 1, 2]


def test_a_gpu_does_not_wait_for_what_another_one_has_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_GATHER", 20.0)  # 1 s a look
    sizes: list[int] = []
    both = threading.Event()

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        sizes.append(len(batch))
        if len(sizes) == 2:
            both.set()
        assert both.wait(10), "the second one waited for more"
        return together(batch, device)

    def slowly() -> Iterator[Task]:
        yield from (Task(key=i, run=fail, group="n", most=4) for i in range(8))
        assert both.wait(10)

    devices = Device("cuda:0", slots=1), Device("cuda:1", slots=1)
    assert not any(outcome.error for outcome in Engine(devices, budget=100).map(slowly(), run_many=run_many))
    assert sizes == [4, 4]


def test_a_few_are_no_whole_group_however_many_others_have() -> None:
    busy, idle = Place(Device("cuda:0", slots=4)), Place(Device("cuda:1", slots=4))
    busy.workers, idle.workers = [Worker(busy)], [Worker(idle)]
    task: Task = Task(key=0, run=fail, group="n", most=16)
    for number in range(64):
        busy.workers[0].add(Ticket(task, number))
    idle.workers[0].add(Ticket(task, 64))
    ready: Ready = Ready()
    for left in range(15):
        assert not ready.has_best(task, idle, [busy, idle]), f"{left} others are there"
        ready.add(Ticket(task, 65 + left))
    assert ready.has_best(task, idle, [busy, idle])


def refuse(batch: Sequence[Task], device: str) -> list[Outcome]:
    raise AssertionError("solved together")


def fail(device: str) -> None:
    raise AssertionError("solved alone")


def together(batch: Sequence[Task], device: str) -> list[Outcome]:
    return [Outcome(key=task.key, device=device) for task in batch]


def run_all(engine: Engine, work: list[Task]) -> tuple[list[Outcome], list[list[object]]]:
    batches: list[list[object]] = []

    def run_many(batch: Sequence[Task], device: str) -> list[Outcome]:
        batches.append([task.key for task in batch])
        return together(batch, device)

    return list(engine.map(iter(work), run_many=run_many)), batches
