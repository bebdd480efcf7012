"""Launches kernels one behind the other without giving the interpreter's lock away (`spectra.linked`)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardesd.spectra import driver

_CONFIG = struct.Struct("@7I4xPPI4x")  # CUlaunchConfig
_CLUSTER = struct.Struct("@I4x3I52x")  # CUlaunchAttribute
_CLUSTER_DIMENSION = 4
_MOST_ARGUMENTS = 16


class Config:
    """A CUlaunchConfig, of one cluster size at most, at `address`."""

    def __init__(self, stream: int = 0) -> None:
        self._stream = stream
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._cluster = ctypes.create_string_buffer(_CLUSTER.size)
        self._attribute = ctypes.addressof(self._cluster)
        self.address = ctypes.addressof(self._config)

    def set(self, grid: tuple[int, int], block: tuple[int, int], *, cluster: int, shared: int) -> None:
        """`grid` counts clusters of so many blocks along x, where `cluster` is not 0."""
        blocks = grid[0] * (cluster or 1)
        _CONFIG.pack_into(
            *(self._config, 0, blocks, grid[1], 1, block[0], block[1], 1, shared),
            *(self._stream, self._attribute if cluster else 0, 1 if cluster else 0),
        )
        if cluster:
            _CLUSTER.pack_into(self._cluster, 0, _CLUSTER_DIMENSION, cluster, 1, 1)


class Launcher:
    """Launches kernels by name on one stream of the current device. For one thread."""

    def __init__(self, kernels: Mapping[str, int], stream: int, call: Any = None) -> None:
        """`kernels`: name → handle; `call`: the driver's `cuLaunchKernelEx`."""
        self._kernels = kernels
        self._call = call or driver.library().cuLaunchKernelEx
        # The driver copies what a launch is given before the call ends, so each launch can use the same memory.
        self._config = Config(stream)
        self._values = ctypes.create_string_buffer(8 * _MOST_ARGUMENTS)
        first = ctypes.addressof(self._values)
        self._arguments = (ctypes.c_void_p * _MOST_ARGUMENTS)(*(first + 8 * at for at in range(_MOST_ARGUMENTS)))
        self._given = self._config.address, ctypes.addressof(self._arguments)

    def __call__(
        self,
        name: str,
        grid: tuple[int, int],
        block: tuple[int, int],
        *args: int | float,
        cluster: int = 0,
        shared: int = 0,
    ) -> None:
        """`grid` counts clusters of so many blocks along x, where `cluster` is given.

        An int stands for a pointer, or an integer of any width: its lower bytes. Raises RuntimeError.
        """
        config, arguments = self._given
        self._config.set(grid, block, cluster=cluster, shared=shared)
        _eight_bytes(tuple(map(type, args))).pack_into(self._values, 0, *args)
        driver.check(self._call(config, self._kernels[name], arguments, None), f"the launch of kernel {name}")


@lru_cache(maxsize=64)
def _eight_bytes(kinds: tuple[type, ...]) -> struct.Struct:
    return struct.Struct("@" + "".join("d" if kind is float else "q" for kind in kinds))
