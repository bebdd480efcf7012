"""Milliseconds of one symmetric eigensolve on a CPU, values only: torch's, and scipy's LAPACK in one stage and in two.

    python benchmarks/cpu_eigvalsh.py [--threads 1] [--workers 1] [--sizes 64 128 ...] [--dtype float64]

Medians, where `--workers` solve at once, each its own matrix by `--threads` threads of BLAS, as a scan does;
`taken` says which shardesd takes on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from shardesd import spectra
from shardesd.spectra import banded, lapack
from shardesd.spectra.blas import empty_gram

SIZES = [64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]


def milliseconds(work: Callable[[np.ndarray], object], gram: np.ndarray, workers: int, threads: int) -> float:
    n = len(gram)

    def repeat(times: int) -> list[float]:
        taken = []
        for _ in range(times):
            own = empty_gram(n, gram.dtype)
            own[:] = gram  # which work may overwrite
            started = time.perf_counter()
            work(own)
            taken.append(time.perf_counter() - started)
        return taken

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        taken = pool.map(repeat, [max(2, min(40, 300_000_000 // n**3))] * workers)
        return 1e3 * statistics.median(seconds for part in taken for seconds in part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    given = parser.parse_args()
    print(f"{'n':>6}{'torch':>12}{'one stage':>12}{'two':>12}  taken", flush=True)
    rng = np.random.default_rng(0)
    ways = [lambda G: torch.linalg.eigvalsh(torch.from_numpy(G)), lapack.one_stage]
    if given.dtype == "float64" and banded.available():
        ways.append(banded.eigvalsh)
    with spectra.blas_threads(given.threads, on_cpu=True):
        for n in given.sizes:
            W = rng.standard_normal((n, n + n // 2))
            gram = np.asfortranarray(W @ W.T, given.dtype)
            row = [milliseconds(way, gram, given.workers, given.threads) for way in ways]
            taken = "torch"
            if lapack.faster(n, gram.dtype):
                taken = "two" if lapack.in_two_stages(n, gram.dtype) else "one stage"
            print(f"{n:>6}{''.join(f'{ms:>12.3f}' for ms in row):<36}  {taken}", flush=True)


if __name__ == "__main__":
    main()
