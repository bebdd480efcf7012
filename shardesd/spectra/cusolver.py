"""cuSOLVER's own batched eigensolver, which torch doesn't call: for small matrices several times one at a time.

`cusolverDnXsyevBatched` is in the library that torch ships (CUDA 12.6 and newer); it is called through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from shardesd.spectra.linked import loaded

if TYPE_CHECKING:
    import torch

LARGEST_N = 1024
"""Beyond it a batch gains nothing (docs/performance.md)."""

_REAL = {"torch.float32": 0, "torch.float64": 1}  # cudaDataType
_VALUES_ONLY, _LOWER = 0, 0
_Handle = tuple[ctypes.c_void_p, ctypes.c_void_p]
_idle: dict[int, list[_Handle]] = {}
"""Of each device, those that no call uses: a handle holds memory of its device, and CUDA's worker threads come and go
with each scan."""
_STATUS = {
    **{1: "NOT_INITIALIZED", 2: "ALLOC_FAILED", 3: "INVALID_VALUE", 4: "ARCH_MISMATCH", 5: "MAPPING_ERROR"},
    **{6: "EXECUTION_FAILED", 7: "INTERNAL_ERROR", 8: "MATRIX_TYPE_NOT_SUPPORTED", 9: "NOT_SUPPORTED"},
}


def available() -> bool:
    """Whether the library is there and has the routine."""
    return _library() is not None


def eigvalsh_batched(gram_Bnn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues (B, n) of symmetric matrices, in their dtype, and info (B,): not 0 where one failed.

    The lower triangles are read, and the matrices are overwritten. On the current stream. Raises RuntimeError where
    cuSOLVER refuses.
    """
    import torch

    library = _library()
    assert library is not None
    B, n, _ = gram_Bnn.shape
    device = gram_Bnn.device
    real = _REAL[str(gram_Bnn.dtype)]
    eigs_Bn = torch.empty(B, n, dtype=gram_Bnn.dtype, device=device)
    info_B = torch.zeros(B, dtype=torch.int32, device=device)
    with _handle(library, device) as (handle, parameters):
        stream = torch.cuda.current_stream(device).cuda_stream
        _check(library.cusolverDnSetStream(handle, ctypes.c_void_p(stream)), "SetStream")
        # A row-major lower triangle is a column-major upper one.
        matrix = (
            *(ctypes.c_int(_VALUES_ONLY), ctypes.c_int(1 - _LOWER), ctypes.c_int64(n), ctypes.c_int(real)),
            *(ctypes.c_void_p(gram_Bnn.data_ptr()), ctypes.c_int64(n), ctypes.c_int(real)),
            *(ctypes.c_void_p(eigs_Bn.data_ptr()), ctypes.c_int(real)),
        )
        on_device, on_host = ctypes.c_size_t(), ctypes.c_size_t()
        status = library.cusolverDnXsyevBatched_bufferSize(
            handle, parameters, *matrix, ctypes.byref(on_device), ctypes.byref(on_host), ctypes.c_int64(B)
        )
        _check(status, "XsyevBatched_bufferSize")
        device_work = torch.empty(on_device.value, dtype=torch.uint8, device=device)
        host_work = ctypes.create_string_buffer(max(1, on_host.value))
        status = library.cusolverDnXsyevBatched(
            handle,
            parameters,
            *matrix,
            *(ctypes.c_void_p(device_work.data_ptr()), on_device),
            *(ctypes.cast(host_work, ctypes.c_void_p), on_host),
            ctypes.c_void_p(info_B.data_ptr()),
            ctypes.c_int64(B),
        )
        _check(status, "XsyevBatched")
        torch.cuda.current_stream(device).synchronize()  # before the work arrays go
    return eigs_Bn, info_B


@contextmanager
def _handle(library: Any, device: torch.device) -> Iterator[_Handle]:
    """One of the device for one call, which ends with what it was given to do."""
    import torch

    idle = _idle.setdefault(device.index or 0, [])
    try:
        found = idle.pop()
    except IndexError:
        found = ctypes.c_void_p(), ctypes.c_void_p()
        _check(library.cusolverDnCreateParams(ctypes.byref(found[1])), "CreateParams")
        with torch.cuda.device(device):
            _check(library.cusolverDnCreate(ctypes.byref(found[0])), "Create")
    try:
        yield found
    finally:
        idle.append(found)


def _check(status: int, what: str) -> None:
    if status:
        name = _STATUS.get(status, str(status))
        # torch's words, see `policy`
        raise RuntimeError(f"cusolver error: CUSOLVER_STATUS_{name}, when calling cusolverDn{what}")


@cache
def _library() -> Any:
    """The library that torch has loaded; None without it, or where it is too old."""
    import torch

    torch.linalg.eigvalsh(torch.eye(2, device="cuda"))  # loads it
    library = loaded("libcusolver.so", keeps_lock=False)
    return library if library is not None and hasattr(library, "cusolverDnXsyevBatched") else None
