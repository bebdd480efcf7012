"""cuBLAS's calls, answered from memory of the host: by addresses and leading dimensions alone, columns first."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_AS_IT_IS, _UPPER = 0, 1
_TF32 = 3


class Library:
    """What `shardesd.spectra.cublas` calls of it."""

    def __init__(self) -> None:
        self.mode = _TF32
        """Until it is told to be exact, as where torch's user allows TF32."""

    def cublasSetMathMode(self, handle: int, mode: int) -> int:
        self.mode = mode
        return 0

    def cublasDsyrk_v2(self, *given: int) -> int:
        return self._syrk(ctypes.c_double, *given)

    def cublasSsyrk_v2(self, *given: int) -> int:
        return self._syrk(ctypes.c_float, *given)

    def cublasDgemmStridedBatched(self, *given: int) -> int:
        return self._gemm(ctypes.c_double, *given)

    def cublasSgemmStridedBatched(self, *given: int) -> int:
        return self._gemm(ctypes.c_float, *given)

    def _syrk(self, real: Any, handle: int, side: int, operation: int, n: int, k: int, *rest: int) -> int:
        alpha, A, lda, beta, C, ldc = rest
        assert side == _UPPER
        a_nk = self._given(real, A, n, k, lda) if operation == _AS_IT_IS else self._given(real, A, k, n, lda).T
        c_nn = _matrix(real, C, n, n, ldc)
        upper = np.triu_indices(n)
        before = _number(real, beta) * c_nn[upper] if _number(real, beta) else 0  # what it held may be anything
        with np.errstate(all="ignore"):
            c_nn[upper] = _number(real, alpha) * (a_nk @ a_nk.T)[upper] + before
        return 0

    def _gemm(self, real: Any, handle: int, of_a: int, of_b: int, m: int, n: int, k: int, *rest: int) -> int:
        alpha, A, lda, step_a, B, ldb, step_b, beta, C, ldc, step_c, batch = rest
        size = ctypes.sizeof(real)
        for at in range(batch):
            a, b = A + size * at * step_a, B + size * at * step_b
            a_mk = self._given(real, a, m, k, lda) if of_a == _AS_IT_IS else self._given(real, a, k, m, lda).T
            b_kn = self._given(real, b, k, n, ldb) if of_b == _AS_IT_IS else self._given(real, b, n, k, ldb).T
            c_mn = _matrix(real, C + size * at * step_c, m, n, ldc)
            assert _number(real, beta) == 0
            with np.errstate(all="ignore"):
                c_mn[:] = _number(real, alpha) * (a_mk @ b_kn)
        return 0

    def _given(self, real: Any, address: int, rows: int, columns: int, leading: int) -> np.ndarray:
        found = _matrix(real, address, rows, columns, leading)
        if real is ctypes.c_float and self.mode:  # 10 bits are left of the mantissa
            found = (np.ascontiguousarray(found).view(np.uint32) & 0xFFFFE000).view(np.float32)
        return found


def _matrix(real: Any, address: int, rows: int, columns: int, leading: int) -> np.ndarray:
    assert leading >= max(1, rows), "cuBLAS would refuse it"
    count, size = leading * (columns - 1) + rows, ctypes.sizeof(real)
    flat = np.ctypeslib.as_array((real * count).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (size, size * leading))


def _number(real: Any, address: int) -> float:
    return float(real.from_address(address).value)
