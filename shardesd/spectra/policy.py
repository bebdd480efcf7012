"""Which precision a device computes in, and what kind of trouble an exception means."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Literal

Precision = Literal["float32", "float64"]

FAST_RATIO = 4
"""Up to this many float32 operations in the time of a float64 one, float64 is fast: 2 on data-centre cards, 32 or 64 on
consumer cards."""
_RATIO_ATTRIBUTE = 87  # CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO

_MEMORY = (
    *("out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED"),
    *("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory"),
)
_LOST = (
    *("CUDA error", "CUDA driver error", "cudaError", "device-side assert", "illegal memory access", "CUDA_ERROR"),
    *("CUBLAS_STATUS_", "CUSOLVER_STATUS_EXECUTION_FAILED", "CUSOLVER_STATUS_INTERNAL_ERROR", "uncorrectable ECC"),
)


def choose_precision(wanted: str, device: str) -> Precision:
    """The precision for ``auto``: float64 on CPUs and where a GPU's float64 is fast, else float32."""
    if wanted == "float32":
        return "float32"
    if (
        wanted == "float64"
        or device == "cpu"
        or single_to_double_ratio(int(device.partition(":")[2] or 0)) <= FAST_RATIO
    ):
        return "float64"
    return "float32"


@cache
def single_to_double_ratio(index: int) -> int:
    """How many times faster float32 is than float64 on a CUDA device, as its driver says; 1 where it doesn't."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 1
    device, ratio = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return 1
    if driver.cuDeviceGetAttribute(ctypes.byref(ratio), _RATIO_ATTRIBUTE, device) or ratio.value < 1:
        return 1
    return ratio.value


def trouble(error: Exception) -> Literal["task", "memory", "device"]:
    """What an exception of a solve means: no memory, a device that is lost, or a fault of this matrix alone.

    CUDA reports nearly all errors as a RuntimeError, so the words of its message decide.
    """
    import torch

    text = str(error)
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or any(word in text for word in _MEMORY):
        return "memory"
    if isinstance(error, RuntimeError) and any(word in text for word in _LOST):
        return "device"
    return "task"
