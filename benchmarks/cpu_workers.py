"""The checkpoint of cpu_scan.py on the CPU, by how many matrices are solved at once and how many BLAS threads each has.

    python benchmarks/cpu_workers.py [--layers 6] [--repeat 1]

Each pair runs in a process of its own. Seconds are wall-clock, imports included; memory is the process's peak less that
of an idle `python -c "import torch"`. The star marks what shardesd chooses on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from cpu_scan import IDLE, generate, run

from shardesd.engine.devices import cpu_count, cpu_device

SCAN = """
import sys, shardesd, shardesd.scanner
from shardesd.engine import devices
workers, threads = int(sys.argv[2]), int(sys.argv[3])
devices.cpu_device = lambda: devices.Device("cpu", slots=workers, threads=threads)
result = shardesd.scan(sys.argv[1], device="cpu", cache=False)
assert not len(result.failed)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=1)
    given = parser.parse_args()
    cores, chosen = cpu_count(), cpu_device()
    steps = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= cores]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        print(f"{generate(folder, given.layers):.2f} GB, {cores} cores")
        idle = min(peak for _, peak in filter(None, (run(IDLE) for _ in range(3))))
        print(f"{'workers × threads':<20}{'seconds':>9}{'MB above idle':>16}", flush=True)
        for workers in steps:
            for threads in [step for step in steps if workers * step <= 2 * cores]:
                results = [
                    result
                    for _ in range(given.repeat)
                    if (result := run(SCAN, str(folder), str(workers), str(threads)))
                ]
                if results:
                    star = " *" if (workers, threads) == (chosen.slots, chosen.threads) else ""
                    seconds = statistics.median(time for time, _ in results)
                    peak = statistics.median(peak for _, peak in results)
                    print(
                        f"{f'{workers} × {threads}{star}':<20}{seconds:>9.1f}{(peak - idle) / 1e6:>16.0f}", flush=True
                    )


if __name__ == "__main__":
    main()
