"""Several scans on one engine, whose devices come and go."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hub_server import wait_until

from shardesd.engine import Device, Engine, Outcome, SharedEngine, Task

CPU = Device("cpu", slots=2)


def make(devices: tuple[Device, ...]) -> Engine:
    return Engine(devices, budget=100)


def shared(devices: tuple[Device, ...] = (CPU,)) -> SharedEngine:
    return SharedEngine(make, devices, budget=100)


def numbered(count: int, work: Callable[[int, str], object] = lambda i, device: i) -> Iterator[Task[int, object]]:
    for i in range(count):
        yield Task(key=i, run=lambda device, i=i: work(i, device), host_bytes=10)


def test_scans_side_by_side_each_get_their_own() -> None:
    got: dict[int, list[object]] = {}
    with shared() as engine:

        def scan(number: int) -> None:
            tasks = numbered(300, lambda i, device: (number, i))
            got[number] = [outcome.value for outcome in engine.map(tasks)]

        threads = [threading.Thread(target=scan, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for n in range(4):
        assert sorted(got[n]) == [(n, i) for i in range(300)]  # type: ignore[type-var]


def test_tasks_move_to_the_devices_that_are_left() -> None:
    ran: Counter[str] = Counter()
    gate = threading.Semaphore(0)
    done: list[Outcome[int, object]] = []

    def work(i: int, device: str) -> int:
        ran[device] += 1
        gate.acquire()
        return i

    a, b = Device("cuda:0"), Device("cuda:1")
    with shared((a, b)) as engine:
        thread = threading.Thread(target=lambda: done.extend(engine.map(numbered(40, work))))
        thread.start()
        assert wait_until(lambda: ran["cuda:0"] == ran["cuda:1"] == 1)
        engine.use((b,))
        gate.release(10)
        assert wait_until(lambda: ran["cuda:1"] > 5)
        assert ran["cuda:0"] == 1, "only what was in flight there has been finished"
        engine.use(())
        gate.release(1)
        time.sleep(0.3)
        before = ran.total()
        time.sleep(0.3)
        assert ran.total() == before
        engine.use((a,))
        gate.release(100)
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(outcome.key for outcome in done) == list(range(40))
    assert all(outcome.value == outcome.key for outcome in done)
    assert ran.total() == 40


def test_stopping_one_scan_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    with shared() as engine:
        endless = engine.map(numbered(10**9, lambda i, device: time.sleep(0.001)), stop=stop)
        other: list[object] = []
        thread = threading.Thread(target=lambda: other.extend(engine.map(numbered(200))))
        thread.start()
        for number, _ in enumerate(endless):
            if number == 20:
                stop.set()
        thread.join(20)
        assert len(other) == 200
        assert next(engine.map(numbered(1))).value == 0


def test_stopping_without_any_device() -> None:
    stop = threading.Event()
    with shared(()) as engine:
        threading.Timer(0.2, stop.set).start()
        assert list(engine.map(numbered(5), stop=stop)) == []


def test_an_error_of_the_tasks_comes_after_the_tasks_before_it() -> None:
    def tasks() -> Iterator[Task[int, object]]:
        yield from numbered(5)
        raise KeyError("the feed")

    got: list[int] = []
    with shared() as engine:
        outcomes = engine.map(tasks())
        with pytest.raises(KeyError, match="the feed"):
            got.extend(outcome.key for outcome in outcomes)
    assert sorted(got) == list(range(5))


def test_a_scan_that_does_not_fetch_is_waited_for() -> None:
    with shared() as engine:
        engine.reach = 8
        outcomes = engine.map(numbered(1000))
        next(outcomes)
        time.sleep(0.3)
        client = engine._clients[0]
        assert client.pending <= 8
        assert len(list(outcomes)) == 999


def test_groups_are_solved_by_the_scan_that_they_belong_to() -> None:
    calls: list[tuple[int, list[int]]] = []

    def scan(engine: SharedEngine, number: int) -> list[object]:
        def together(tasks: list[Task[int, object]], device: str) -> list[Outcome[int, object]]:
            calls.append((number, [task.key for task in tasks]))
            assert all(task.run("") == number for task in tasks)
            return [Outcome(key=task.key, value=number, device=device) for task in tasks]

        tasks = (Task(key=i, run=lambda device: number, group="n", most=8) for i in range(50))
        return [outcome.value for outcome in engine.map(tasks, run_many=together)]  # type: ignore[arg-type]

    with shared((Device("cuda:0", slots=1),)) as engine:
        got: dict[int, list[object]] = {}
        threads = [threading.Thread(target=lambda n=n: got.update({n: scan(engine, n)})) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert got == {1: [1] * 50, 2: [2] * 50}
    assert calls


def test_a_scan_whose_part_of_a_group_raises_takes_no_other_down(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    mixed: list[set[int]] = []

    def scan(engine: SharedEngine, number: int) -> list[Outcome[int, object]]:
        def together(tasks: list[Task[int, object]], device: str) -> list[Outcome[int, object]]:
            if number == 1:
                raise RuntimeError("only this scan's")
            return [Outcome(key=task.key, value=number, device=device) for task in tasks]

        def tasks() -> Iterator[Task[int, object]]:
            if number == 1:  # the only slot waits until both scans have some
                yield Task(key=-1, run=lambda device: gate.wait(10), cost=1e9)
            for i in range(50):
                yield Task(key=i, run=lambda device: number, group="n", most=64)

        return list(engine.map(tasks(), run_many=together))  # type: ignore[arg-type]

    parts = SharedEngine._together

    def noted(engine: SharedEngine, tasks: Sequence[Task[int, object]], device: str) -> list[Outcome[int, object]]:
        mixed.append({id(engine._flying[task.key][0]) for task in tasks})
        return parts(engine, tasks, device)

    monkeypatch.setattr(SharedEngine, "_together", noted)
    with shared((Device("cuda:0", slots=1),)) as engine:
        got: dict[int, list[Outcome[int, object]]] = {}
        threads = [threading.Thread(target=lambda n=n: got.update({n: scan(engine, n)})) for n in (1, 2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(client.pending > 20 for client in engine._clients) == 2)
        gate.set()
        for thread in threads:
            thread.join(20)
    assert any(len(clients) == 2 for clients in mixed), "no group held tasks of both"
    assert [outcome.value for outcome in got[2]] == [2] * 50
    assert len(got[1]) == 51
    assert all(outcome.error is not None or outcome.value in (1, True) for outcome in got[1])
