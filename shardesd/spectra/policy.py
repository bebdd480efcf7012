"""Which precision a device computes in, what kind of trouble an exception means, and its words in one line."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Literal

Precision = Literal["float32", "float64"]

FAST_RATIO = 4
"""Up to this many float32 operations in the time of a float64 one, float64 is fast: 2 on data-centre cards, 32 or 64 on
consumer cards."""
_RATIO_ATTRIBUTE = 87  # CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO

_MEMORY = (
    *("out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED", "NVRTC_ERROR_OUT_OF_MEMORY"),
    # What creating a handle says where there is no memory for it.
    *("CUBLAS_STATUS_NOT_INITIALIZED", "CUSOLVER_STATUS_NOT_INITIALIZED", "cusolverDnCreate"),
    *("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory"),
    *("std::bad_alloc", "Cannot allocate memory", "can't start new thread"),
)
# One call was refused, and the context is as good as before.
_REFUSED = ("CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE", "invalid configuration argument")
_LOST = (
    *("CUDA error", "CUDA driver error", "cudaError", "device-side assert", "illegal memory access"),
    *("CUBLAS_STATUS_", "CUSOLVER_STATUS_EXECUTION_FAILED", "CUSOLVER_STATUS_INTERNAL_ERROR", "uncorrectable ECC"),
)
# The driver's own names, as cuda-core has them: after these a context is of no more use. Others only refuse a call.
_LOST_CODES = tuple(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "ASSERT"),
        *("INVALID_ADDRESS_SPACE", "INVALID_PC", "HARDWARE_STACK_ERROR", "TENSOR_MEMORY_LEAK", "CONTAINED", "UNKNOWN"),
        *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "EXTERNAL_DEVICE", "DEVICE_UNAVAILABLE", "NO_DEVICE"),
        *("CONTEXT_IS_DESTROYED", "INVALID_CONTEXT", "DEINITIALIZED", "SYSTEM_NOT_READY"),
        *("MPS_CLIENT_TERMINATED", "MPS_CONNECTION_FAILED", "MPS_RPC_FAILURE", "MPS_SERVER_NOT_READY"),
    )
)
_SAYS_WHAT = re.compile(r"\berror\b[^:]*:")
_LINE = 200


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

    torch reports nearly all errors of CUDA as a RuntimeError, cuda-core as an Exception of its own: the words of the
    message decide. (torch isn't asked: on a CPU it may not be loaded, and where memory is short it can't be.)
    """
    text = str(error)  # of torch's own OutOfMemoryError, too
    if isinstance(error, MemoryError) or any(word in text for word in _MEMORY):
        return "memory"
    if any(word in text for word in _REFUSED):
        return "task"
    if isinstance(error, RuntimeError) and any(word in text for word in _LOST):
        return "device"
    if any(code in text for code in _LOST_CODES):
        return "device"
    return "task"


def in_one_line(error: Exception) -> str:
    """Of what an exception says, which may be a compiler's whole log, the line that says what is wrong."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    said = next(filter(_SAYS_WHAT.search, lines), lines[0] if lines else type(error).__name__)
    return said if len(said) <= _LINE else f"{said[: _LINE - 1]}…"
