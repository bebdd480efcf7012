"""BLAS and LAPACK routines by their own interface, without the interpreter's lock.

scipy publishes the routines of its own library for C callers (`scipy.linalg.cython_blas` and `cython_lapack`); ctypes
releases the lock while it calls them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module


@cache
def routine(module: str, name: str, parameters: int) -> Callable[..., None]:
    """`name` of `scipy.linalg.module`, which takes the addresses of so many parameters."""
    capsule = import_module(f"scipy.linalg.{module}").__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsule, name_of(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * parameters)(address)
