"""CUDA's own libraries, as torch has loaded them, for what torch and cuda-core don't call, or call too slowly.

To hand a GPU its work takes some microseconds a call. torch and cuda-core let go of the interpreter's lock for each,
and beside other threads wait ten times as long to have it back: a solve of 550 kernels gives it away 700 times.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")


def loaded(name: str, *, keeps_lock: bool) -> Any:
    """The library whose file's name begins with `name`, for ctypes; None where this process hasn't loaded it.

    Its calls keep the interpreter's lock where `keeps_lock`, so they must be short.
    """
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "/" in line}
        paths = sorted(path for path in mapped if path.rpartition("/")[2].startswith(name))
        return (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(paths[0]) if paths else None
    except OSError:
        return None
