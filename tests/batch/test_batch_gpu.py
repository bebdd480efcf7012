"""On a real GPU, beside another process that takes memory on it and frees it again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import one_file, random_weights

import shardesd
from shardesd.commands import Commands, Counts
from shardesd.engine import Neighbours, load_nvml, visible_gpus
from shardesd.events import BatchEvent, GpuChanged, MatrixStarted, ModelEvent
from shardesd.options import BatchOptions, GpuOptions

pytestmark = pytest.mark.gpu

NEIGHBOUR = """
import sys, torch
held = torch.empty(4_000_000_000, dtype=torch.uint8, device="cuda:INDEX")
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.readline()
"""


def neighbour(index: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR.replace("INDEX", str(index))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_gpu_is_left_to_a_neighbour_and_taken_again(tmp_path: Path) -> None:
    import torch

    last = torch.cuda.device_count() - 1
    name = f"cuda:{last}"
    folders = [str(one_file(tmp_path / f"m{i}", random_weights(layers=4, size=2048, seed=i))) for i in range(2)]
    stop, begun = threading.Event(), threading.Event()
    matrices: list[tuple[float, str]] = []
    states: list[tuple[float, str]] = []
    came = went = 0.0

    def listen(event: BatchEvent) -> None:
        if isinstance(event, ModelEvent) and isinstance(event.event, MatrixStarted):
            matrices.append((time.monotonic(), event.event.device))
            if event.event.device == name:
                begun.set()
        elif isinstance(event, GpuChanged) and event.gpu == name:
            states.append((time.monotonic(), event.state))

    def scenario() -> None:
        nonlocal came, went
        if not begun.wait(60):
            stop.set()
            return
        time.sleep(2)
        with neighbour(last) as other:
            came = time.monotonic()
            time.sleep(5)
            other.communicate("\n", timeout=30)
        went = time.monotonic()
        time.sleep(6)
        stop.set()

    thread = threading.Thread(target=scenario)
    thread.start()
    # Only this one, or the others would have done all before it counts as free.
    options = BatchOptions(workers=2, gpu=GpuOptions(gpus=(last,), max_checks=3, check_every=0.5))
    number = 0
    while not stop.is_set():
        number += 1
        for _ in shardesd.scan_many(
            folders, out=tmp_path / f"out{number}", batch=options, on_event=listen, stop=stop, cache=False
        ):
            pass
    thread.join()
    assert begun.is_set(), f"never taken: {states}"
    left = next(at for at, state in states if state == "busy" and at > came - 1.5)
    again = next(at for at, state in states if state == "ours" and at > left)
    print(f"left {left - came:.2f} s after the neighbour came, taken again {again - went:.2f} s after it went")
    assert left - came < 2
    assert went < again < went + 5
    assert not [at for at, device in matrices if device == name and left + 0.1 < at < again]
    assert [at for at, device in matrices if device == name and at > again]
    assert {device for _, device in matrices} == {name}


def test_commands_get_gpus_that_are_free(tmp_path: Path) -> None:
    options = GpuOptions(max_checks=2, check_every=0.3)
    nvml = load_nvml()
    visible = visible_gpus(nvml)
    program = "import torch; x = torch.ones(10**8, device='cuda'); print(torch.cuda.device_count(), int(x.sum()))"
    lines = [f'{sys.executable} -c "{program}"; echo on $CUDA_VISIBLE_DEVICES'] * (len(visible) + 1)
    watch = Neighbours(nvml, visible, options, locks=tmp_path, auto_take=False).start()
    # What an earlier test left in this process counts as a neighbour's here.
    watch.set_options(GpuOptions(max_checks=2, check_every=0.3, mem_threshold=5000))
    try:
        counts = Commands(lines, tmp_path / "out", gpu=options, watch=watch).run()
    finally:
        watch.close()
    assert counts == Counts(len(lines), 0, 0)
    said = [path.read_text().split() for path in sorted((tmp_path / "out" / "logs").glob("*.log"))]
    assert all(words[:2] == ["1", "100000000"] for words in said)
    assert {words[3] for words in said} == {gpu.word for gpu in visible}
