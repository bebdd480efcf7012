"""Which devices there are, and how much of this machine may be used: what a container grants, not what the host has."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from shardesd.engine import cgroup
from shardesd.errors import OptionError

GPU_SLOTS = 4
"""Threads that read, copy and compute for one GPU, each on a stream of its own: while some solve, others read. Of
large matrices three groups are under way (`Task.large`, docs/tuning.md)."""


@dataclass(frozen=True, slots=True)
class Device:
    """A place where tasks run. `slots` tasks run on it at once, each with `threads` BLAS threads."""

    name: str
    slots: int = 1
    threads: int = 1
    budget: float = float("inf")
    """Bytes of its memory that tasks may take together (a GPU)."""


def discover(choice: str, gpu_memory_fraction: float) -> tuple[Device, ...]:
    """The devices that `--device` names: ``auto`` is all CUDA devices, and the CPU where there is none.

    Of a GPU's memory that is free now, `gpu_memory_fraction` may be taken. Raises `OptionError` where CUDA is asked
    for and missing.
    """
    if choice == "cpu":
        return (cpu_device(),)
    if choice == "auto" and not _may_have_gpus():
        return (cpu_device(),)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "auto" and not count:
        return (cpu_device(),)
    if not count:
        raise OptionError(f"--device '{choice}': this machine has no usable CUDA device (try --device cpu)")
    if choice in ("auto", "cuda"):
        return tuple(_gpu(f"cuda:{i}", gpu_memory_fraction) for i in range(count))
    names = list(dict.fromkeys(choice.split(",")))
    for name in names:
        if int(name.removeprefix("cuda:")) >= count:
            raise OptionError(f"--device '{name}': this machine has cuda:0 … cuda:{count - 1}")
    return tuple(_gpu(name, gpu_memory_fraction) for name in names)


def _may_have_gpus() -> bool:
    """Whether torch, which takes a second to import, is worth asking: not on Linux without CUDA's driver or ROCm's."""
    return not sys.platform.startswith("linux") or Path("/dev/kfd").exists() or _cuda_driver() is not None


def has_context(index: int) -> bool:
    """Whether this process, whose torch has started CUDA, has a driver's context on that device: half a gigabyte."""
    driver = _cuda_driver()
    if driver is None:
        return True
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return True
    return bool(driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) or active.value)


def cuda_uuids(count: int) -> list[str] | None:
    """The first so many devices' UUIDs as 32 hexadecimal digits, as CUDA counts them in this process; None where its
    driver doesn't tell. No context is made for it."""
    driver = _cuda_driver()
    if driver is None or not hasattr(driver, "cuDeviceGetUuid_v2") or driver.cuInit(0):
        return None
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    found = []
    for index in range(count):
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(uuid, device):
            return None
        found.append(bytes(uuid).hex())
    return found


def _cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def cpu_device() -> Device:
    """The CPU: several solves of few threads each use the cores better than one with all (docs/performance.md)."""
    cores = cpu_count()
    threads = 1 if cores <= 8 else 2 if cores <= 32 else 4
    return Device("cpu", slots=max(1, cores // threads), threads=threads)


def cpu_count() -> int:
    """Cores that this process may use: affinity, OMP_NUM_THREADS and the control groups' quota, whichever is least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        cores = min(cores, int(wanted))
    return max(1, int(min(cores, cgroup.cpu_quota())))


def available_memory() -> int:
    """Bytes that can still be had without swapping, within the control groups' limits."""
    import psutil

    return int(min(psutil.virtual_memory().available, cgroup.memory_left()))


def peak_memory() -> int:
    """The most resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _gpu(name: str, fraction: float) -> Device:
    """One that CUDA refuses has no memory: unless that has passed by the time it is prepared, it is retired then, and
    said why. (With no memory to count on, matrices go to it one by one.)"""
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(name)
        free += torch.cuda.memory_reserved(name) - torch.cuda.memory_allocated(name)  # torch keeps it for us
    except RuntimeError:
        free = 0
    return Device(name, slots=GPU_SLOTS, budget=free * fraction)
