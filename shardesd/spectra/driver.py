"""Calls of CUDA's driver that hand a GPU its work, made without giving the interpreter's lock away (`linked`).

Streams and events are torch's, of the current device. Where there is no such driver (another maker's GPU), torch does
what a call would.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_FOR_ALL_CONTEXTS = 1  # CU_MEMHOSTREGISTER_PORTABLE
_POINTER, _ADDRESS = ctypes.c_void_p, ctypes.c_uint64


def send(pinned: torch.Tensor, there: torch.Tensor, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Copies the first bytes of `pinned` to those of `there`, on the device, in the order of `stream`."""
    import torch

    if not nbytes:
        return
    driver = library()
    if driver is None:
        with torch.cuda.stream(stream):
            there[:nbytes].copy_(pinned[:nbytes], non_blocking=True)
    else:
        status = driver.cuMemcpyHtoDAsync_v2(there.data_ptr(), pinned.data_ptr(), nbytes, stream.cuda_stream)
        check(status, "a copy to the device", "CUDA error: ")


def wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """What `stream` is given from now on waits for what `event` has recorded."""
    driver = library()
    if driver is None:
        stream.wait_event(event)
    else:
        check(driver.cuStreamWaitEvent(stream.cuda_stream, event.cuda_event, 0), "a wait for an event", "CUDA error: ")


def until_done(device: torch.device) -> None:
    """Waits for what the current stream of `device` was given: before a copy to the host is asked for.

    Copies to the host that wait for work stand in a queue of the device's, whatever their streams: one that could be
    made waits for those before it, of batches that take the device longer.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def pin(memory: torch.Tensor) -> None:
    """Has GPUs read memory of this process by themselves, until it ends: it must not be freed before.

    The current device's context does it. Where it is refused, or there is no such driver, copies are as right.
    """
    if library() is not None:
        _patient().cuMemHostRegister_v2(_ADDRESS(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _FOR_ALL_CONTEXTS)


def check(status: int, what: str, begin: str = "") -> None:
    """Raises RuntimeError where a call didn't succeed, with the driver's own word for why; `policy` tells by the words
    what that means."""
    if status:
        raise RuntimeError(f"{begin}{_name(status)}: {what} failed")


@cache
def _patient() -> Any:
    """The driver, for calls that take milliseconds: others have the interpreter's lock meanwhile."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def library() -> Any:
    """The driver; None where there is none, or torch is made for another maker's."""
    import torch

    if torch.version.hip:
        return None
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    if hasattr(driver, "cuLaunchKernelEx"):  # not before CUDA 11.8
        driver.cuLaunchKernelEx.argtypes = (_POINTER,) * 4
    driver.cuMemcpyHtoDAsync_v2.argtypes = (_ADDRESS, _POINTER, ctypes.c_size_t, _POINTER)
    driver.cuStreamWaitEvent.argtypes = (_POINTER, _POINTER, ctypes.c_uint)
    driver.cuGetErrorName.argtypes = (ctypes.c_int, _POINTER)
    return driver


def _name(status: int) -> str:
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA driver error {status}"
