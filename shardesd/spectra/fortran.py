"""BLAS and LAPACK routines by their own interface, without the interpreter's lock; and on how many threads.

scipy publishes the routines of its own library for C callers (`scipy.linalg.cython_blas` and `cython_lapack`); ctypes
releases the lock while it calls them. That library takes long to load, and scans on GPUs seldom need it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from threadpoolctl import LibController, ThreadpoolController

_REALS: dict[str, tuple[str, type[ctypes.c_double | ctypes.c_float]]] = {
    "d": ("d", ctypes.c_double),
    "f": ("s", ctypes.c_float),
}
"""Of numpy's letter for a precision: Fortran's, and the type in C."""

_loading = threading.Lock()
_wanted: list[int] = []
"""How many threads each `blas_threads` that is entered wants."""
_before: dict[str, tuple[LibController, int]] = {}
"""Of each library that is limited, by its file: how many threads it used before."""


@contextmanager
def blas_threads(threads: int, *, on_cpu: bool) -> Iterator[None]:
    """While it is entered, BLAS uses `threads` threads a call: a setting of the whole process.

    Of several that are entered, in whatever order they are left, the least counts; after the last one all is as it was
    before the first. `on_cpu` says whether CPUs are to solve: then scipy's library is loaded now, and not by the first
    that needs it.
    """
    with _loading:
        if on_cpu:
            _library("cython_blas")
        _wanted.append(threads)
        _limit()
    try:
        yield
    finally:
        with _loading:
            _wanted.remove(threads)
            _limit()


def call(module: Literal["blas", "lapack"], name: str, dtype: np.dtype[Any], *arguments: Any) -> int:
    """Calls a routine, named without the letter of its precision (`dtype`, float64 or float32).

    Arrays are passed by the address of their first element, letters are bytes. Gives LAPACK's `info`, the last
    parameter.
    """
    letter, real = _REALS[dtype.char]
    kinds = {bytes: ctypes.c_char, int: ctypes.c_int, float: real}
    info = ctypes.c_int(arguments[-1])  # of BLAS it is the last that is given
    held = [one if isinstance(one, np.ndarray) else kinds[type(one)](one) for one in arguments[:-1]]
    addresses = [one.ctypes.data if isinstance(one, np.ndarray) else ctypes.addressof(one) for one in (*held, info)]
    routine(f"cython_{module}", letter + name, len(addresses))(*addresses)
    return info.value if module == "lapack" else 0


def leading(a: np.ndarray) -> int:
    """BLAS's leading dimension of an array in Fortran's order, or of a view of one: from one column to the next."""
    rows: int = a.shape[0]
    apart: int = a.strides[1] // a.itemsize
    assert rows == 1 or a.strides[0] == a.itemsize
    return max(rows, apart)  # of a single column numpy's stride may be anything


@cache
def routine(module: str, name: str, parameters: int) -> Callable[..., None]:
    """`name` of `scipy.linalg.module`, which takes the addresses of so many parameters."""
    with _loading:
        capsule = _library(module).__pyx_capi__.get(name)
        _limit()  # only what was loaded already could be limited
    if capsule is None:
        found = unpublished(name)
        assert found is not None
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * parameters, ctypes.c_size_t)(found)
        return lambda *given: function(*given, 1)  # Fortran's compilers pass the length of the one letter, too
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsule, name_of(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * parameters)(address)


@cache
def unpublished(name: str) -> int | None:
    """The address of a LAPACK routine that scipy's library has, but scipy doesn't publish; None where there is none."""
    with _loading:
        library = ctypes.CDLL(_library("cython_lapack").__file__)  # finds what the libraries that it links to have
    for symbol in (f"scipy_{name}_", f"{name}_"):
        if (function := getattr(library, symbol, None)) is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _library(module: str) -> Any:
    """`scipy.linalg.module`, alone where that can be: all of scipy.linalg takes six times as long to import."""
    name = f"scipy.linalg.{module}"
    if name not in sys.modules and "scipy.linalg" not in sys.modules:
        package = find_spec("scipy.linalg")
        found = package and PathFinder.find_spec(name, package.submodule_search_locations)
        if found and found.loader:
            # Under its own name, since a later import of scipy.linalg can't load it again.
            loaded = sys.modules[name] = module_from_spec(found)
            try:
                found.loader.exec_module(loaded)
            except BaseException:
                del sys.modules[name]
                raise
    return import_module(name)


def _limit() -> None:
    """Has all libraries that are loaded now use as many threads as is wanted, or as many as before."""
    if _wanted:
        for library in _controller(len(sys.modules)).select(user_api="blas").lib_controllers:
            _before.setdefault(library.filepath, (library, library.num_threads))
            library.set_num_threads(min(_wanted))
        return
    while _before:
        _, (library, threads) = _before.popitem()
        library.set_num_threads(threads)


@lru_cache(maxsize=1)
def _controller(modules: int) -> ThreadpoolController:
    """Of the libraries that are loaded now, looked for anew where there are more modules: that takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
