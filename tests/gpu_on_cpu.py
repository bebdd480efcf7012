"""A CPU in a GPU's place: the code that feeds a GPU runs as it does there, but for pinned memory and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Queue
from typing import Any

import pytest
import torch
from cublas_on_cpu import Library

from shardesd import scanner, spectra
from shardesd.engine import Device
from shardesd.records import Matrix, Spectrum
from shardesd.spectra import cublas, eigen, staging, upload


class Buffer(staging.Buffer):
    """Of plain memory, whose bytes are copied as they are sent."""

    def __init__(self) -> None:
        self.here = torch.empty(staging.UPLOAD_BYTES, dtype=torch.uint8)
        self.memory = self.here.numpy()
        self.there = staging.Bytes(torch.empty_like(self.here))

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


class Staging(staging.Staging):
    """Such buffers. Whoever looks too late at what one held finds NaN."""

    def __init__(self) -> None:
        self._free, self._lock, self.turn = Queue(), threading.Lock(), threading.Lock()
        self._left = staging.BUFFERS
        self.sent = 0

    def _new(self) -> staging.Buffer:
        return Buffer()

    def send(self, where: staging.Buffer | torch.Tensor, nbytes: int) -> staging.Bytes:
        self.sent += nbytes
        if isinstance(where, torch.Tensor):
            return staging.Bytes(where.clone())
        where.there.flat[:nbytes] = where.here[:nbytes]
        where.here.fill_(255)
        return where.there

    def worked(self, buffer: staging.Buffer) -> None:
        buffer.there.flat.fill_(255)


def staged(monkeypatch: pytest.MonkeyPatch, upload_bytes: int = 1 << 20) -> Staging:
    """Has `spectra.compute_many` take the CPU for a GPU that is sent `upload_bytes` at a time."""
    for module in (upload, staging):
        monkeypatch.setattr(module, "UPLOAD_BYTES", upload_bytes)
    monkeypatch.setattr(upload, "PACKED_BYTES", upload_bytes // 4)
    buffers = Staging()
    library = Library()
    monkeypatch.setattr(cublas, "takes", lambda gram: True)
    monkeypatch.setattr(cublas, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(upload, "staging_of", lambda device: buffers)
    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: False)
    monkeypatch.setattr(eigen, "_cusolver_takes", lambda n, batch: False)
    return buffers


def pretend(monkeypatch: pytest.MonkeyPatch, upload_bytes: int = 1 << 20) -> Staging:
    """Has scans find one GPU, cuda:0."""
    buffers = staged(monkeypatch, upload_bytes)
    compute_many = spectra.compute_many

    def many(
        opened: Sequence[Callable[[], AbstractContextManager[Sequence[Matrix]]]], *, device: str, **how: Any
    ) -> list[Spectrum | Exception]:
        assert device == "cuda:0"
        return compute_many(opened, device="cpu", **how)

    def one(parts: Sequence[Matrix], *, scale: float = 1.0, device: str, **how: Any) -> Spectrum:
        if device == "cpu" or len(parts) > 1:
            return compute(parts, scale=scale, device="cpu", **how)
        (found,) = many([lambda: nullcontext(parts)], n=min(parts[0].shape), device=device, **how)
        if isinstance(found, Exception):
            raise found
        return found

    def counted(matrix: spectra.Tallied, device: str) -> None:
        assert device == "cuda:0"
        count_cuda(matrix, "cpu")

    count_cuda = spectra.count_cuda
    monkeypatch.setattr(spectra, "count_cuda", counted)
    compute = spectra.compute
    monkeypatch.setattr(spectra, "compute_many", many)
    monkeypatch.setattr(spectra, "compute", one)
    monkeypatch.setattr(spectra, "prepare_worker", lambda device, threads: None)
    monkeypatch.setattr(scanner, "discover", lambda choice, fraction: (Device("cuda:0", slots=1),))
    return buffers
