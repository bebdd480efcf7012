"""The threads that read one range together."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hub_server import wait_until

from shardesd.checkpoint import crew as crew_module
from shardesd.checkpoint.crew import Crew, readers


class Buffer:
    """What a reference tells to be gone."""


def test_every_item_once_whoever_takes_it() -> None:
    crew = Crew(3)
    taken: list[int] = []
    threads: set[str] = set()

    def work(item: int) -> None:
        time.sleep(0.001)
        taken.append(item)
        threads.add(threading.current_thread().name)

    for count in (1, 2, 50):
        taken.clear()
        crew.each(work, range(count))
        assert sorted(taken) == list(range(count))
    assert len(threads) == 4, "the crew's, and the one that asked"


def test_many_ask_at_once() -> None:
    crew = Crew(4)
    sums = [0] * 8

    def ask(at: int) -> None:
        for _ in range(50):
            parts: list[int] = []
            crew.each(parts.append, range(9))
            sums[at] += sum(parts)

    askers = [threading.Thread(target=ask, args=(at,)) for at in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(30)
    assert sums == [50 * 36] * 8


def test_an_error_is_raised_once_nobody_works_any_more_and_no_item_is_begun_after_it() -> None:
    crew = Crew(3)
    working = threading.Semaphore(0)
    done: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            working.acquire()  # until another is at work
            raise OSError("item 0")
        working.release()
        time.sleep(0.05)
        done.append(item)

    with pytest.raises(OSError, match="item 0"):
        crew.each(work, range(1000))
    assert 1 <= len(done) <= 3
    before = list(done)
    time.sleep(0.12)
    assert done == before
    crew.each(done.append, [1000])
    assert done[-1] == 1000


def test_an_error_of_the_crew_is_raised() -> None:
    crew = Crew(2)
    caller = threading.get_ident()

    def work(item: int) -> None:
        time.sleep(0.01)
        if threading.get_ident() != caller:
            raise OSError("bad block")

    with pytest.raises(OSError, match="bad block"):
        crew.each(work, range(50))


@pytest.mark.parametrize("nth", range(1, 40))
@pytest.mark.timeout(60)
def test_ctrl_c_at_any_line_waits_for_the_others(nth: int) -> None:
    """They write into memory that is the caller's again afterwards."""
    crew = Crew(2)
    caller = threading.get_ident()
    working: list[int] = []
    lines = 0

    def work(item: int) -> None:
        if threading.get_ident() != caller:
            working.append(item)
            time.sleep(0.005)
            working.remove(item)

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != crew_module.__file__ or frame.f_code.co_name == "each":
            return None

        def local(frame: Any, event: str, argument: object) -> Any:
            nonlocal lines
            lines += event == "line"
            if lines == nth and event == "line":
                raise KeyboardInterrupt
            return local

        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            crew.each(work, range(6))
    finally:
        sys.settrace(before)
    assert working == []


def test_memory_is_free_after_an_error() -> None:
    crew = Crew(2)

    buffer = Buffer()
    gone = weakref.ref(buffer)

    def fail(item: int, buffer: Buffer = buffer) -> None:
        time.sleep(0.002)
        raise OSError("no")

    gc.disable()
    try:
        with suppress(OSError):
            crew.each(fail, range(9))
        del buffer, fail
        assert wait_until(lambda: gone() is None, 10)
    finally:
        gc.enable()


def test_a_crew_that_is_stuck_keeps_nothing_of_others() -> None:
    crew = Crew(1)
    stuck, here = threading.Event(), threading.Event()

    def hang(item: int) -> None:
        if threading.current_thread().name.startswith("shardesd-reader"):
            here.set()
            stuck.wait(20)
        else:
            here.wait(20)

    first = threading.Thread(target=crew.each, args=(hang, range(2)))
    first.start()
    assert here.wait(20)

    buffer = Buffer()
    gone = weakref.ref(buffer)
    done: list[int] = []
    crew.each(lambda item, buffer=buffer: done.append(item), range(5))
    assert sorted(done) == [0, 1, 2, 3, 4]
    del buffer
    gc.collect()
    assert gone() is None
    stuck.set()
    first.join(20)


def test_one_crew_however_many_ask_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "_crews", [])
    with ThreadPoolExecutor(16) as pool:
        crews = list(pool.map(lambda _: readers(), range(64)))
    assert len(set(crews)) == 1


@pytest.mark.parametrize("allowed", [0, 1])
def test_without_threads_the_caller_reads_alone(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    start, started = threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    crew = Crew(4)
    assert crew.size == allowed
    done: list[int] = []
    crew.each(done.append, range(9))
    assert sorted(done) == list(range(9))


def test_it_lets_go_of_what_it_worked_on() -> None:
    crew = Crew(2)

    buffer = Buffer()
    gone = weakref.ref(buffer)
    crew.each(lambda item, buffer=buffer: None, range(6))
    del buffer

    def freed() -> bool:
        gc.collect()
        return gone() is None

    assert wait_until(freed, 10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_a_crew_of_its_own() -> None:
    crew = readers()
    child = os.fork()
    if not child:
        taken: list[int] = []
        fresh = readers()
        fresh.each(taken.append, range(20))
        os._exit(0 if fresh is not crew and sorted(taken) == list(range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
