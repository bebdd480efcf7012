from __future__ import annotations

import threading

import pytest
from show_events import failed, row, skipped, started

from shardesd.events import Fetching, MatrixStarted, RowDone, ScanFinished, ShardDone, ShardOpened
from shardesd.show.live import picture
from shardesd.show.plain import progress_line
from shardesd.show.progress import LAST_ROWS, Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return Progress(clock)


def opened(number, nbytes=4_000_000_000, matrices=None, exact=False):
    return ShardOpened(shard=f"{number}.safetensors", number=number, nbytes=nbytes, matrices=matrices, exact=exact)


def test_nothing_is_known_before_the_start(progress):
    view = progress.view()
    assert view.started is None
    assert (view.matrices, view.eta, view.fetched, view.running) == (None, None, None, None)


def test_rows_count_as_matrices_and_skips_do_not(progress):
    progress.add(started(matrices=3))
    for event in (row("a", alpha=1.5), failed("b"), skipped("c"), row("d", alpha=-1.0)):
        progress.add(RowDone(row=event))
    view = progress.view()
    assert (view.matrices_done, view.matrices, view.failed, view.skipped) == (3, 3, 1, 1)
    assert [r.longname for r in view.rows] == ["a", "b", "d"]
    assert view.ranges == {"over-trained": 1, "no fit": 1}


def test_no_eta_without_rows_and_then_one_that_counts_down(progress, clock):
    progress.add(started(matrices=10))
    clock.now += 30
    assert progress.view().eta is None
    clock.now += 10
    progress.add(RowDone(row=row("a")))
    progress.add(RowDone(row=row("b")))
    assert progress.view().eta == pytest.approx(8 * 40 / 2)
    clock.now += 60
    assert progress.view().eta == pytest.approx(100)
    clock.now += 200
    assert progress.view().eta is None


def test_eta_ends_at_zero(progress, clock):
    progress.add(started(matrices=1))
    clock.now += 5
    progress.add(RowDone(row=row()))
    assert progress.view().eta == 0


def test_rows_of_an_earlier_run_are_done_but_say_nothing_of_speed(progress, clock):
    progress.add(started(matrices=100, resumed=50))
    assert progress.view().matrices_done == 50
    clock.now += 10
    progress.add(RowDone(row=row()))
    view = progress.view()
    assert view.matrices_done == 51
    assert view.eta == pytest.approx(490)


def test_an_estimate_gives_way_to_better_ones(progress):
    progress.add(started(matrices=None, exact=False))
    assert progress.view().matrices is None
    progress.add(opened(1, matrices=80))
    assert (progress.view().matrices, progress.view().exact) == (80, False)
    progress.add(opened(2, matrices=77, exact=True))
    assert (progress.view().matrices, progress.view().exact) == (77, True)


def test_more_rows_than_foretold(progress):
    progress.add(started(matrices=1, exact=True))
    for name in "abc":
        progress.add(RowDone(row=row(name)))
    view = progress.view()
    assert (view.matrices_done, view.matrices, view.exact) == (3, 3, False)


def test_bytes_of_shards(progress):
    progress.add(started(shards=2, total_bytes=8_000_000_000))
    progress.add(opened(1))
    progress.add(RowDone(row=row("a"), nbytes=1_000_000_000))
    assert progress.view().bytes_done == 1_000_000_000
    progress.add(ShardDone(shard="1.safetensors", number=1))
    assert (progress.view().bytes_done, progress.view().shards_done) == (4_000_000_000, 1)
    progress.add(opened(2))
    progress.add(RowDone(row=row("b"), nbytes=500_000_000))
    assert progress.view().bytes_done == 4_500_000_000


def test_rates(progress, clock):
    progress.add(started())
    # 900 MB were there already from a download that broke: they are no speed.
    for i in range(11):
        progress.add(Fetching(shard="2.safetensors", done=900_000_000 + i * 50_000_000, total=2_000_000_000))
        progress.add(RowDone(row=row(f"{i}"), nbytes=0 if i == 0 else 200_000_000))
        clock.now += 1
    clock.now -= 1
    view = progress.view()
    assert view.fetched.per_second == pytest.approx(50e6)
    assert view.fetched.active
    assert view.bytes_per_second == pytest.approx(200e6)
    progress.add(Fetching(shard="2.safetensors", done=2_000_000_000, total=2_000_000_000))
    assert not progress.view().fetched.active


def test_the_longest_running_matrix_is_told(progress, clock):
    progress.add(started())
    progress.add(MatrixStarted(longname="a", device="cuda:0"))
    clock.now += 2
    progress.add(MatrixStarted(longname="b", device="cuda:1"))
    clock.now += 1
    running = progress.view().running
    assert (running.longname, running.device, running.seconds, running.others) == ("a", "cuda:0", 3, 1)
    progress.add(RowDone(row=row("a")))
    assert progress.view().running.longname == "b"
    progress.add(ScanFinished(model_id="m", analysed=1, failed=0))
    assert progress.view().running is None


def test_a_second_scan_starts_from_nothing(progress):
    progress.add(started(matrices=2))
    progress.add(RowDone(row=row()))
    progress.add(started(matrices=7))
    view = progress.view()
    assert (view.matrices_done, view.matrices, view.rows) == (0, 7, ())


def test_memory_of_this_process(progress):
    memory = progress.view().memory
    assert 5_000_000 < memory.rss <= memory.peak < 2**45


def test_events_of_many_threads_are_all_counted(progress):
    progress.add(started(matrices=8 * 1000))
    stop = threading.Event()
    views = []

    def look():
        while not stop.is_set():
            views.append(progress.view())

    def feed(k):
        for i in range(1000):
            progress.add(MatrixStarted(longname=f"{k}.{i}", device="cpu"))
            progress.add(RowDone(row=row(f"{k}.{i}"), nbytes=3))

    threads = [threading.Thread(target=feed, args=(k,)) for k in range(8)]
    watcher = threading.Thread(target=look)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    view = progress.view()
    assert (view.matrices_done, view.running) == (8000, None)
    assert view.ranges == {"good": 8000}
    assert len(view.rows) == LAST_ROWS
    assert [v.matrices_done for v in views] == sorted(v.matrices_done for v in views)


def test_fetched_and_needed_bytes_add_up_over_shards_and_kept_rows_are_counted(progress):
    progress.add(started(matrices=3))
    for shard, done, total in (("1", 0, 100), ("1", 100, 100), ("2", 0, 50), ("2", 20, 50), ("3", 5, None)):
        progress.add(Fetching(shard=shard, done=done, total=total))
    progress.add(RowDone(row=row("a"), kept=True))
    progress.add(RowDone(row=row("b")))
    view = progress.view()
    assert (view.fetched_bytes, view.needed_bytes, view.kept) == (125, 155, 1)
    text = "\n".join(line.plain for line in picture(view, 120, 40))
    assert "125/155 B" in text
    assert "1 kept from before" in text
    assert "125/155 B fetched" in progress_line(view)
    assert "1 kept from before" in progress_line(view)
