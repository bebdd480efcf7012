"""The kernels' machine code: compiled once, then taken from the disk; made anew for another source or card."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardesd.spectra.two_stage import compile

Made = list[tuple[str, str]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """What a stand-in for cuda-core has compiled: the architecture and the macros."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: Made = []

    class ProgramOptions:
        def __init__(self, *, arch: str, std: str, define_macro: list[str] | None) -> None:
            assert std == "c++17"
            self.arch, self.macros = arch, " ".join(define_macro or [])

    class Program:
        def __init__(self, source: str, kind: str, options: ProgramOptions) -> None:
            assert kind == "c++"
            assert "__global__" in source
            self.options = options

        def compile(self, kind: str) -> Any:
            assert kind == "cubin"
            made.append((self.options.arch, self.options.macros))
            self.code = f"code {len(made)}".encode() * len(made)
            return self

    core = ModuleType("cuda.core")
    core.Program, core.ProgramOptions = Program, ProgramOptions  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    return made


def machine_code(arch: str) -> list[bytes]:
    return compile.kept_code(arch) or compile.compiled_code(arch)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("shardesd/kernels/??/*.kept"))


def test_compiled_once(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine_code("sm_90")
    assert first == [f"code {n}".encode() * n for n in range(1, len(compile.MODULES) + 1)]
    assert made == [("sm_90", " ".join(macros)) for *_, macros in compile.MODULES]
    monkeypatch.setitem(sys.modules, "cuda.core", None)  # can't be imported, and needn't be
    assert machine_code("sm_90") == first
    assert len(kept(tmp_path)) == 1


def test_made_anew_for_another_card(made: Made, tmp_path: Path) -> None:
    machine_code("sm_90")
    machine_code("sm_100")
    assert [arch for arch, _ in made] == ["sm_90"] * len(compile.MODULES) + ["sm_100"] * len(compile.MODULES)
    assert len(kept(tmp_path)) == 2


def test_made_anew_for_another_source(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine_code("sm_90")
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in compile._SOURCES.iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compile, "_SOURCES", sources)
    machine_code("sm_90")
    assert len(made) == len(compile.MODULES), "the same words elsewhere"
    with (sources / "chase.cu").open("a") as stream:
        stream.write("// mended\n")
    machine_code("sm_90")
    assert len(made) == 2 * len(compile.MODULES)


def test_a_damaged_one_is_compiled_again(made: Made, tmp_path: Path) -> None:
    first = machine_code("sm_90")
    (path,) = kept(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = machine_code("sm_90")
    assert len(made) == 2 * len(compile.MODULES)
    assert again != first, "the stand-in never makes the same"
    assert machine_code("sm_90") == again


def test_without_a_place_to_keep_it(made: Made, tmp_path: Path) -> None:
    (tmp_path / "shardesd").write_text("no folder")
    assert len(machine_code("sm_90")) == len(compile.MODULES)
    assert len(machine_code("sm_90")) == len(compile.MODULES)
    assert len(made) == 2 * len(compile.MODULES)


def test_without_cuda_core(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ImportError, match=r"cuda\.core"):
        machine_code("sm_90")


def test_threads_at_once(made: Made) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(machine_code, [f"sm_{90 + at % 2}" for at in range(16)]))
    for at, codes in enumerate(found):
        assert len(codes) == len(compile.MODULES), at


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_nvrtc_compiles_them_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str) -> None:
    """NVRTC needs no GPU."""
    pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC: pip install 'shardesd[gpu]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for (source, names, *_), code in zip(compile.MODULES, machine_code(arch), strict=True):
        assert code.startswith(b"\x7fELF"), source
        for name in names:
            assert f".text.{name}\0".encode() in code, (source, name)
