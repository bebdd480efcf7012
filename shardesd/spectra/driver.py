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


def send(here: torch.Tensor, there: torch.Tensor, nbytes: int, stream: torch.cuda.Stream, *, pinned: bool) -> None:
    """Copies the first bytes of `here` to those of `there`, on the device, in the order of `stream`.

    Of memory that isn't `pinned` it may only return when what the stream was given before is done.
    """
    import torch

    if not nbytes:
        return
    driver = library()
    if driver is None:
        with torch.cuda.stream(stream):
            there[:nbytes].copy_(here[:nbytes], non_blocking=True)
    else:
        copy = (driver if pinned else _patient()).cuMemcpyHtoDAsync_v2
        status = copy(there.data_ptr(), here.data_ptr(), nbytes, stream.cuda_stream)
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


def pin(memory: torch.Tensor) -> bool:
    """Has GPUs read memory of this process by themselves, until it ends: it must not be freed before.

    The current device's context does it. Where it is refused (False), or there is no such driver, copies are as right.
    """
    if library() is None:
        return True
    size = ctypes.c_size_t(memory.nbytes)
    return not _patient().cuMemHostRegister_v2(_ADDRESS(memory.data_ptr()), size, _FOR_ALL_CONTEXTS)


def check(status: int, what: str, begin: str = "") -> None:
    """Raises RuntimeError where a call didn't succeed, with the driver's own word for why; `policy` tells by the words
    what that means."""
    if status:
        raise RuntimeError(f"{begin}{_name(status)}: {what} failed")


@cache
def _patient() -> Any:
    """The driver, for calls that take milliseconds: others have the interpreter's lock meanwhile."""
    return _typed(ctypes.CDLL("libcuda.so.1"))


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
    return _typed(driver)


def _typed(driver: Any) -> Any:
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
