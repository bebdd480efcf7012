"""Ranges that are read in parts by the C library's own threads."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from shardesd.checkpoint import aio
from shardesd.checkpoint.reader import Reader
from shardesd.errors import ShardChanged

T = TypeVar("T")
PART = 4096

needs_library = pytest.mark.usefixtures("library")


@pytest.fixture
def library() -> aio._Library:
    found = aio._library()
    if found is None:
        pytest.skip("needs glibc and more than one core")
    return found


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "PART_BYTES", PART)


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(0).bytes(100 * PART + 123)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file"


def aside(work: Callable[[], T]) -> T:
    """What `work` gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(30)


def read(path: Path, start: int, end: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The bytes, zero where they are unread, and what is."""
    target = np.zeros(end - start, np.uint8)
    with open(path, "rb") as file:
        spans = aio.unread(file.fileno(), target, start)
    return target.tobytes(), list(spans)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@needs_library
def test_all_parts_are_read(path: Path, content: bytes) -> None:
    def work() -> None:
        for start, end in [(0, len(content)), (1, PART + 2), (PART - 1, 40 * PART), (50 * PART, 52 * PART)]:
            assert read(path, start, end) == (content[start:end], [])

    aside(work)


def test_one_part_and_the_main_thread_are_left_to_others(path: Path) -> None:
    assert aside(lambda: read(path, 5, 5 + PART))[1] == [(0, PART)]
    assert read(path, 0, 3 * PART)[1] == [(0, 3 * PART)]


def test_without_the_library_all_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_load", lambda: None)
    assert aside(lambda: read(path, 0, 3 * PART))[1] == [(0, 3 * PART)]


def test_many_threads_at_once(path: Path, content: bytes) -> None:
    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        with Reader(path) as reader:
            for _ in range(40):
                start, end = sorted(map(int, random.integers(0, len(content), 2)))
                with reader.read(start, end) as data:
                    assert data.tobytes() == content[start:end]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@needs_library
def test_what_the_file_does_not_hold_is_said_to_be_unread(path: Path, content: bytes) -> None:
    start = len(content) - PART - 23
    data, spans = aside(lambda: read(path, start, start + 3 * PART))
    assert data.rstrip(b"\0") == content[start:].rstrip(b"\0")
    assert spans == [(PART, 2 * PART), (2 * PART, 3 * PART)]


def test_a_file_that_ends_early_is_one_that_changed(path: Path) -> None:
    with Reader(path) as reader:
        os.truncate(path, 50 * PART)

        def work() -> None:
            with reader.read(0, 90 * PART):
                pass

        with pytest.raises(ShardChanged, match="to 204800 bytes while it was read"):
            aside(work)


@needs_library
def test_what_can_not_be_read_is_unread(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        spans = aside(lambda: aio.unread(folder, np.zeros(3 * PART, np.uint8), 0))
    finally:
        os.close(folder)
    assert spans == [(0, PART), (PART, 2 * PART), (2 * PART, 3 * PART)]


@needs_library
def test_signals_meanwhile(path: Path, content: bytes) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    over = threading.Event()

    def work() -> None:
        try:
            for _ in range(300):
                assert read(path, 0, len(content)) == (content, [])
                assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        finally:
            over.set()

    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)
            (thread,) = pool._threads
            while not over.wait(0.0001):
                assert thread.ident is not None
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
            running.result()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_descriptors(path: Path, content: bytes, library: aio._Library, monkeypatch: pytest.MonkeyPatch) -> None:
    aside(lambda: read(path, 0, len(content)))
    before = descriptors()
    aside(lambda: read(path, 0, len(content)))
    assert descriptors() == before, "copies of the file's descriptor were left open"
    for allowed in (0, 1, 3):
        made: list[int] = []

        def copy(fd: int, command: int, least: int, made: list[int] = made, allowed: int = allowed) -> int:
            made.append(library.fcntl(fd, command, least) if len(made) < allowed else -1)
            return made[-1]

        monkeypatch.setattr(aio, "_load", lambda copy=copy: replace(library, fcntl=copy))
        assert aside(lambda: read(path, 0, len(content))) == (content, [])
    assert descriptors() == before


def test_threads_together_copy_no_more_descriptors_than_they_may(
    path: Path, content: bytes, library: aio._Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowance = aio._Allowance(5)
    monkeypatch.setattr(aio, "_allowance", allowance)
    open_now, most = [0], [0]

    def copy(fd: int, command: int, least: int) -> int:
        open_now[0] += 1  # the interpreter's lock is kept, as by the real one
        most[0] = max(most[0], open_now[0])
        return int(library.fcntl(fd, command, least))

    def close(fd: int) -> int:
        open_now[0] -= 1
        return int(library.close(fd))

    monkeypatch.setattr(aio, "_load", lambda: replace(library, threads=4, fcntl=copy, close=close))

    def work(_: int) -> None:
        for _ in range(30):
            assert read(path, 0, len(content)) == (content, [])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert 4 <= most[0] <= 5
    assert open_now[0] == 0
    assert allowance._left == 5, "what was taken was given back"
    assert aio._most_copies() <= 256


def test_a_range_of_many_parts_is_read_by_several_calls(
    path: Path, content: bytes, library: aio._Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []

    def call(mode: int, requests: int, count: int, event: None) -> int:
        parts.append(count)
        return int(library.lio_listio(mode, requests, count, event))

    monkeypatch.setattr(aio, "_load", lambda: replace(library, hand_over=call))
    monkeypatch.setattr(aio, "_MOST_PARTS", 30)
    assert aside(lambda: read(path, 7, len(content))) == (content[7:], [])
    assert parts == [30, 30, 30, 11]
    start = len(content) - 40 * PART
    data, spans = aside(lambda: read(path, start, start + 70 * PART))
    assert data[: 40 * PART] == content[start:]
    assert spans == [(at * PART, (at + 1) * PART) for at in range(40, 70)]


@needs_library
def test_ranges_are_under_way_together(path: Path, content: bytes) -> None:
    """And are waited for in whatever order; each may be asked again."""

    def work() -> None:
        before = descriptors()
        with open(path, "rb") as file:
            targets = [np.zeros(length, np.uint8) for length in (3 * PART, 50 * PART + 1, 90 * PART, 2 * PART)]
            ranges = [aio.begin(file.fileno(), target, 11 + at) for at, target in enumerate(targets)]
            for at in (2, 0, 3, 1):
                begun, target = ranges[at], targets[at]
                assert begun is not None
                assert begun.unread() == begun.unread() == []
                assert target.tobytes() == content[11 + at :][: len(target)]
        assert descriptors() == before
        assert not aio._under_way

    aside(work)


@needs_library
def test_what_is_let_go_of_is_kept_until_it_has_been_read(path: Path, content: bytes) -> None:
    def work() -> None:
        with open(path, "rb") as file:
            aio.begin(file.fileno(), np.zeros(len(content), np.uint8), 0)
            gc.collect()
            (begun,) = aio._under_way
            assert begun.unread() == []
            assert begun.target.tobytes() == content
        assert not aio._under_way

    aside(work)


def reads_late(library: aio._Library, handed: list[Any] | None = None) -> aio._Library:
    """What is `handed` over is begun when it is waited for."""
    handed = [] if handed is None else handed

    def hand_over(mode: int, requests: int, count: int, event: None) -> int:
        pointers = (ctypes.c_uint64 * count).from_address(requests)
        for at in pointers:
            ctypes.c_int.from_address(at + 112).value = errno.EINPROGRESS
        handed.append((ctypes.c_uint64 * count)(*pointers))
        return 0

    def wait(mode: int, requests: int, count: int, event: None) -> int:
        while handed:
            pointers = handed.pop()
            library.lio_listio(0, ctypes.addressof(pointers), len(pointers), None)
        return int(library.lio_listio(mode, requests, count, event))

    return replace(library, hand_over=hand_over, lio_listio=wait)


def test_a_wait_that_can_not_be_asked_for_is_asked_again(
    path: Path, content: bytes, library: aio._Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for it, say: what has not come is not taken for read."""
    waits = iter([False, False, True])
    late = reads_late(library)

    def wait(mode: int, requests: int, count: int, event: None) -> int:
        return int(late.lio_listio(mode, requests, count, event)) if next(waits) else -1

    monkeypatch.setattr(aio, "_load", lambda: replace(late, lio_listio=wait))
    assert aside(lambda: read(path, 0, len(content))) == (content, [])
    assert next(waits, None) is None


@pytest.mark.parametrize(
    ("failing", "times"), [("minimum", 1), ("resize", 1), ("unique", 1), ("unique", 3), ("cumsum", 1)]
)
def test_without_memory_nothing_is_left_under_way(
    path: Path, library: aio._Library, monkeypatch: pytest.MonkeyPatch, failing: str, times: int
) -> None:
    """What was being read into is read into no more when the error arrives, and what was taken is given back."""
    left = [times]
    call = getattr(np, failing)

    def fails(*given: Any, **how: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError
        return call(*given, **how)

    handed: list[Any] = []
    late = reads_late(library, handed)
    monkeypatch.setattr(aio, "_load", lambda: late)

    def work() -> None:
        before = descriptors(), aio._allowance._left
        with Reader(path) as reader:
            with monkeypatch.context() as short:
                short.setattr(np, failing, fails)
                with pytest.raises(MemoryError), reader.read(0, 90 * PART, np.zeros(90 * PART, np.uint8)):
                    pass
            assert not handed
            assert not aio._under_way
        assert reader.file.closed
        assert (descriptors(), aio._allowance._left) == before
        assert left == [0]

    aside(work)


@needs_library
def test_a_file_that_changes_while_a_range_is_under_way(path: Path) -> None:
    def work() -> None:
        into = np.zeros(90 * PART, np.uint8)
        with Reader(path) as reader:
            reading = reader.read(0, 90 * PART, into)
            os.truncate(path, 50 * PART)
            with pytest.raises(ShardChanged, match="while it was read"):
                reading.__enter__()
            with pytest.raises(ShardChanged):
                reader.read(0, 90 * PART, into)
        assert reader.file.closed

    aside(work)
    assert not aio._under_way


@needs_library
def test_a_file_is_open_while_a_range_is_under_way(path: Path, content: bytes) -> None:
    def work() -> None:
        reader = Reader(path)
        reading = reader.read(5, 5 + 70 * PART, np.zeros(80 * PART, np.uint8))
        reader.close()
        assert not reader.file.closed
        with reading as data:
            assert data.tobytes() == content[5 : 5 + 70 * PART]
        assert reader.file.closed

    aside(work)


@needs_library
def test_a_fork_reads_without_threads_that_it_has_not(path: Path, content: bytes) -> None:
    aside(lambda: read(path, 0, len(content)))
    child = os.fork()
    if not child:
        try:
            with Reader(path) as reader, reader.read(0, len(content)) as data:
                right = data.tobytes() == content
            os._exit(0 if right and aio._library() is None else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@needs_library
@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (3, 3), (4, 4), (7, 4), (16, 8), (32, 16), (128, 32)])
def test_some_cores_are_left_to_others(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    found = aio._load.__wrapped__()
    assert found is not None
    assert found.threads == threads


@needs_library
def test_one_core_has_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(1))
    assert aio._load.__wrapped__() is None
