"""NVML as a test wants it: memory, processes and errors of each GPU, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class FakeGpu:
    uuid: str
    used: int = 0
    error: str | None = None
    processes: list[SimpleNamespace] = field(default_factory=list)


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 2) -> None:
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

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.error:
            raise self.NVMLError(gpu.error)
        return SimpleNamespace(used=gpu.used, total=80_000_000_000, free=80_000_000_000 - gpu.used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        if gpu.error:
            raise self.NVMLError(gpu.error)
        return gpu.processes
