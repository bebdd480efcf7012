"""Products of matrices by torch's cuBLAS, called without giving the interpreter's lock away (`linked`).

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
_PATIENCE = 10.0  # seconds
_INT, _POINTER, _STRIDE = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
_EXACT = 0  # CUBLAS_DEFAULT_MATH: float32 is not rounded to TF32, which torch's users may allow for the whole process
_NUMBERS = {4: (ctypes.c_float(0.0), ctypes.c_float(1.0)), 8: (ctypes.c_double(0.0), ctypes.c_double(1.0))}
_AT = {size: tuple(map(ctypes.addressof, numbers)) for size, numbers in _NUMBERS.items()}
"""By the size of an element, where 0 and 1 lie."""


_loaded: dict[torch.device, threading.Event] = {}
"""Set once it has been loaded for a device."""


def available() -> bool:
    """Whether the library is there."""
    return _library() is not None


def takes(gram: torch.Tensor) -> bool:
    """Whether `add_lower` and `multiply_each` can make it. Waits for `load`."""
    if not gram.is_cuda:
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
    """total += blockᵀ·block, the lower triangle. `total` is contiguous, both are float64 or both float32."""
    import torch

    K, N = block_KN.shape
    if block_KN.stride(0) == 1 and block_KN.stride(1) >= K:
        operation, step = _TRANSPOSED, block_KN.stride(1)
    else:
        block_KN = block_KN.contiguous()
        operation, step = _AS_IT_IS, N
    size = total_NN.element_size()
    _, one = _AT[size]
    with torch.cuda.device(total_NN.device):
        before, after = (_handle(), _UPPER, operation, N, K, one), (one, total_NN.data_ptr(), N)
        _call("syrk_v2", size, *before, block_KN.data_ptr(), step, *after)


def multiply_each(W_BMN: torch.Tensor, grams_Cnn: torch.Tensor, first: int) -> None:
    """The Gram of each matrix, WᵀW where N ≤ M, else WWᵀ, into `grams_Cnn` (contiguous) from its matrix `first` on.

    Its lower triangle; what lies above it is undefined. Each of W is contiguous; there may be room between them.
    """
    import torch

    B, M, N = W_BMN.shape
    n = min(M, N)
    size = W_BMN.element_size()
    operations, K, apart = ((_AS_IT_IS, _TRANSPOSED), M, size) if N <= M else ((_TRANSPOSED, _AS_IT_IS), N, size * N)
    W, step = W_BMN.data_ptr(), W_BMN.stride(0)
    gram = grams_Cnn.data_ptr() + size * n * n * first
    zero, one = _AT[size]
    with torch.cuda.device(W_BMN.device):
        handle = _handle()
        for row, column, rows, columns in _lower_blocks(0, n):
            _call(
                "gemmStridedBatched",
                *(size, handle, *operations, columns, rows, K),
                *(one, W + apart * column, N, step, W + apart * row, N, step),
                *(zero, gram + size * (row * n + column), n, n * n, B),
            )


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
    zero, one = _AT[8]

    def multiply(A: int, W: int, Z: int, n: int, rows: int) -> None:
        status = gemm(
            *(handle, _AS_IT_IS, _AS_IT_IS, columns, rows, rows, one, W, columns, n * columns),
            *(A, n, n * n, zero, Z, columns, n * columns, batch),
        )
        _check(status, "DgemmStridedBatched")

    return multiply


def _handle() -> int:
    """Of this thread, set to the current device and stream. torch says anew how exact it is to be before it uses it."""
    import torch

    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    _check(_library().cublasSetMathMode(handle, _EXACT), "SetMathMode")
    return handle


def _call(name: str, size: int, *arguments: Any) -> None:
    """Calls a routine, named without the letter of its precision, for elements of `size` bytes."""
    name = ("D" if size == 8 else "S") + name
    _check(getattr(_library(), f"cublas{name}")(*arguments), name)


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
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # loads it
    library = loaded("libcublas.so", keeps_lock=True)
    if library is None or not hasattr(library, "cublasDgemmStridedBatched"):
        return None
    size = (_INT, _INT, _INT)
    library.cublasSetMathMode.argtypes = (_POINTER, _INT)
    for real in "DS":
        syrk, gemm = (getattr(library, f"cublas{real}{name}") for name in ("syrk_v2", "gemmStridedBatched"))
        syrk.argtypes = (_POINTER, *size, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT)
        gemm.argtypes = (
            *(_POINTER, _INT, _INT, *size, _POINTER, _POINTER, _INT, _STRIDE),
            *(_POINTER, _INT, _STRIDE, _POINTER, _POINTER, _INT, _STRIDE, _INT),
        )
    return library
