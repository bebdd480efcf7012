"""Peak memory against --max-memory, on models of 1, 2 and 4 times the layers, one with a 128256 × 4096 head.

    python benchmarks/memory_budget.py [--budgets 0.5,1,2] [--layers 2,4,8]

Memory is the process's peak above that of an idle one that has loaded what solves of that size need on this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cpu_scan import run

IDLE = """
import sys, shardesd.scanner, scipy.linalg, huggingface_hub, numpy
from shardesd.spectra import lapack
if not lapack.faster(int(sys.argv[1]), numpy.dtype(float)):
    import torch
    torch.linalg.eigvalsh(torch.eye(8))
"""
SCAN = """
import sys, tempfile, shardesd
with tempfile.TemporaryDirectory() as out:
    options = {"device": "cpu", "max_memory": int(sys.argv[2]), "max_aspect": 0, "cache": False}
    result = shardesd.scan(sys.argv[1], out=out, **options)
assert not len(result.failed), result.failed["reason"].to_list()
"""


def idle_peak(n: int) -> int:
    """Bytes of a process that has loaded what solves of size `n` need, and done nothing."""
    return min(peak for _, peak in filter(None, (run(IDLE, str(n)) for _ in range(3))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="0.5,1,2", help="GB")
    parser.add_argument("--layers", default="2,4,8")
    parser.add_argument("--no-head", action="store_true")
    given = parser.parse_args()
    budgets = [int(float(text) * 1e9) for text in given.budgets.split(",")]
    print(
        f"{'model':<32}{'idle MB':>10}{'budget MB':>11}{'MB above idle':>15}{'of budget':>11}{'seconds':>9}", flush=True
    )
    shapes = [(f"{layers} layers", 2048, ["--layers", layers, "--vocab", "0"]) for layers in given.layers.split(",")]
    if not given.no_head:
        head = ["--layers", "1", "--vocab", "128256", "--hidden", "4096", "--mlp", "4096"]
        shapes.append(("1 layer, 128256 × 4096 head", 4096, head))
    for name, n, options in shapes:
        idle = idle_peak(n)
        with tempfile.TemporaryDirectory() as root:
            make(Path(root) / "model", options)
            for budget in budgets:
                result = run(SCAN, str(Path(root) / "model"), str(budget))
                if result:
                    above = result[1] - idle
                    row = f"{name:<32}{idle / 1e6:>10.0f}{budget / 1e6:>11.0f}{above / 1e6:>15.0f}"
                    print(f"{row}{above / budget:>11.2f}{result[0]:>9.1f}", flush=True)


def make(folder: Path, options: list[str]) -> None:
    import subprocess
    import sys

    script = str(Path(__file__).with_name("checkpoints.py"))
    subprocess.run([sys.executable, script, "llama", str(folder), *options], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
