"""A CPU in a GPU's place: the code that feeds a GPU runs as it does there, but for pinned memory and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from shardesd import scanner, spectra
from shardesd.engine import Device
from shardesd.records import Matrix, Spectrum
from shardesd.spectra import eigen, upload


class Staging(upload.Staging):
    """Buffers of plain memory, whose bytes are copied as they are sent."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(upload.UPLOAD_BYTES, dtype=torch.uint8) for _ in range(upload._BUFFERS)]
        self._sent = [None] * upload._BUFFERS
        self.sent = 0

    def send(self, stored: torch.Tensor, number: int | None, device: torch.device) -> torch.Tensor:
        self.sent += stored.numel()
        copy = stored.clone()
        if number is not None:
            self._buffers[number].fill_(255)  # whoever still looks at it finds NaN
        return copy


def staged(monkeypatch: pytest.MonkeyPatch, upload_bytes: int = 1 << 20) -> Staging:
    """Has `spectra.compute_many` take the CPU for a GPU that is sent `upload_bytes` at a time."""
    monkeypatch.setattr(upload, "UPLOAD_BYTES", upload_bytes)
    monkeypatch.setattr(upload, "PACKED_BYTES", upload_bytes // 4)
    staging = Staging()
    monkeypatch.setattr(upload, "_staging", lambda: staging)
    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: False)
    monkeypatch.setattr(eigen, "_cusolver_takes", lambda n, batch: False)
    return staging


def pretend(monkeypatch: pytest.MonkeyPatch, upload_bytes: int = 1 << 20) -> Staging:
    """Has scans find one GPU, cuda:0."""
    staging = staged(monkeypatch, upload_bytes)
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
    return staging
