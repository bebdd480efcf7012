"""What a batch costs beside its scans: 200 tiny models, each scanned by itself and all of them in one batch.

    python benchmarks/batch_overhead.py [--models 200]

Prints the overhead per model, and memory and open files at the 20th and the last model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import save_file

import shardesd
from shardesd.events import BatchEvent, ModelDone


def make(folder: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    names = [f"model.layers.{i}.{part}.weight" for i in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]
    save_file({n: rng.standard_normal((32, 32)).astype(np.float32) for n in names}, folder / "model.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    models = parser.parse_args().models
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as place:
        folders = [make(Path(place) / f"m{i}", i) for i in range(models)]
        shardesd.scan(folders[0], device="cpu", cache=False)
        alone = []
        for i in range(20):
            began = time.perf_counter()
            shardesd.scan(folders[i], out=Path(place) / "alone", device="cpu", cache=False)
            alone.append(time.perf_counter() - began)
        seen: list[tuple[float, int, int]] = []

        def listen(event: BatchEvent) -> None:
            if isinstance(event, ModelDone):
                seen.append((time.perf_counter(), process.memory_info().rss, process.num_fds()))

        began = time.perf_counter()
        for _ in shardesd.scan_many(
            map(str, folders), out=Path(place) / "batch", device="cpu", cache=False, on_event=listen
        ):
            pass
        seconds = time.perf_counter() - began
        steady = (seen[-1][0] - seen[0][0]) / (models - 1)
        own = statistics.median(alone)
        print(f"{models} models of 4 matrices, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
        print(f"one scan by itself      {own:8.3f} s")
        print(f"one model in the batch  {steady:8.3f} s  (all: {seconds:.1f} s, plan and end included)")
        print(f"overhead per model      {seconds / models - own:8.3f} s")
        for number in (20, models):
            _, rss, files = seen[number - 1]
            print(f"model {number:3}: {rss / 1e6:7.1f} MB resident, {files} open files")


if __name__ == "__main__":
    main()
