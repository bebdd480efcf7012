"""What a thread and a process need before they compute."""

from __future__ import annotations

import threading
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING

from shardesd.spectra import cublas, two_stage
from shardesd.spectra.staging import staging_of

if TYPE_CHECKING:
    import torch

_PATIENCE = 60.0  # seconds
_locks: dict[str, threading.Lock] = {}
"""Of each device: one that doesn't answer keeps nobody from the others."""
_loading, _late, _loaded = threading.Lock(), threading.Lock(), threading.Event()
_prepared: dict[str, count[int]] = {}
"""Numbers the threads of each device that are ready."""
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
    there = torch.device(device)
    with _locks.setdefault(device, threading.Lock()):
        torch.cuda.set_device(there)
        _load_linalg(there)
        stream = _free_stream(device)
    torch.cuda.set_stream(stream)
    staging_of(there)
    # What a process loads once for a device takes long: while the others read, each of the first two does a part. (Who
    # had no memory so far comes again, and counts then.)
    number = next(_prepared.setdefault(device, count()))
    if number == 0:
        cublas.load(there)
    elif number == 1:
        two_stage.load_kept(there)


def _load_linalg(there: torch.device) -> None:
    """torch loads its linear algebra for CUDA at the first call, and not safely from several threads at once."""
    import torch

    if _loaded.is_set():
        return
    # Who still has the first lock after that time works for a device that doesn't answer.
    held = next((lock for lock in (_loading, _late) if lock.acquire(timeout=_PATIENCE)), None)
    try:
        if not _loaded.is_set():
            torch.linalg.eigvalsh(torch.eye(2, dtype=torch.float64, device=there))
            _loaded.set()
    finally:
        if held is not None:
            held.release()


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
        if not thread.is_alive() or thread is threading.current_thread():
            known[at] = threading.current_thread(), stream
            return stream
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    known.append((threading.current_thread(), stream))
    return stream
