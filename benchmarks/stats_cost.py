"""What ``--stats`` adds to the time of a scan: pairs of scans, with and without, one after the other.

    python benchmarks/stats_cost.py [--command] [--pairs 11] [--device cpu] [--shape minilm] [--shape llama] …

With `--command` each is `shardesd scan` as a user runs it, a process of its own; else they are scans in one process,
whose imports and first scan are not counted. The pair's order changes from pair to pair. Printed are medians: seconds
without, seconds with, and of the pairs' ratios; and the same ratio of CPU seconds, which other work on the machine
disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import checkpoints

import shardesd
from shardesd.demo import minilm
from shardesd.errors import NotFound


def scan(folder: Path, device: str, stats: bool) -> tuple[float, float]:
    """Seconds on the clock, and of all CPUs."""
    with tempfile.TemporaryDirectory() as out:
        started, used = time.perf_counter(), time.process_time()
        result = shardesd.scan(folder, out=out, device=device, stats=stats, cache=False)
        seconds = time.perf_counter() - started, time.process_time() - used
    assert not len(result.failed)
    return seconds


def command(folder: Path, device: str, stats: bool) -> tuple[float, float]:
    """As `scan`, of the whole command."""
    words = [sys.executable, "-m", "shardesd", "scan", str(folder), "--device", device, "--no-cache", "--quiet"]
    with tempfile.TemporaryDirectory() as out:
        started, used = time.perf_counter(), sum(os.times()[2:4])
        subprocess.run([*words, "--out", out, *(["--stats"] if stats else [])], check=True, capture_output=True)
        return time.perf_counter() - started, sum(os.times()[2:4]) - used


def shapes(root: Path) -> dict[str, tuple[str, Callable[[], Path]]]:
    """Name → what it is, and how it is made."""

    def llama() -> Path:
        checkpoints.llama(root / "llama", hidden=1024, mlp=2816, layers=4, vocab=32000, head=False)
        return root / "llama"

    def moe() -> Path:
        checkpoints.experts(root / "moe", count=48)
        return root / "moe"

    return {
        "minilm": ("MiniLM, float32", minilm),
        "llama": ("Llama shape: 4 layers of 1024, MLP 2816, 32000 tokens, bf16", llama),
        "moe": ("48 experts of 768 × 2048 in a stack, bf16", moe),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", action="append", choices=["minilm", "llama", "moe"])
    parser.add_argument("--command", action="store_true")
    given = parser.parse_args()
    print(f"{'checkpoint':<64}{'without':>9}{'with':>9}{'ratio':>8}{'CPU':>8}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for name, (text, make) in shapes(Path(root)).items():
            if given.shape and name not in given.shape:
                continue
            try:
                folder = make()
            except NotFound as missing:
                print(f"{text:<64}left out: {missing}", flush=True)
                continue
            run = command if given.command else scan
            run(folder, given.device, True)
            pairs = []
            for i in range(given.pairs):
                first = run(folder, given.device, i % 2 == 1)
                second = run(folder, given.device, i % 2 == 0)
                pairs.append((first, second) if i % 2 == 0 else (second, first))
            off, on = (statistics.median(pair[k][0] for pair in pairs) for k in (0, 1))
            ratio, cpu = (statistics.median(pair[1][k] / pair[0][k] for pair in pairs) for k in (0, 1))
            print(f"{text:<64}{off:>9.3f}{on:>9.3f}{ratio:>8.3f}{cpu:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
