"""Ranges fetched ahead: each byte once, within the limit, in any order of reading, and no reader waits for ever."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hub_server import wait_until

from shardesd.errors import SourceError
from shardesd.source import Ahead
from shardesd.source import ahead as module

DATA = random.Random(4).randbytes(1_000_000)


class FakeRemote:
    """A remote file in memory that gives pieces of 1000 bytes, and notes what was asked for."""

    size = len(DATA)

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.fail_at: int | None = None
        self.before: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def read(self, start: int, end: int, sink: Callable[[int, bytes], None]) -> None:
        with self._lock:
            self.asked.append((start, end))
        self.before()
        for at in range(start, end, 1000):
            if self.fail_at is not None and at <= self.fail_at < at + 1000:
                raise SourceError("broken")
            sink(at, DATA[at : min(at + 1000, end)])

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.asked)


@pytest.fixture
def remote() -> FakeRemote:
    return FakeRemote()


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "REQUEST_BYTES", 20_000)
    monkeypatch.setattr(module, "GAP_BYTES", 500)
    yield
    assert wait_until(lambda: not any(thread.name == "ranges" for thread in threading.enumerate()))


def ahead(remote: FakeRemote, spans: list[tuple[int, int]], limit: int = 10**9, report: object = None) -> Ahead:
    return Ahead(remote, spans, limit=limit, report=report)  # type: ignore[arg-type]


def check(fetched: Ahead, span: tuple[int, int]) -> None:
    found = fetched.find(span)
    assert found is not None
    with found as data:
        assert data.tobytes() == DATA[span[0] : span[1]]


def test_every_byte_once_whatever_the_order(remote: FakeRemote) -> None:
    seed = random.Random(5)
    edges = sorted(seed.sample(range(1_000_000), 60))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    for limit in (1, 30_000, 10**9):
        remote.asked.clear()
        fetched = ahead(remote, spans, limit)
        order = list(spans)
        seed.shuffle(order)
        for span in order:
            check(fetched, span)
            assert fetched.find(span) is None
        wanted = sum(end - start for start, end in spans)
        assert wanted <= remote.nbytes == fetched.total <= 1.01 * wanted
        fetched.close()


def test_neighbours_are_joined_and_far_ones_are_not(remote: FakeRemote) -> None:
    fetched = ahead(remote, [(0, 10_000), (10_000, 18_000), (18_100, 19_000), (19_600, 19_900), (500_000, 545_000)])
    for span in ((0, 10_000), (10_000, 18_000), (18_100, 19_000), (19_600, 19_900), (500_000, 545_000)):
        check(fetched, span)
    assert sorted(remote.asked) == [
        (0, 19_000),
        (19_600, 19_900),
        (500_000, 520_000),
        (520_000, 540_000),
        (540_000, 545_000),
    ]
    fetched.close()


def test_a_span_that_is_read_three_times_is_fetched_once(remote: FakeRemote) -> None:
    fetched = ahead(remote, [(0, 5000)] * 3)
    for _ in range(3):
        check(fetched, (0, 5000))
    assert fetched.find((0, 5000)) is None
    assert remote.asked == [(0, 5000)]
    fetched.close()


def test_one_who_was_not_announced_has_it_too(remote: FakeRemote) -> None:
    """What is compared for a tie may be the very span that a matrix is read from at that moment."""
    go = threading.Event()
    remote.before = lambda: go.wait(10) and None
    fetched = ahead(remote, [(0, 5000)])
    found: list[bytes | BaseException] = []

    def look() -> None:
        try:
            with fetched.find((0, 5000)) as data:  # type: ignore[union-attr]
                found.append(data.tobytes())
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    go.set()
    for thread in threads:
        thread.join(10)
    assert found == [DATA[:5000]] * 3
    assert fetched.find((0, 5000)) is None
    fetched.close()


def test_no_more_than_the_limit_lies_unread(remote: FakeRemote) -> None:
    spans = [(k * 50_000, k * 50_000 + 10_000) for k in range(20)]
    fetched = ahead(remote, spans, limit=35_000)
    time.sleep(0.2)
    assert sorted(remote.asked) == spans[:3]
    check(fetched, spans[0])
    assert wait_until(lambda: sorted(remote.asked) == spans[:4])
    time.sleep(0.05)
    assert sorted(remote.asked) == spans[:4]
    check(fetched, spans[15])  # out of turn: at once, whatever the limit
    assert spans[15] in remote.asked
    fetched.close()


def test_another_order_of_reading_brings_no_more_into_memory(
    remote: FakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of every three neighbours first: the others stay where they are until it is their turn."""
    live = most = 0
    allocate = module.memory

    def memory(nbytes: int) -> np.ndarray:
        nonlocal live, most
        live += nbytes
        most = max(most, live)
        data = allocate(nbytes)
        weakref.finalize(data, release, nbytes)
        return data

    def release(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    monkeypatch.setattr(module, "memory", memory)
    spans = [(k * 5000, k * 5000 + 5000) for k in range(150)]
    fetched = ahead(remote, spans, limit=20_000)
    for span in (*spans[1::3], *spans[0::3], *spans[2::3]):
        check(fetched, span)
    assert remote.nbytes == fetched.total == 750_000
    assert most <= 20_000 + 2 * 5000, most
    fetched.close()


def test_one_that_is_larger_than_the_limit_is_fetched_all_the_same(remote: FakeRemote) -> None:
    spans = [(0, 100_000), (100_000, 200_050), (200_050, 200_100)]
    fetched = ahead(remote, spans, limit=1000)
    for span in spans:
        check(fetched, span)
    fetched.close()


def test_many_threads(remote: FakeRemote) -> None:
    spans = [(k * 9_000, k * 9_000 + 9_000 - k % 7) for k in range(100)]
    fetched = ahead(remote, spans, limit=50_000)
    problems: list[BaseException] = []

    def read(mine: list[tuple[int, int]]) -> None:
        try:
            for span in mine:
                check(fetched, span)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=read, args=(spans[k::5],)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert problems == []
    fetched.close()


def test_an_error_reaches_the_readers_of_its_bytes_only(remote: FakeRemote) -> None:
    remote.fail_at = 65_000
    spans = [(0, 30_000), (60_000, 70_000), (100_000, 110_000)]
    fetched = ahead(remote, spans)
    check(fetched, spans[0])
    with pytest.raises(SourceError, match="broken"):
        check(fetched, spans[1])
    check(fetched, spans[2])
    fetched.close()


def test_closing_ends_requests_and_readers(remote: FakeRemote) -> None:
    free = threading.Event()
    remote.before = lambda: (free.wait(5), None)[1]
    fetched = ahead(remote, [(0, 50_000)])
    failed = threading.Event()

    def read() -> None:
        try:
            check(fetched, (0, 50_000))
        except ValueError:
            failed.set()

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.05)
    fetched.close()
    assert failed.wait(2)
    free.set()
    thread.join()


def test_progress_ends_at_the_total(remote: FakeRemote) -> None:
    seen: list[tuple[int, int]] = []
    fetched = ahead(remote, [(0, 90_000), (200_000, 210_000)], report=lambda done, total: seen.append((done, total)))
    for span in ((0, 90_000), (200_000, 210_000)):
        check(fetched, span)
    assert wait_until(lambda: (100_000, 100_000) in seen)
    fetched.close()
