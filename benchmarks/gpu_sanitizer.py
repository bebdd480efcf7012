"""What `compute-sanitizer` (of the CUDA toolkit) says of the batched solver's kernels. Needs CUDA.

    python benchmarks/gpu_sanitizer.py [--sizes 2 40 110 300] [--batch 3]

Each tool watches a process of its own, which solves a batch of each size, float64 and float32, and compares λ with
LAPACK's. Printed are the tool's summary and, of equal reports, one and their number. What racecheck and synccheck say
of `chase` is explained in docs/performance.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter

TOOLS = ("memcheck", "racecheck", "synccheck")
WATCHED = """
import sys
import numpy as np, torch
from shardesd.spectra import two_stage
device = torch.device("cuda", 0)
if reason := two_stage.unavailable_reason(device): sys.exit(reason)
batch, *sizes = map(int, sys.argv[1:])
for n in sizes:
    for width in ("float64", "float32"):
        W = np.random.default_rng(n).standard_normal((batch, n, n + 3))
        grams = (W @ W.transpose(0, 2, 1)).astype(width)
        eigs, verdict = two_stage.eigvalsh_batched(torch.from_numpy(grams).to(device))
        expected = np.linalg.eigvalsh(grams.astype(np.float64))
        assert not verdict.any(), verdict
        assert (abs(eigs.cpu().numpy() - expected).max(1) <= 1e-13 * expected[:, -1]).all(), n
print("solved")
"""


def watch(tool: str, sizes: list[int], batch: int) -> None:
    words = [sys.executable, "-c", WATCHED, str(batch), *map(str, sizes)]
    done = subprocess.run(["compute-sanitizer", "--tool", tool, *words], capture_output=True, text=True, check=False)
    lines = [line.removeprefix("=========").strip() for line in done.stdout.splitlines()]
    if "solved" not in lines:
        sys.exit(f"{tool}: {(done.stderr or done.stdout).strip()[-2000:]}")
    print(f"{tool}: {next((line for line in reversed(lines) if 'SUMMARY' in line), 'no summary')}")
    reports = Counter(
        re.sub(r"0x[0-9a-f]+|\d+", "…", line) for line in lines if re.search(r"\b(error|warning|hazard)\b", line, re.I)
    )
    for report, count in reports.most_common():
        if "SUMMARY" not in report:
            print(f"    {count} × {report}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 40, 110, 300], metavar="n")
    parser.add_argument("--batch", type=int, default=3)
    given = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    for tool in TOOLS:
        watch(tool, given.sizes, given.batch)


if __name__ == "__main__":
    main()
