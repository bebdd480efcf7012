"""Milliseconds for the spectrum of one matrix (n × 1.5 n, on the GPU already), and how exact it is. Needs CUDA.

    python benchmarks/gpu_matrix.py [--sizes 512 1024 ...] [--batch 16] [--lapack 4096]

- svdvals: `torch.linalg.svdvals` in float32, what most pipelines call;
- eigvalsh: float64 Gram and `torch.linalg.eigvalsh`, one matrix at a time;
- cuSOLVER: float64 Gram and cuSOLVER's own batched routine, where it is there and worth its while;
- shardesd: float64 Gram and the solver that shardesd takes for such a batch.

Medians of `--repeat` runs. The error is the largest of all |λ - λ of a float64 SVD| / λmax, in the first and the last
matrix of a batch: LAPACK's up to n = `--lapack`, cuSOLVER's beyond, which is itself no better than 3e-12.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import torch

from shardesd.spectra import cusolver, eigen, two_stage

SIZES = [512, 768, 1024, 2048, 4096, 8192]


def grams_of(A_BMN: torch.Tensor) -> torch.Tensor:
    return torch.bmm(A_BMN, A_BMN.mT)


def milliseconds(work: Callable[[], object], matrices: int, repeat: int) -> float:
    """The median per matrix, after one run that is not counted."""
    seconds = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]) * 1e3 / matrices


def exact(A_MN: torch.Tensor, lapack: int) -> np.ndarray:
    if A_MN.shape[0] <= lapack:
        sigma = np.linalg.svd(A_MN.cpu().numpy(), compute_uv=False)
    else:
        sigma = torch.linalg.svdvals(A_MN).cpu().numpy()
    return np.asarray(np.sort(sigma**2))


def row(n: int, batch: int, repeat: int, lapack: int) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    A_BMN = torch.randn(batch, n, n + n // 2, device="cuda", dtype=torch.float64, generator=generator)
    A_BMN *= torch.rand(batch, n, 1, device="cuda", dtype=torch.float64, generator=generator).add_(1e-3).pow_(-0.3)
    A_BMN = A_BMN.float().double()  # as stored weights are
    one, ends = A_BMN[0], [0, batch - 1] if batch > 1 else [0]
    expected = np.stack([exact(A_BMN[at], lapack) for at in ends])
    single = one.float()
    cells = [f"{n:>6} × {batch:<4}"]

    def cell(work: Callable[[], np.ndarray], matrices: int, times: int) -> None:
        found = np.sort(np.asarray(work(), dtype=np.float64).reshape(-1, n))
        wanted = expected[: len(found)]
        error = (np.abs(found - wanted).max(1) / wanted[:, -1]).max()
        cells.append(f"{milliseconds(work, matrices, times):>10.3f} {error:>8.1e}")

    cell(lambda: (torch.linalg.svdvals(single).double() ** 2).cpu().numpy(), 1, 1 if n > 2048 else repeat)
    cell(lambda: torch.linalg.eigvalsh(one @ one.mT).cpu().numpy(), 1, repeat)
    if batch > 1 and n <= cusolver.LARGEST_N and cusolver.available():
        cell(lambda: cusolver.eigvalsh_batched(grams_of(A_BMN))[0][ends].cpu().numpy(), batch, repeat)
    else:
        cells.append(f"{'–':>10} {'':>8}")
    cell(lambda: eigen.eigvalsh_many(grams_of(A_BMN)).eigs[ends], batch, repeat)
    print(" ".join(cells), flush=True)


def versions() -> Iterator[str]:
    """Of what the figures depend on."""
    yield f"torch {torch.__version__}"
    yield f"CUDA {torch.version.cuda}"
    with suppress(importlib.metadata.PackageNotFoundError):
        yield f"cuda-core {importlib.metadata.version('cuda-core')}"
    with suppress(ImportError):
        import pynvml

        pynvml.nvmlInit()
        yield f"driver {pynvml.nvmlSystemGetDriverVersion()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="n")
    parser.add_argument("--batch", type=int, help="matrices at once; default: as many as shardesd takes of this size")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--lapack", type=int, default=2048, metavar="n", help="largest n that is held to LAPACK (4096: a minute each)"
    )
    given = parser.parse_args()
    reason = two_stage.unavailable_reason(torch.device("cuda", 0))
    print(torch.cuda.get_device_name(), *versions(), f"two-stage solver: {reason or 'yes'}", sep=", ", flush=True)
    head = [f"{name:>10} {'error':>8}" for name in ("svdvals", "eigvalsh", "cuSOLVER", "shardesd")]
    print(f"{'n × batch':<13} {' '.join(head)}", flush=True)
    for n in given.sizes:
        row(n, given.batch or eigen.batch_size(n), given.repeat, given.lapack)


if __name__ == "__main__":
    main()
