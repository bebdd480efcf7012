"""What a matrix costs beside its bytes and its flops: planning, queue, fit, journal, tables.

    python benchmarks/overhead.py [--count 2000] [--repeat 5]

A checkpoint of experts of 64 × 48, whose spectra take 0.05 ms each, scanned on the CPU in one process; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import shardesd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        folder.mkdir()
        names = (f"model.layers.{i // 128}.mlp.experts.{i % 128}.down_proj.weight" for i in range(given.count))
        tensors = {name: rng.standard_normal((64, 48)).astype(np.float32) for name in names}
        save_file(tensors, folder / "model.safetensors")
        config = {"model_type": "mixtral", "num_local_experts": 128, "hidden_size": 48, "num_attention_heads": 4}
        (folder / "config.json").write_text(json.dumps(config))
        seconds = []
        for run in range(given.repeat + 1):
            started, used = time.perf_counter(), time.process_time()
            shardesd.scan(folder, out=Path(root) / f"out{run}", device="cpu", cache=False)
            seconds.append((time.perf_counter() - started, time.process_time() - used))
    wall, cpu = (1e3 * statistics.median(column) / given.count for column in zip(*seconds[1:], strict=True))
    print(f"{given.count} matrices: {wall:.3f} ms each, {cpu:.3f} ms of CPU time")


if __name__ == "__main__":
    main()
