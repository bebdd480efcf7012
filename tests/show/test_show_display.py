from __future__ import annotations

import sys
import threading
import time

import pytest
from show_events import console, failed, finished, row, skipped, started, written

from shardesd.events import Fetching, MatrixStarted, Notice, RowDone, ShardDone, ShardOpened
from shardesd.show import display
from shardesd.show.plain import PlainLines
from shardesd.show.progress import Progress

EVENTS = (
    started(matrices=4, exact=False, resumed=1),
    Notice(message="ignored [bold]x.safetensors[/bold]"),
    Fetching(shard="a.safetensors", done=0, total=4_000_000_000),
    Fetching(shard="a.safetensors", done=4_000_000_000, total=4_000_000_000),
    ShardOpened(shard="a.safetensors", number=1, nbytes=4_000_000_000, matrices=4, exact=True),
    MatrixStarted(longname="a.[0]", device="cpu"),
    RowDone(row=row("a.[0]"), nbytes=100),
    RowDone(row=failed("b.[0]", reason="3 of 9 elements are NaN")),
    RowDone(row=skipped("c", reason="norm")),
    ShardDone(shard="a.safetensors", number=1),
    finished(failed=1, skipped={"norm": 1}, files=("results/models/m.csv",)),
)


def run(target, events=EVENTS, **options):
    with display(console=target, **options) as show:
        for event in events:
            show(event)
    return written(target)


def test_plain_lines():
    assert run(console(40)).splitlines() == [
        "meta-llama/Meta-Llama-3-8B-Instruct (8afb486): 4 shards, 16.0 GB, about 4 matrices, on cuda:0, cuda:1, "
        "to results",
        "continuing after 1 row of an earlier run",
        "note: ignored [bold]x.safetensors[/bold]",
        "downloading a.safetensors (4.0 GB)",
        "shard 1/4 a.safetensors (4.0 GB)",
        "failed: b.[0]: 3 of 9 elements are NaN",
        "done: 2 matrices analysed, 1 failed, 1 tensor skipped in 9.2 s, to results/models/m.csv",
    ]


def test_verbose_plain_lines_tell_every_row():
    text = run(console(), verbose=True)
    assert "a.[0]: 4096×4096, alpha 3.21 (good), D 0.046, 1.2 s" in text
    assert "skipped: c: norm" in text


def test_quiet_tells_failures_only():
    assert run(console(), quiet=True) == "failed: b.[0]: 3 of 9 elements are NaN\n"
    assert run(console(terminal=True), quiet=True) == "failed: b.[0]: 3 of 9 elements are NaN\n"


def test_an_interrupted_scan_is_called_so():
    assert "interrupted: 2 matrices analysed" in run(console(), [started(), finished(interrupted=True)])


@pytest.mark.parametrize("verbose", [False, True])
def test_no_escape_codes_without_a_terminal(verbose, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    hostile = RowDone(row=failed("\x1b[31mx", reason="\x1b]0;title\x07"))
    assert "\x1b" not in run(console(), [*EVENTS, hostile], verbose=verbose)


def test_stderr_is_the_default_and_stays_plain_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with display() as show:
        for event in EVENTS:
            show(event)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("meta-llama/")
    assert "\x1b" not in captured.err


def test_mere_progress_has_a_line_now_and_then():
    now = [0.0]
    plain, progress = PlainLines(clock=lambda: now[0]), Progress(lambda: now[0])
    lines = []
    for event in [started(matrices=1000), *(RowDone(row=row(f"{i}"), nbytes=10**6) for i in range(1000))]:
        progress.add(event)
        lines += plain.lines(event, progress.view)
        now[0] += 0.05
    due = [line for line in lines if line.startswith("  ")]
    # In 50 s: at 10, 20, 30 and 40 s.
    assert len(due) == 4
    assert " of 1000 matrices, " in due[0]
    assert "ETA 0:" in due[0]
    assert "20.0 MB/s" in due[-1]


def test_the_live_picture_leaves_a_clean_screen():
    target = console(terminal=True)
    text = run(target, verbose=True)
    assert "note: ignored [bold]x.safetensors[/bold]" in text
    assert "skipped: c: norm" in text
    # The cursor is shown again, and the picture's lines are erased.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "\x1b[2K" in text[text.rindex("g good") :]


def test_the_sum_stays_where_no_report_follows(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    def shown(json):
        monkeypatch.setattr(sys, "stdout", Terminal())
        text = run(console(terminal=True), json=json)
        monkeypatch.undo()
        return "done: 2 matrices analysed" in text

    assert not shown(json=False)
    assert shown(json=True)
    assert "done: 2 matrices analysed" in run(console(terminal=True))


def test_the_live_picture_leaves_stdout_alone(capsys):
    with display(console=console(terminal=True)) as show:
        show(started())
        print('{"a": 1}')
        time.sleep(0.3)
    assert capsys.readouterr().out == '{"a": 1}\n'


def test_an_error_ends_the_picture_and_goes_on():
    target = console(terminal=True)

    def interrupted():
        with display(console=target) as show:
            show(started())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    deadline = time.monotonic() + 5
    while any("Refresh" in type(thread).__name__ for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "\x1b[?25h" in written(target)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("terminal", [False, True])
def test_other_encodings(encoding, terminal):
    events = [*EVENTS, Notice(message="λ ≈ 重み"), RowDone(row=failed("重み", reason="…"))]
    text = run(console(terminal=terminal, encoding=encoding), events, verbose=True)
    assert "note: l ~ ??" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_thousands_of_events_are_quick_from_many_threads(terminal):
    target = console(terminal=terminal)
    spent = time.process_time()
    with display(console=target) as show:
        show(started(matrices=20_000))

        def feed(k):
            for i in range(5000):
                show(MatrixStarted(longname=f"{k}.{i}", device="cpu"))
                show(RowDone(row=row(f"{k}.{i}"), nbytes=10))

        threads = [threading.Thread(target=feed, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        show(RowDone(row=failed()))
        show(finished(analysed=20_000, failed=1))
    # 40,000 events; a matrix takes milliseconds at the least.
    assert time.process_time() - spent < 8
    assert "20,000 matrices analysed, 1 failed" in written(target)
