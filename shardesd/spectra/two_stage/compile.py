"""Compiles the kernels with NVRTC at first use, through cuda-core; the machine code stays on disk per architecture."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shardesd.spectra import cublas
from shardesd.spectra.policy import in_one_line, trouble
from shardesd.spectra.two_stage.launch import Launcher
from shardesd.spectra.two_stage.layout import GROUP, WIDTH

_SOURCES = Path(__file__).parent / "kernels"
# source, its kernels, suffix of their names here, macros
_MODULES = (
    ("prepare", ("largest", "fill"), "", ("INPUT=double",)),
    ("prepare", ("largest", "fill"), "_float32", ("INPUT=float",)),
    ("panel", ("panel",), "", ()),
    ("pairs", ("products", "pairs"), "", ()),
    ("update", ("update",), "", ()),
    ("chase", ("chase",), "", (f"GROUP={GROUP}",)),
    ("tridiagonal", ("bounds", "survey", "bisect", "multisect", "finish"), "", ()),
)
MAX_CLUSTER = 16
PANEL_WARPS = 16  # at most, in a block
UPDATE_SHARED = 3 * 2 * 64 * 20 * 8  # stages of two tiles
CHASE_THREADS = 128 * GROUP + 64
CHASE_SHARED = 64 * GROUP * 64 * 8


def panel_shared(warps: int) -> int:
    return warps * WIDTH * 36 * 8


@cache
def unavailable_reason(index: int) -> str | None:
    """Why the solver cannot run on CUDA device `index`; compiles the kernels to find out. None: it can.

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


class Kernels:
    """The compiled kernels of one device."""

    def __init__(self, index: int) -> None:
        import torch

        if not cublas.available():
            raise RuntimeError("the cuBLAS that torch uses is not found in /proc/self/maps")
        from cuda.bindings import driver
        from cuda.core import Device, Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache

        Device(index).set_current()  # the primary context, which torch uses too; torch may not have made it yet
        major, minor = torch.cuda.get_device_capability(index)
        common = (_SOURCES / "common.cuh").read_text()
        try:
            on_disk: FileStreamProgramCache | None = FileStreamProgramCache()
        except OSError:  # no place to keep it: compiled again in the next process
            on_disk = None
        self._kernels: dict[str, Any] = {}
        for source, names, suffix, macros in _MODULES:
            code = common + (_SOURCES / f"{source}.cu").read_text()
            options = ProgramOptions(arch=f"sm_{major}{minor}", std="c++17", define_macro=list(macros) or None)
            module = Program(code, "c++", options).compile("cubin", cache=on_disk)
            for name in names:
                self._kernels[name + suffix] = module.get_kernel(name)
        self._handles = {name: int(kernel.handle) for name, kernel in self._kernels.items()}
        attribute = driver.CUfunction_attribute
        limit = Device(index).properties.max_shared_memory_per_block_optin
        _, device = driver.cuDeviceGet(index)
        for kernel in self._kernels.values():
            static = kernel.attributes[index].shared_size_bytes
            for key, value in (
                (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, limit - static),
                (attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
            ):
                (status,) = driver.cuKernelSetAttribute(key, value, driver.CUkernel(int(kernel.handle)), device)
                if status != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"cuKernelSetAttribute failed on device {index}: {status}")
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.clusters = self._clusters(index)
        widest = max(size for size, active in enumerate(self.clusters, 1) if active)
        # the panel of a larger matrix would not fit the registers of one cluster
        self.largest_n = min(8192, WIDTH + WIDTH * PANEL_WARPS * widest)
        resident = self._kernels["chase"].occupancy.max_active_blocks_per_multiprocessor(CHASE_THREADS, CHASE_SHARED)
        self.chase_blocks = max(1, resident) * self.multiprocessors

    def _clusters(self, index: int) -> list[int]:
        """How many clusters of 1, 2, ... 16 blocks can be resident at once, of blocks that fill a multiprocessor."""
        import torch
        from cuda.core import LaunchConfig, Stream

        stream = Stream.from_handle(torch.cuda.current_stream(index).cuda_stream)
        active = []
        for size in range(1, MAX_CLUSTER + 1):
            config = LaunchConfig(grid=(1, 1), block=(512, 1), cluster=size, shmem_size=panel_shared(PANEL_WARPS))
            active.append(self._kernels["panel"].occupancy.max_active_clusters(config, stream=stream))
        return active

    def fitting_cluster(self, least: int, most: int, batch: int) -> int:
        """Blocks a matrix, `least` to `most`: as many as let the whole batch be resident at once."""
        fitting = [size for size in range(least, most + 1) if self.clusters[size - 1] >= batch]
        return fitting[-1] if fitting else least

    def on(self, stream: int) -> Launcher:
        return Launcher(self._handles, stream)


_loading = threading.Lock()
_loaded: dict[int, Kernels] = {}


def kernels(index: int) -> Kernels:
    """Of CUDA device `index`. One thread loads them, and others wait: cuda-core can't be imported by two at once."""
    import torch

    with _loading:
        if index not in _loaded:
            with torch.cuda.device(index):
                _loaded[index] = Kernels(index)
        return _loaded[index]


def import_early() -> None:
    """Has a thread import cuda-core, for a few tenths of a second, so that the first solve needn't wait for it."""

    def work() -> None:
        with _loading, suppress(Exception):  # what is wrong with it is found and said once it is needed
            import cuda.core.utils  # noqa: F401

    with suppress(RuntimeError):  # where no thread can be had, the first solve imports it
        threading.Thread(target=work, name="shardesd-import").start()
