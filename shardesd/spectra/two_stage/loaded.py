"""The kernels on a device, and what of them fits there at once: asked of CUDA's driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from shardesd.spectra import cublas, driver
from shardesd.spectra.policy import in_one_line, trouble
from shardesd.spectra.two_stage.compile import MODULES, compiled_code, kept_code
from shardesd.spectra.two_stage.launch import Config, Launcher
from shardesd.spectra.two_stage.layout import GROUP, WIDTH

MAX_CLUSTER = 16
PANEL_WARPS = 16  # at most, in a block
UPDATE_SHARED = 3 * 2 * 64 * 20 * 8  # stages of two tiles
CHASE_THREADS = 128 * GROUP + 64
CHASE_SHARED = 64 * GROUP * 64 * 8
# CUfunction_attribute and CUdevice_attribute
_STATIC_SHARED, _DYNAMIC_SHARED, _LARGE_CLUSTERS = 1, 8, 14
_SHARED_OF_A_BLOCK = 97


def panel_shared(warps: int) -> int:
    return warps * WIDTH * 36 * 8


@cache
def unavailable_reason(index: int) -> str | None:
    """Why the solver cannot run on CUDA device `index`; loads the kernels to find out. None: it can.

    Raises, and remembers nothing, where there is no memory or the device is lost: that is no fault of the solver.
    """
    import torch

    if torch.version.cuda is None:
        return "the batched eigensolver needs a CUDA build of torch"
    if torch.cuda.get_device_capability(index) < (9, 0):
        return "the batched eigensolver needs compute capability 9.0 or newer"
    try:
        kernels(index)
    except ImportError as error:
        said = in_one_line(error)
        return f"the batched eigensolver needs cuda-core 1.0 or newer: pip install 'shardesd[gpu]' ({said})"
    except Exception as error:  # whatever NVRTC or the driver says, another solver takes over
        if trouble(error) != "task":
            raise
        said = in_one_line(error)
        # cuda-core without its extras comes without NVRTC, and finds that out only now: a RuntimeError.
        if "libnvrtc" in str(error):
            remedy = "pip install 'shardesd[gpu]', which brings nvidia-cuda-nvrtc"
            return f"the batched eigensolver needs the compiler NVRTC: {remedy} ({said})"
        return f"the batched eigensolver's kernels did not compile or load: {said}"
    return None


def load_kept(index: int) -> None:
    """Loads the kernels where they needn't be compiled, so that the first solve needn't wait for it.

    What is wrong with them is found, and said, once they are needed.
    """
    with suppress(Exception):
        if (codes := kept_code(_arch(index))) is not None:
            _of(index, lambda: Kernels(index, codes))


class Kernels:
    """The kernels of one device."""

    def __init__(self, index: int, codes: Sequence[bytes]) -> None:
        import torch

        torch.cuda.mem_get_info(index)  # the primary context, in which kernels are loaded: torch may not have made it
        device = _asked(ctypes.c_int, "cuDeviceGet", index)
        self._handles: dict[str, int] = {}
        for (_, names, suffix, _), code in zip(MODULES, codes, strict=True):
            library = _asked(ctypes.c_void_p, "cuLibraryLoadData", code, None, None, 0, None, None, 0)
            for name in names:
                kernel = _asked(ctypes.c_void_p, "cuLibraryGetKernel", ctypes.c_void_p(library), name.encode())
                self._handles[name + suffix] = kernel
        most = _asked(ctypes.c_int, "cuDeviceGetAttribute", _SHARED_OF_A_BLOCK, device)
        for kernel in map(ctypes.c_void_p, self._handles.values()):
            static = _asked(ctypes.c_int, "cuKernelGetAttribute", _STATIC_SHARED, kernel, device)
            for attribute, value in ((_DYNAMIC_SHARED, most - static), (_LARGE_CLUSTERS, 1)):
                _call("cuKernelSetAttribute", attribute, value, kernel, device)
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.clusters = self._clusters()
        widest = max(size for size, active in enumerate(self.clusters, 1) if active)
        # the panel of a larger matrix would not fit the registers of one cluster
        self.largest_n = min(8192, WIDTH + WIDTH * PANEL_WARPS * widest)
        chase, shared = ctypes.c_void_p(self._handles["chase"]), ctypes.c_size_t(CHASE_SHARED)
        resident = _asked(ctypes.c_int, "cuOccupancyMaxActiveBlocksPerMultiprocessor", chase, CHASE_THREADS, shared)
        self.chase_blocks = max(1, resident) * self.multiprocessors

    def _clusters(self) -> list[int]:
        """How many clusters of 1, 2, ... 16 blocks can be resident at once, of blocks that fill a multiprocessor."""
        panel = ctypes.c_void_p(self._handles["panel"])
        config = Config()
        active = []
        for size in range(1, MAX_CLUSTER + 1):
            config.set((1, 1), (32 * PANEL_WARPS, 1), cluster=size, shared=panel_shared(PANEL_WARPS))
            given = ctypes.c_void_p(config.address)
            active.append(_asked(ctypes.c_int, "cuOccupancyMaxActiveClusters", panel, given))
        return active

    def fitting_cluster(self, least: int, most: int, batch: int) -> int:
        """Blocks a matrix, `least` to `most`: as many as let the whole batch be resident at once."""
        fitting = [size for size in range(least, most + 1) if self.clusters[size - 1] >= batch]
        return fitting[-1] if fitting else least

    def on(self, stream: int) -> Launcher:
        return Launcher(self._handles, stream)


_loading: dict[int, threading.Lock] = {}
"""Of each device: one that doesn't answer keeps nobody from the others."""
_compiling = threading.Lock()
"""Two threads that import cuda-core at once find half a package."""
_loaded: dict[int, Kernels] = {}


def kernels(index: int) -> Kernels:
    """Of CUDA device `index`. One thread loads them, or compiles them, and others wait."""
    return _of(index, lambda: _fresh(index))


def _of(index: int, make: Callable[[], Kernels]) -> Kernels:
    import torch

    with _loading.setdefault(index, threading.Lock()):
        if index not in _loaded:
            with torch.cuda.device(index):
                if not cublas.available():
                    raise RuntimeError("the cuBLAS that torch uses is not found in /proc/self/maps")
                _loaded[index] = make()
        return _loaded[index]


def _fresh(index: int) -> Kernels:
    arch = _arch(index)
    kept = kept_code(arch)
    if kept is not None:
        try:
            return Kernels(index, kept)
        except RuntimeError as error:
            if trouble(error) != "task":
                raise
            # Another compiler made it, say, that is too new for this driver.
    with _compiling:
        codes = kept_code(arch)  # by now another device's thread may have made it
        if codes is None or codes == kept:
            codes = compiled_code(arch)
    return Kernels(index, codes)


def _arch(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _asked(kind: Any, name: str, *given: Any) -> Any:
    """What the driver's function `name` writes where its first argument points, of a type of ctypes."""
    found = kind()
    _call(name, ctypes.byref(found), *given)
    return found.value


def _call(name: str, *given: Any) -> None:
    driver.check(getattr(driver.library(), name)(*given), name)
