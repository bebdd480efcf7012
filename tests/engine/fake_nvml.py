"""NVML as a test wants it: memory, processes and errors of each GPU, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

RESERVED = 600_000_000
"""What the first version of the memory call counts as used on an idle GPU."""


@dataclass
class FakeGpu:
    uuid: str
    used: int = 0
    error: str | None = None
    processes: list[SimpleNamespace] = field(default_factory=list)


class FakeNvml:
    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 0x2000028  # noqa: N815

    def __init__(self, count: int = 2, *, old: bool = False) -> None:
        self.old = old  # a driver that knows the first version of calls alone
        self.gpus = [FakeGpu(f"GPU-{i}{i}aa-{i}") for i in range(count)]
        self.mig = {"MIG-0123": FakeGpu("MIG-0123")}

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        if uuid not in self.mig:
            raise self.NVMLError("not found")
        return self.mig[uuid]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        if gpu.error or (version and self.old):
            raise self.NVMLError(gpu.error or "Function Not Found")
        used = gpu.used if version == self.nvmlMemory_v2 else gpu.used + RESERVED
        return SimpleNamespace(used=used, total=80_000_000_000, free=80_000_000_000 - used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        if gpu.error:
            raise self.NVMLError(gpu.error)
        return gpu.processes
