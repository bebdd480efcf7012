"""What a thread and a process need before they compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_first = threading.Lock()
_loaded: list[str] = []


def prepare_worker(device: str, threads: int) -> None:
    """Called once in each thread that computes on `device`: one solve may use `threads` CPU threads there.

    Raises what CUDA raises where the device can't be used.
    """
    import torch

    torch.set_num_threads(threads)
    if device != "cpu":
        # torch loads its linear algebra for CUDA at the first call, and not safely from several threads at once.
        with _first:
            torch.cuda.set_device(device)
            if not _loaded:
                torch.linalg.eigvalsh(torch.eye(2, dtype=torch.float64, device=device))
                _loaded.append(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def blas_threads(threads: int) -> Iterator[None]:
    """While it is entered, BLAS uses `threads` threads a call (a process-wide setting)."""
    from scipy.linalg import cython_blas  # noqa: F401 (only what is loaded already can be limited)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads, user_api="blas"):
        yield
