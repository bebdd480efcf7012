"""cuBLAS's calls, answered from memory of the host: by addresses and leading dimensions alone, columns first."""

from __future__ import annotations

import ctypes

import numpy as np

_AS_IT_IS, _UPPER = 0, 1


class Library:
    """What `shardesd.spectra.cublas` calls of it."""

    def cublasDsyrk_v2(self, handle: int, side: int, operation: int, n: int, k: int, *rest: int) -> int:
        alpha, A, lda, beta, C, ldc = rest
        assert side == _UPPER
        a_nk = _matrix(A, n, k, lda) if operation == _AS_IT_IS else _matrix(A, k, n, lda).T
        c_nn = _matrix(C, n, n, ldc)
        upper = np.triu_indices(n)
        with np.errstate(all="ignore"):
            c_nn[upper] = _number(alpha) * (a_nk @ a_nk.T)[upper] + _number(beta) * c_nn[upper]
        return 0

    def cublasDgemmStridedBatched(self, handle: int, of_a: int, of_b: int, m: int, n: int, k: int, *rest: int) -> int:
        alpha, A, lda, step_a, B, ldb, step_b, beta, C, ldc, step_c, batch = rest
        for at in range(batch):
            a, b = A + 8 * at * step_a, B + 8 * at * step_b
            a_mk = _matrix(a, m, k, lda) if of_a == _AS_IT_IS else _matrix(a, k, m, lda).T
            b_kn = _matrix(b, k, n, ldb) if of_b == _AS_IT_IS else _matrix(b, n, k, ldb).T
            c_mn = _matrix(C + 8 * at * step_c, m, n, ldc)
            assert _number(beta) == 0
            with np.errstate(all="ignore"):
                c_mn[:] = _number(alpha) * (a_mk @ b_kn)
        return 0


def _matrix(address: int, rows: int, columns: int, leading: int) -> np.ndarray:
    assert leading >= max(1, rows), "cuBLAS would refuse it"
    count = leading * (columns - 1) + rows
    flat = np.ctypeslib.as_array((ctypes.c_double * count).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (8, 8 * leading))


def _number(address: int) -> float:
    return ctypes.c_double.from_address(address).value
