"""Milliseconds of one symmetric eigensolve on a CPU, values only: torch's, scipy's (`spectra.lapack`) and numpy's.

    python benchmarks/cpu_eigvalsh.py [--threads 1] [--sizes 64 128 ...] [--dtype float64]

Medians; `taken` says which shardesd takes on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from shardesd import spectra
from shardesd.spectra import lapack

SIZES = [64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]


def milliseconds(work: Callable[[np.ndarray], object], gram: np.ndarray) -> float:
    n = len(gram)
    taken = []
    for _ in range(max(2, min(40, 300_000_000 // n**3))):
        started = time.perf_counter()
        work(gram)
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{'n':>6}{'torch':>12}{'scipy':>12}{'numpy':>12}  taken", flush=True)
    rng = np.random.default_rng(0)
    with spectra.blas_threads(given.threads, on_cpu=True):
        for n in given.sizes:
            W = rng.standard_normal((n, n + n // 2))
            gram = np.asfortranarray(W @ W.T, given.dtype)
            row = (
                milliseconds(lambda G: torch.linalg.eigvalsh(torch.from_numpy(G)), gram),
                milliseconds(lambda G: lapack.eigvalsh(G.copy(order="F")), gram),  # which it overwrites
                milliseconds(np.linalg.eigvalsh, gram),
            )
            print(f"{n:>6}" + "".join(f"{ms:>12.3f}" for ms in row), "", "scipy" if lapack.faster(n) else "torch")


if __name__ == "__main__":
    main()
