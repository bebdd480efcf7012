"""Products of float64 matrices by torch's cuBLAS, called without giving the interpreter's lock away (`linked`).

cuBLAS counts columns first: a row-major matrix is the transpose of what it sees. All on the device's current stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from shardesd.spectra.linked import loaded

if TYPE_CHECKING:
    import torch

_STATUS = {
    **{1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR"},
    **{13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED"},
}
_LEAST_SPLIT = 384  # of rows: smaller products would take as long
_UPPER, _AS_IT_IS, _TRANSPOSED = 1, 0, 1
_ZERO, _ONE = ctypes.c_double(0.0), ctypes.c_double(1.0)
_PATIENCE = 10.0  # seconds
_INT, _POINTER, _STRIDE = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
_AT_ZERO, _AT_ONE = ctypes.addressof(_ZERO), ctypes.addressof(_ONE)


_loaded: dict[torch.device, threading.Event] = {}
"""Set once it has been loaded for a device."""


def available() -> bool:
    """Whether the library is there."""
    return _library() is not None


def takes(gram: torch.Tensor) -> bool:
    """Whether `add_lower` and `multiply_each` can make it. Waits for `load`."""
    import torch

    if not (gram.is_cuda and gram.dtype == torch.float64):
        return False
    if (loaded := _loaded.get(gram.device)) is not None and not loaded.is_set():
        loaded.wait(_PATIENCE)
    return available()


def load(device: torch.device) -> None:
    """Has cuBLAS load its kernels for a device (for 40 to 90 ms), by a product of the current stream. Never raises.

    Through torch, which gives the interpreter's lock away for so long; whoever called it in the meantime past the lock
    (`takes`) would keep that from all others until it is loaded, and so waits.
    """
    import torch

    done = _loaded[device] = threading.Event()
    try:
        with suppress(RuntimeError):  # what is wrong is said of the first product that is needed
            some = torch.zeros((2, 64, 64), dtype=torch.float64, device=device)
            torch.bmm(some.mT, torch.bmm(some, some))
    finally:
        done.set()


def add_lower(total_NN: torch.Tensor, block_KN: torch.Tensor) -> None:
    """total += blockᵀ·block, the lower triangle. `total` is contiguous."""
    import torch

    K, N = block_KN.shape
    if block_KN.stride(0) == 1 and block_KN.stride(1) >= K:
        operation, step = _TRANSPOSED, block_KN.stride(1)
    else:
        block_KN = block_KN.contiguous()
        operation, step = _AS_IT_IS, N
    with torch.cuda.device(total_NN.device):
        status = _library().cublasDsyrk_v2(
            *(_handle(), _UPPER, operation, N, K),
            *(_AT_ONE, block_KN.data_ptr(), step, _AT_ONE, total_NN.data_ptr(), N),
        )
    _check(status, "Dsyrk")


def multiply_each(W_BMN: torch.Tensor, grams_Cnn: torch.Tensor, first: int) -> None:
    """The Gram of each matrix, WᵀW where N ≤ M, else WWᵀ, into `grams_Cnn` (contiguous) from its matrix `first` on.

    Its lower triangle; what lies above it is undefined. Each of W is contiguous; there may be room between them.
    """
    import torch

    B, M, N = W_BMN.shape
    n = min(M, N)
    operations, K, apart = ((_AS_IT_IS, _TRANSPOSED), M, 8) if N <= M else ((_TRANSPOSED, _AS_IT_IS), N, 8 * N)
    W, step = W_BMN.data_ptr(), W_BMN.stride(0)
    gram = grams_Cnn.data_ptr() + 8 * n * n * first
    with torch.cuda.device(W_BMN.device):
        multiply, handle = _library().cublasDgemmStridedBatched, _handle()
        for row, column, rows, columns in _lower_blocks(0, n):
            status = multiply(
                *(handle, *operations, columns, rows, K),
                *(_AT_ONE, W + apart * column, N, step, W + apart * row, N, step),
                *(_AT_ZERO, gram + 8 * (row * n + column), n, n * n, B),
            )
            _check(status, "DgemmStridedBatched")


@lru_cache(maxsize=64)
def _lower_blocks(start: int, size: int) -> list[tuple[int, int, int, int]]:
    """First row, first column, rows and columns of the blocks of a lower triangle, with little that lies above it.

    cuBLAS has no `Dsyrk` of a batch, and one product for all takes a third longer (docs/tuning.md).
    """
    if size < _LEAST_SPLIT:
        return [(start, start, size, size)]
    half = -(-size // 128) * 64
    middle, rest = start + half, size - half
    return [*_lower_blocks(start, half), (middle, start, rest, half), *_lower_blocks(middle, rest)]


def batched(columns: int, batch: int) -> Callable[[int, int, int, int, int], None]:
    """``multiply(A, W, Z, n, rows)``: Z = A·W of every matrix of a batch, for the current device and stream.

    A, W, Z: addresses of the first matrix's first element; A is rows × rows of (n, n), W and Z rows × columns of
    (n, columns).
    """
    gemm, handle = _library().cublasDgemmStridedBatched, _handle()

    def multiply(A: int, W: int, Z: int, n: int, rows: int) -> None:
        status = gemm(
            *(handle, _AS_IT_IS, _AS_IT_IS, columns, rows, rows, _AT_ONE, W, columns, n * columns),
            *(A, n, n * n, _AT_ZERO, Z, columns, n * columns, batch),
        )
        _check(status, "DgemmStridedBatched")

    return multiply


def _handle() -> int:
    """Of this thread, set to the current device and stream."""
    import torch

    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    return handle


def _check(status: int, what: str) -> None:
    if status:
        name = _STATUS.get(status, str(status))
        raise RuntimeError(f"CUDA error: CUBLAS_STATUS_{name} when calling cublas{what}")  # torch's words, see `policy`


@cache
def _library() -> Any:
    """None where torch has none: on a CPU, or on another maker's GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    _handle()  # loads it
    library = loaded("libcublas.so", keeps_lock=True)
    if library is None or not hasattr(library, "cublasDgemmStridedBatched"):
        return None
    size = (_INT, _INT, _INT)
    library.cublasDsyrk_v2.argtypes = (_POINTER, *size, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT)
    library.cublasDgemmStridedBatched.argtypes = (
        *(_POINTER, _INT, _INT, *size, _POINTER, _POINTER, _INT, _STRIDE),
        *(_POINTER, _INT, _STRIDE, _POINTER, _POINTER, _INT, _STRIDE, _INT),
    )
    return library
