"""What `compute-sanitizer` (of the CUDA toolkit) says of the batched solver's kernels. Needs CUDA.

    python benchmarks/gpu_sanitizer.py [--sizes 2 40 110 300] [--batch 3]

Each tool watches a process of its own, which solves a batch of each size, float64 and float32, and compares λ with
LAPACK's. synccheck ends a process at its first report, so it watches two: one for `chase`, one for all other kernels.
Printed are the tool's summary, how far the process came, and of equal reports one and their number. What racecheck and
synccheck say of `chase` is explained in docs/tuning.md. Watched kernels take a hundred times as long and more:
where one gives a wait up, as it must, the matrix is counted as such.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter

RUNS = {
    "memcheck": ("--tool", "memcheck"),
    "racecheck": ("--tool", "racecheck"),  # of `chase` alone it fails: "failed to handle a hardware exception"
    "synccheck of all but chase": ("--tool", "synccheck", "--kernel-name-exclude", "kernel_substring=chase"),
    "synccheck of chase": ("--tool", "synccheck", "--kernel-name", "kernel_substring=chase"),
}
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
        eigs, verdict = eigs.cpu().numpy(), verdict.cpu().numpy()
        stuck = (verdict & two_stage.STUCK) > 0
        wrong = (verdict != 0) | (abs(eigs - expected).max(1) > 1e-13 * expected[:, -1])
        assert not wrong[~stuck].any(), (n, verdict)
        print(f"solved n = {n} in {width}" + (f", gave up waiting in {stuck.sum()} of {batch}" if stuck.any() else ""))
"""


def watch(title: str, sizes: list[int], batch: int) -> bool:
    """Prints what a tool says; whether that is nothing."""
    process = [sys.executable, "-u", "-c", WATCHED, str(batch), *map(str, sizes)]
    done = subprocess.run(["compute-sanitizer", *RUNS[title], *process], capture_output=True, text=True, check=False)
    lines = [line.removeprefix("=========").strip() for line in done.stdout.splitlines()]
    solved = [line for line in lines if line.startswith("solved")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line and "not printed" not in line), "no summary")
    print(f"{title}: {summary}; solved {len(solved)} of {2 * len(sizes)} batches")
    print(*(f"    {line}\n" for line in solved if "gave up" in line), sep="", end="")
    reports = Counter(
        re.sub(r"0x[0-9a-f]+|\d+", "…", line) for line in lines if re.search(r"\b(error|warning|hazard)\b", line, re.I)
    )
    for report, count in reports.most_common():
        if "SUMMARY" not in report:
            print(f"    {count} × {report}")
    complete = len(solved) == 2 * len(sizes)
    if not complete:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        print("    ended:", next((line for line in reversed(said) if "Error" in line), said[-1])[:300])
    return complete and bool(re.search(r"\b0 (errors|hazards)", summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 40, 110, 300], metavar="n")
    parser.add_argument("--batch", type=int, default=3)
    given = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    said = [title for title in RUNS if not watch(title, given.sizes, given.batch)]
    print("not clean:", ", ".join(said) or "nothing")


if __name__ == "__main__":
    main()
