"""What the driver is given when a kernel is launched."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from shardesd.spectra import driver
from shardesd.spectra.two_stage.launch import Launcher


class Driver:
    """Stands for `cuLaunchKernelEx`: reads what the real one reads."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.kernel = 0
        self.config: tuple[int, ...] = ()
        self.cluster: tuple[int, ...] = ()
        self.values: list[bytes] = []
        self.arguments = 0

    def __call__(self, config: int, kernel: int, arguments: int, extra: Any) -> int:
        assert extra is None
        self.kernel = kernel
        # gridDim x, y, z; blockDim x, y, z; sharedMemBytes; hStream; attrs; numAttrs
        *self.config, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        self.cluster = ()
        if count:
            assert count == 1
            self.cluster = struct.unpack_from("<I4x3I", ctypes.string_at(attributes, 72))
        at = (ctypes.c_void_p * self.arguments).from_address(arguments)
        self.values = [ctypes.string_at(one, 8) for one in at]
        return self.status


def test_grid_block_and_stream() -> None:
    driver = Driver()
    Launcher({"fill": 77}, 0x7F0012345678, driver)("fill", (3, 5), (32, 8), shared=4096)
    assert driver.kernel == 77
    assert driver.config == [3, 5, 1, 32, 8, 1, 4096, 0x7F0012345678]
    assert driver.cluster == ()


def test_a_grid_of_clusters_and_then_one_without() -> None:
    driver = Driver()
    launcher = Launcher({"panel": 1}, 9, driver)
    launcher("panel", (2, 7), (512, 1), cluster=8)
    assert driver.config == [16, 7, 1, 512, 1, 1, 0, 9]
    assert driver.cluster == (4, 8, 1, 1)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    launcher("panel", (2, 7), (512, 1))
    assert driver.config == [2, 7, 1, 512, 1, 1, 0, 9]
    assert driver.cluster == ()


def test_pointers_integers_and_doubles() -> None:
    driver = Driver()
    driver.arguments = 5
    Launcher({"finish": 1}, 0, driver)("finish", (1, 1), (1, 1), 0x7F00DEADBEEF, 3, -1, 1e-13, 2**40)
    pointer, three, minus, tolerance, large = driver.values
    assert struct.unpack("<q", pointer) == (0x7F00DEADBEEF,)
    assert struct.unpack("<i", three[:4]) == (3,), "a 32-bit parameter reads the lower half"
    assert struct.unpack("<i", minus[:4]) == (-1,)
    assert struct.unpack("<d", tolerance) == (1e-13,)
    assert struct.unpack("<q", large) == (2**40,)


def test_a_refused_launch_names_the_kernel_and_the_driver_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_name", lambda status: f"CUDA_ERROR_{status}")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_701: the launch of kernel chase failed"):
        Launcher({"chase": 1}, 0, Driver(701))("chase", (1, 1), (1, 1))
