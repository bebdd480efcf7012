"""Machine code of the kernels: compiled with NVRTC at first use, through cuda-core, and kept on the disk.

To import cuda-core takes 0.2 to 0.4 s, in which all other threads wait for the interpreter's lock. A process that finds
the machine code on the disk does without.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from shardesd.cachefolder import CacheFolder, users_folder
from shardesd.spectra.two_stage.layout import GROUP

_SOURCES = Path(__file__).parent / "kernels"
# source, its kernels, suffix of their names here, macros
MODULES = (
    ("prepare", ("largest", "fill"), "", ("INPUT=double",)),
    ("prepare", ("largest", "fill"), "_float32", ("INPUT=float",)),
    ("panel", ("panel",), "", ()),
    ("pairs", ("products", "pairs"), "", ()),
    ("update", ("update",), "", ()),
    ("chase", ("chase",), "", (f"GROUP={GROUP}",)),
    ("tridiagonal", ("bounds", "survey", "bisect", "multisect", "finish"), "", ()),
)
_STANDARD = "c++17"
_KEPT_BYTES = 50_000_000  # of all architectures and versions


def kept_code(arch: str) -> list[bytes] | None:
    """A cubin for each of `MODULES`, where they are on the disk; `arch` is ``sm_90``, say."""
    found = _folder().get(_key(arch, _sources()))
    return None if found is None else _parts(*found)


def compiled_code(arch: str) -> list[bytes]:
    """As `kept_code`, compiled anew and kept. For one thread at a time: two that import cuda-core find half a package.

    Raises ImportError where cuda-core is not installed, and what that raises where they don't compile.
    """
    sources = _sources()
    codes = _compiled(arch, sources)
    with suppress(OSError):  # no place to keep it: compiled again in the next process
        sizes = {"sizes": [len(code) for code in codes]}
        _folder().put(_key(arch, sources), sizes, b"".join(codes))
    return codes


def _folder() -> CacheFolder:
    return CacheFolder(users_folder() / "kernels", _KEPT_BYTES)


def _sources() -> list[str]:
    return [_source(name) for name, *_ in MODULES]


def _source(name: str) -> str:
    return (_SOURCES / "common.cuh").read_text() + (_SOURCES / f"{name}.cu").read_text()


def _key(arch: str, sources: list[str]) -> str:
    """What the machine code follows from, but for the compiler: to ask which one is there takes longer than all else
    here, and the code that another one made is as good."""
    made_of = [arch, _STANDARD, [macros for *_, macros in MODULES], sources]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _parts(meta: dict[str, list[int]], data: bytes) -> list[bytes]:
    codes, at = [], 0
    for size in meta["sizes"]:
        codes.append(data[at : at + size])
        at += size
    return codes


def _compiled(arch: str, sources: list[str]) -> list[bytes]:
    from cuda.core import Program, ProgramOptions

    codes = []
    for source, (*_, macros) in zip(sources, MODULES, strict=True):
        options = ProgramOptions(arch=arch, std=_STANDARD, define_macro=list(macros) or None)
        codes.append(bytes(Program(source, "c++", options).compile("cubin").code))
    return codes
