"""What the driver is asked when the kernels are loaded, by a stand-in for it."""

from __future__ import annotations

import ctypes
import struct
from contextlib import nullcontext
from typing import Any

import pytest

from shardesd.spectra import cublas, driver
from shardesd.spectra.two_stage import compile, loaded

torch = pytest.importorskip("torch")
CODES = [" ".join(names).encode() for _, names, *_ in compile.MODULES]
NAMES = [name for _, names, *_ in compile.MODULES for name in names]


class Driver:
    """CUDA's driver: an H100 with room for eight clusters of eight blocks, as far as is asked of it."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.code: dict[int, bytes] = {}
        self.names: dict[int, str] = {}
        self.set: list[tuple[int, int, str]] = []
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name == self.refused:
                return 209
            getattr(self, f"_{name}")(*given)
            return 0

        return call

    def _cuDeviceGet(self, found: Any, index: int) -> None:
        found._obj.value = 7 + index

    def _cuLibraryLoadData(self, found: Any, code: bytes, *options: Any) -> None:
        assert options == (None, None, 0, None, None, 0)
        found._obj.value = 2**40 + len(self.code)
        self.code[found._obj.value] = code

    def _cuLibraryGetKernel(self, found: Any, library: ctypes.c_void_p, name: bytes) -> None:
        code = self.code[library.value or 0]
        assert name.decode() in code.decode().split()
        found._obj.value = 2**41 + len(self.names)
        self.names[found._obj.value] = name.decode()

    def _cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> None:
        assert (attribute, device) == (97, 7)  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        found._obj.value = 232448

    def _cuKernelGetAttribute(self, found: Any, attribute: int, kernel: ctypes.c_void_p, device: int) -> None:
        assert (attribute, device) == (1, 7)  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        found._obj.value = 448 if self.names[kernel.value or 0] == "panel" else 0

    def _cuKernelSetAttribute(self, attribute: int, value: int, kernel: ctypes.c_void_p, device: int) -> None:
        assert device == 7
        self.set.append((attribute, value, self.names[kernel.value or 0]))

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, found: Any, kernel: ctypes.c_void_p, threads: int, shared: ctypes.c_size_t
    ) -> None:
        assert (self.names[kernel.value or 0], threads, shared.value) == ("chase", 576, 131072)
        found._obj.value = 1

    def _cuOccupancyMaxActiveClusters(self, found: Any, kernel: ctypes.c_void_p, config: ctypes.c_void_p) -> None:
        assert self.names[kernel.value or 0] == "panel"
        *shape, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(config.value or 0, 56))
        assert count == 1
        kind, size, *rest = struct.unpack_from("<I4x3I", ctypes.string_at(attributes, 72))
        assert (kind, rest) == (4, [1, 1])  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        assert shape == [size, 1, 1, 512, 1, 1, 147456, 0]
        self.sizes.append(size)
        found._obj.value = 64 // size if size <= 8 else 0


@pytest.fixture(autouse=True)
def a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_code(arch: str) -> list[bytes]:
        assert arch == "sm_90"
        return CODES

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(cublas, "available", lambda: True)
    monkeypatch.setattr(loaded, "compiled_code", compiled_code)
    monkeypatch.setattr(loaded, "kept_code", lambda arch: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1, 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)


def given(monkeypatch: pytest.MonkeyPatch, refused: str = "") -> Driver:
    stand_in = Driver(refused)
    monkeypatch.setattr(driver, "library", lambda: stand_in)
    return stand_in


def test_what_is_loaded_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = given(monkeypatch)
    kernels = loaded.Kernels(0, CODES)
    assert list(stand_in.names.values()) == NAMES
    assert {"fill", "fill_float32", "panel", "finish"} <= kernels._handles.keys()
    assert len(set(kernels._handles.values())) == len(NAMES)
    for name in NAMES:  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, …_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        assert (8, 232000 if name == "panel" else 232448, name) in stand_in.set
        assert (14, 1, name) in stand_in.set
    assert stand_in.sizes == list(range(1, 17))
    assert kernels.clusters == [64, 32, 21, 16, 12, 10, 9, 8, *[0] * 8]
    assert kernels.largest_n == 32 + 32 * 16 * 8
    assert kernels.chase_blocks == 132
    assert kernels.fitting_cluster(1, 16, 16) == 4
    assert kernels.fitting_cluster(6, 16, 100) == 6


@pytest.mark.parametrize(
    "refused", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuOccupancyMaxActiveClusters"]
)
def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    given(monkeypatch, refused)
    monkeypatch.setattr(driver, "_name", {209: "CUDA_ERROR_NO_BINARY_FOR_GPU"}.get)
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    loaded.unavailable_reason.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = loaded.unavailable_reason(0)
    loaded.unavailable_reason.cache_clear()
    assert reason == (
        f"the batched eigensolver's kernels did not compile or load: CUDA_ERROR_NO_BINARY_FOR_GPU: {refused} failed"
    )


@pytest.mark.parametrize("kept", [None, [b"a", b"b"]])
def test_kept_code_is_loaded_early_and_none_compiled(monkeypatch: pytest.MonkeyPatch, kept: list[bytes] | None) -> None:
    made: list[Any] = []
    monkeypatch.setattr(loaded, "kept_code", lambda arch: kept)
    monkeypatch.setattr(loaded, "Kernels", lambda index, codes: made.append((index, codes)) or made)
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    loaded.load_kept(3)
    assert made == ([(3, kept)] if kept else [])


def test_what_is_wrong_with_it_is_not_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(index: int, codes: object) -> None:
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(loaded, "kept_code", lambda arch: [b""])
    monkeypatch.setattr(loaded, "Kernels", refused)
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    loaded.load_kept(0)
    with pytest.raises(RuntimeError, match="NO_BINARY"):
        loaded.kernels(0)


@pytest.mark.parametrize(("words", "again"), [("CUDA_ERROR_NO_BINARY_FOR_GPU", True), ("CUDA out of memory", False)])
def test_kept_code_that_is_refused_is_compiled_again(monkeypatch: pytest.MonkeyPatch, words: str, again: bool) -> None:
    """A newer compiler than this driver knows may have made it; a full device is no fault of it."""

    def kernels(index: int, codes: list[bytes]) -> Any:
        if codes == [b"kept"]:
            raise RuntimeError(words)
        return codes

    monkeypatch.setattr(loaded, "kept_code", lambda arch: [b"kept"])
    monkeypatch.setattr(loaded, "Kernels", kernels)
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    if again:
        assert loaded.kernels(0) == CODES
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            loaded.kernels(0)
