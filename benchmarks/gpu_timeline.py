"""Where a scan on GPUs spends its time: what each worker thread does when, and how long each card is busy.

    python benchmarks/gpu_timeline.py MODEL [--device cuda:0,cuda:1] [--scans 3] [--stats]

The last of `--scans` scans in one process is shown, a line a thread: waiting for work, making Grams (reading, sending,
launching), solving; with how many matrices, from which to which second. Then, of one scan more, under torch's profiler,
which slows it down a little: for how many milliseconds a card ran at least one kernel, and its pauses of 4 ms and more.
A process whose first scan has a `missing` solver is not worth looking at.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardesd
from shardesd import metrics, spectra
from shardesd.engine import queue
from shardesd.spectra import solve

Mark = tuple[str, str, float, float, int]
"""Thread, what it did, from, to, matrices."""


def watch(marks: list[Mark], owner: Any, name: str, word: str, count: Callable[[tuple[Any, ...]], int]) -> None:
    """Has every call of a function noted."""
    called = getattr(owner, name)

    def noted(*given: Any, **more: Any) -> Any:
        started = time.perf_counter()
        try:
            return called(*given, **more)
        finally:
            marks.append((threading.current_thread().name, word, started, time.perf_counter(), count(given)))

    setattr(owner, name, noted)


def show(marks: list[Mark], began: float) -> None:
    """A line of sums and one of spans for each thread."""
    threads = sorted({mark[0] for mark in marks if mark[1] != "fits"})
    for thread in threads:
        mine = [mark for mark in marks if mark[0] == thread]
        sums: dict[str, float] = defaultdict(float)
        for _, word, start, stop, _ in mine:
            sums[word] += stop - start
        print(f"{thread}: " + ", ".join(f"{word} {seconds:.3f} s" for word, seconds in sums.items()))
        spans = [mark for mark in mine if mark[1] != "fits"]
        print("   ", " ".join(f"{word}{n or ''} {a - began:.3f}–{b - began:.3f}" for _, word, a, b, n in spans))


def busy(scan: Callable[[], Any]) -> None:
    """For each card, how long at least one of its kernels ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        scan()
    kernels: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if str(event.device_type()).endswith("CUDA") and not event.name().startswith("Mem"):
            kernels[event.device_index()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    first = min((start for spans in kernels.values() for start, _ in spans), default=0)
    for card, spans in sorted(kernels.items()):
        ran, end, pauses = 0, first, []
        for start, stop in sorted(spans):
            if start - end >= 4_000_000:
                pauses.append(f"{(end - first) / 1e6:.0f}–{(start - first) / 1e6:.0f}")
            ran += max(0, stop - max(start, end))
            end = max(end, stop)
        print(
            f"cuda:{card}: busy {ran / 1e6:.0f} of {(end - first) / 1e6:.0f} ms; pauses (ms): {' '.join(pauses) or '–'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scans", type=int, default=3)
    parser.add_argument("--stats", action="store_true")
    given = parser.parse_args()
    marks: list[Mark] = []
    watch(marks, queue._Run, "_take", "waits", lambda given: 0)
    watch(marks, solve, "grams_cuda", "Grams", lambda given: len(given[0]))
    watch(marks, solve, "eigvalsh_many", "solves", lambda given: len(given[0]))
    watch(marks, metrics, "measure_many", "fits", lambda given: 0)

    def scan() -> shardesd.Result:
        return shardesd.scan(given.model, device=given.device, cache=False, stats=given.stats)

    for number in range(1, given.scans + 1):
        marks.clear()
        began = time.perf_counter()
        result = scan()
        seconds = time.perf_counter() - began
        missing = [spectra.missing_batched(index) for index in range(torch.cuda.device_count())]
        print(
            f"scan {number}: {seconds:.3f} s, {len(result.layers)} rows, missing: {[m for m in missing if m] or 'none'}"
        )
    show(marks, began)
    if torch.cuda.is_available():
        busy(scan)


if __name__ == "__main__":
    main()
