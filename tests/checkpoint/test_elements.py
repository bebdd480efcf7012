from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardesd.checkpoint import SUPPORTED, StoredMatrix, is_integer, is_supported
from shardesd.checkpoint.elements import raw_dtype
from shardesd.checkpoint.header import DTYPE_BITS

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored(dtype: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw elements, and what torch says that they are in float64."""
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100).to(
        TORCH[dtype]
    )
    raw = values.view(torch.int16).numpy().view(np.uint16) if dtype == "BF16" else values.numpy()
    return raw, values.to(torch.float64).numpy()


# Of a larger array: all, a column part (q, k, v), a transposed view, a slice of a convolution, reversed rows.
VIEWS: dict[str, Any] = {
    "whole": lambda a: a.reshape(-1, a.shape[-1]),
    "columns": lambda a: a.reshape(-1, a.shape[-1])[:, 5:130],
    "transposed": lambda a: a.reshape(-1, a.shape[-1]).T,
    "conv": lambda a: a.reshape(6, 70, -1)[:, :, 1],
    "reversed": lambda a: a.reshape(-1, a.shape[-1])[::-1],
    "one row": lambda a: a.reshape(1, -1),
    "one column": lambda a: a.reshape(-1, 1),
    "empty": lambda a: a.reshape(-1, a.shape[-1])[:0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", sorted(SUPPORTED))
@pytest.mark.parametrize("wanted", [np.float32, np.float64])
def test_blocks(dtype: str, view: str, wanted: type) -> None:
    raw, exact = (VIEWS[view](array) for array in stored(dtype, 6, 70, 840))
    matrix = StoredMatrix(raw, dtype)
    M, N = matrix.shape
    assert exact.shape == (M, N)
    before = raw.copy()
    for axis, length in ((0, M), (1, N)):
        for start, stop in ((0, length), (length // 3, length // 2), (length, length)):
            block = matrix.block(axis, start, stop, np.dtype(wanted))  # type: ignore[arg-type]
            expected = exact[start:stop] if axis == 0 else exact[:, start:stop]
            np.testing.assert_array_equal(block, expected.astype(wanted), strict=True)
            assert block.flags.c_contiguous or (axis == 1 and block.flags.f_contiguous)
            assert not np.shares_memory(block, raw)
    np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", sorted(SUPPORTED))
def test_tensor(dtype: str, view: str) -> None:
    raw, exact = (VIEWS[view](array) for array in stored(dtype, 6, 70, 840))
    tensor = StoredMatrix(raw, dtype).rows(0, len(raw))
    assert tensor.dtype == TORCH[dtype]
    np.testing.assert_array_equal(tensor.to(torch.float64).numpy(), exact, strict=True)
    if raw.size and view != "reversed":
        assert tensor.data_ptr() == raw.ctypes.data


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_half_is_exact(dtype: str) -> None:
    raw = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    exact = torch.from_numpy(raw.view(np.int16)).view(TORCH[dtype]).to(torch.float64).numpy()
    matrix = StoredMatrix(raw if dtype == "BF16" else raw.view(np.float16), dtype)
    for wanted in (np.float32, np.float64):
        np.testing.assert_array_equal(matrix.block(0, 0, 256, np.dtype(wanted)), exact.astype(wanted))


def test_float64_is_rounded_to_float32_and_overflows_quietly() -> None:
    raw = np.array([[1 + 2**-30, 1e300, -1e300]])
    assert StoredMatrix(raw, "F64").block(0, 0, 1, np.dtype(np.float32)).tolist() == [[1.0, np.inf, -np.inf]]


def test_bfloat16_takes_little_memory_beyond_the_block() -> None:
    import tracemalloc

    raw = np.ones((2000, 2000), np.uint16)
    tracemalloc.start()
    block = StoredMatrix(raw, "BF16").block(0, 0, 2000, np.dtype(np.float64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < block.nbytes + 1_000_000


def test_refuses_what_it_can_not_read() -> None:
    with pytest.raises(ValueError, match="dtype 'F8_E4M3' is not supported"):
        StoredMatrix(np.zeros((2, 2), np.uint8), "F8_E4M3")
    with pytest.raises(ValueError, match="expected a 2-D array of uint16 for BF16, got 2-D float32"):
        StoredMatrix(np.zeros((2, 2), np.float32), "BF16")
    with pytest.raises(ValueError, match="got 1-D"):
        StoredMatrix(np.zeros(2, np.float32), "F32")
    with pytest.raises(ValueError, match="float32 or float64"):
        StoredMatrix(np.zeros((2, 2), np.float32), "F32").block(0, 0, 1, np.dtype(np.float16))


def test_dtype_words() -> None:
    assert {word for word in DTYPE_BITS if is_supported(word)} == {"F64", "F32", "F16", "BF16"}
    integers = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
    assert {word for word in DTYPE_BITS if is_integer(word)} == integers
    for word, bits in DTYPE_BITS.items():
        assert raw_dtype(word).itemsize * 8 == max(bits, 8)
