"""What a thread and a process need before they compute."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import TYPE_CHECKING

from shardesd.spectra.staging import staging_of

if TYPE_CHECKING:
    import torch

_first = threading.Lock()
_loaded: list[str] = []
_streams: dict[str, list[tuple[threading.Thread, torch.cuda.Stream]]] = {}
"""Of each device, with the thread that uses or used it."""
_local = threading.local()
"""The threads that a solve of this thread may use, until torch is told."""


def prepare_worker(device: str, threads: int) -> None:
    """Called once in each thread that computes on `device`: one solve may use `threads` CPU threads there.

    Raises what CUDA raises where the device can't be used.
    """
    _local.threads = threads
    if device == "cpu":
        return
    torch = loaded_torch()
    # torch loads its linear algebra for CUDA at the first call, and not safely from several threads at once.
    with _first:
        torch.cuda.set_device(device)
        if not _loaded:
            torch.linalg.eigvalsh(torch.eye(2, dtype=torch.float64, device=device))
        is_first = device not in _loaded
        if is_first:
            _loaded.append(device)
        stream = _free_stream(device)
    torch.cuda.set_stream(stream)
    staging_of(torch.device(device))
    if is_first:
        # cuBLAS loads its kernels at the first products, for up to 0.1 s; through torch others have the interpreter's
        # lock meanwhile, and read what is to be multiplied.
        some = torch.zeros((2, 64, 64), dtype=torch.float64, device=device)
        torch.bmm(some.mT, torch.bmm(some, some))


def loaded_torch() -> ModuleType:
    """torch, which takes a second to import: a CPU's solves ask for it only where they need it (`lapack`).

    It keeps to the threads that `prepare_worker` has allowed the calling thread.
    """
    import torch

    threads = getattr(_local, "threads", None)
    if threads is not None:
        torch.set_num_threads(threads)
        _local.threads = None
    return torch


def _free_stream(device: str) -> torch.cuda.Stream:
    """One whose thread has ended, else a new one: torch keeps device memory for each stream that was ever used."""
    import torch

    known = _streams.setdefault(device, [])
    for at, (thread, stream) in enumerate(known):
        if not thread.is_alive():
            known[at] = threading.current_thread(), stream
            return stream
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    known.append((threading.current_thread(), stream))
    return stream
