"""The threads that read one range together."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest

from shardesd.checkpoint.crew import Crew, readers


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


def test_an_error_is_raised_once_nobody_works_any_more() -> None:
    crew = Crew(3)
    working = threading.Semaphore(0)
    done: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            working.acquire()  # until another is at work
            raise OSError("item 0")
        working.release()
        time.sleep(0.02)
        done.append(item)

    with pytest.raises(OSError, match="item 0"):
        crew.each(work, range(8))
    assert sorted(done) == list(range(1, 8))
    crew.each(done.append, [8])


def test_ctrl_c_waits_for_the_others() -> None:
    """They write into memory that is the caller's again afterwards."""
    crew = Crew(2)
    main = threading.get_ident()
    done: list[int] = []

    def work(item: int) -> None:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        time.sleep(0.05)
        done.append(item)

    with pytest.raises(KeyboardInterrupt):
        crew.each(work, range(5))
    before = list(done)
    time.sleep(0.12)
    assert done == before


def test_it_lets_go_of_what_it_worked_on() -> None:
    crew = Crew(2)

    class Buffer:
        pass

    buffer = Buffer()
    gone = weakref.ref(buffer)
    crew.each(lambda item, buffer=buffer: None, range(6))
    del buffer
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_a_crew_of_its_own() -> None:
    crew = readers()
    if crew is None:
        pytest.skip("one core")
    child = os.fork()
    if not child:
        taken: list[int] = []
        fresh = readers()
        assert fresh is not None
        fresh.each(taken.append, range(20))
        os._exit(0 if fresh is not crew and sorted(taken) == list(range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
