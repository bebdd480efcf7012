"""A batch on the screen: one picture that fits any terminal, and plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from shardesd.events import (
    BatchEvent,
    BatchFinished,
    BatchStarted,
    DeviceReport,
    EngineReport,
    Fetching,
    GpuChanged,
    MatrixStarted,
    ModelDone,
    ModelEvent,
    ModelFailed,
    ModelStarted,
    Notice,
    RowDone,
    ScanStarted,
    ShardDone,
    ShardOpened,
)
from shardesd.records import Row
from shardesd.show import batch_display
from shardesd.show.batch_live import batch_picture
from shardesd.show.batch_progress import BatchProgress

GB = 1_000_000_000
MODEL = "meta-llama/Llama-3.1-70B-Instruct"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def events() -> list[BatchEvent]:
    def inner(event: object, model: str = MODEL) -> ModelEvent:
        return ModelEvent(model=model, event=event)  # type: ignore[arg-type]

    started = ScanStarted(
        model_id=MODEL,
        revision=None,
        commit=None,
        shards=30,
        total_bytes=140 * GB,
        matrices=560,
        exact=True,
        devices=("cuda:0",),
        out="results",
    )
    working = DeviceReport(name="cuda:0", working=("a", "b"), done=7, memory=3 * GB)
    return [
        BatchStarted(models=200, done=40, failed=3, left=157, total_bytes=1000 * GB, out="results"),
        GpuChanged(gpu="cuda:0", state="ours"),
        GpuChanged(gpu="cuda:1", state="busy", others_bytes=60 * GB),
        GpuChanged(gpu="cuda:2", state="waiting"),
        ModelStarted(model="org/small", nbytes=10 * GB, attempt=1),
        ModelDone(model="org/small", analysed=74, failed=0, seconds=12.5),
        ModelStarted(model="org/lost", nbytes=None, attempt=1),
        ModelFailed(model="org/lost", stage="source", reason="network", message="no way", attempts=1, again_in=30.0),
        ModelStarted(model="org/broken", nbytes=None, attempt=1),
        ModelFailed(model="org/broken", stage="checkpoint", reason="malformed", message="torn\x1b[2J", attempts=1),
        ModelStarted(model=MODEL, nbytes=140 * GB, attempt=1),
        inner(started),
        inner(ShardOpened(shard="s1", number=1, nbytes=5 * GB, matrices=560, exact=True)),
        inner(MatrixStarted(longname="model.layers.0.mlp.up_proj", device="cuda:0")),
        inner(RowDone(row=Row(model_id=MODEL, longname="a"), nbytes=GB)),
        inner(RowDone(row=Row(model_id=MODEL, longname="b", status="failed", reason="NaN"), nbytes=GB)),
        inner(ShardDone(shard="s1", number=1)),
        inner(Fetching(shard="s2", done=GB, total=5 * GB)),
        inner(EngineReport(devices=(working,), ready=3, bytes_in_flight=5)),
    ]


def progress() -> BatchProgress:
    clock = Clock()
    progress = BatchProgress(clock=clock)
    for event in events():
        progress.add(event)
        clock.now += 1
    return progress


def test_the_picture_says_it_all() -> None:
    lines = [line.plain for line in batch_picture(progress().view(), 140, 40)]
    text = "\n".join(lines)
    assert lines[0].startswith("45/200 models")
    assert "ETA" in lines[0]
    for words in (
        "41 done · 4 failed · 155 left · 1 to be tried again",
        "0.0/1.0 TB read",
        "shards 1/30",
        "matrices 2/560",
        "1 failed",
        "downloading 1.0/5.0 GB",
        "cuda:0   2 matrices in work, 3.0 GB",
        "cuda:1   in use by others, 60.0 GB",
        "cuda:2   not free for long enough yet",
        "org/broken: failed: torn�[2J [malformed]",
        "org/lost: failed: no way [network] (again in 30.0 s)",
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [20, 40, 79, 200])
@pytest.mark.parametrize("height", [3, 6, 10, 24])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    lines = batch_picture(progress().view(), width, height)
    assert len(lines) <= height - 1
    assert all(cell_len(line.plain) <= width for line in lines)


def test_eta_is_by_bytes_and_waits_for_something_to_go_by() -> None:
    clock = Clock()
    progress = BatchProgress(clock=clock)
    assert progress.view().eta is None
    progress.add(BatchStarted(models=2, done=0, failed=0, left=2, total_bytes=300, out="x"))
    assert progress.view().eta is None
    progress.add(ModelStarted(model="a", nbytes=100, attempt=1))
    clock.now += 10
    progress.add(ModelDone(model="a", analysed=1, failed=0, seconds=10))
    assert progress.view().eta == pytest.approx(20)
    assert progress.view().left == 1


def shown(live: bool, **options: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=live, force_interactive=live, width=100, height=30, color_system=None)
    with batch_display(console=console, **options) as listen:
        for event in events():
            listen(event)
        listen(Notice(message="something"))
        listen(
            BatchFinished(
                done=41, failed=4, left=155, failed_rows=1, seconds=60.0, files=("summary.csv",), interrupted=True
            )
        )
    return stream.getvalue()


def test_on_a_terminal_failures_and_the_end_stay() -> None:
    text = shown(live=True)
    assert "note: something" in text
    tail = text[text.rindex("\x1b[2K") :] if "\x1b[2K" in text else text
    assert "interrupted: 41 done (1 of them with failed matrices), 4 failed, 155 left in 1:00" in tail
    assert "torn\x1b" not in text


def test_plain_lines() -> None:
    assert shown(live=False).splitlines() == [
        "200 models: 40 done, 3 failed, 157 left, 1.0 TB, to results",
        "cuda:0: taken",
        "cuda:1: in use by others, 60.0 GB used",
        "cuda:2: not free for long enough yet",
        "44/200 org/small: done, 74 matrices, 12.5 s",
        "org/lost: failed: no way [network] (again in 30.0 s)",
        "45/200 org/broken: failed: torn�[2J [malformed]",
        "note: something",
        "interrupted: 41 done (1 of them with failed matrices), 4 failed, 155 left in 1:00; "
        "run the same command again to continue",
        "written summary.csv",
    ]
    assert len(shown(live=False, quiet=True).splitlines()) == 2
