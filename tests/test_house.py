"""The rules of the house: which room may know which, who may import what, and that start-up stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "shardesd"
WORDS = ["conv1d", "errors", "events", "frozen", "options", "records", "version"]
# Data flows one way, and so do the imports: each room may know the words, and the rooms named here.
ROOMS: dict[str, list[str]] = {
    "source": [],
    "checkpoint": ["source"],
    "adapters": ["source", "checkpoint"],
    "matrices": [],
    "spectra": ["cachefolder"],
    "cachefolder": [],
    "metrics": [],
    "keep": ["spectra", "cachefolder"],
    "engine": [],
    "results": [],
    "show": [],
    "demo": [],
    "streams": [],
    "statistics": ["checkpoint", "matrices", "spectra", "metrics", "engine", "keys"],
    "ties": ["checkpoint", "matrices"],
    "keys": ["checkpoint", "spectra", "engine"],
    "wanted": ["source", "checkpoint", "matrices", "keep", "cachefolder", "ties"],
    "solver": ["checkpoint", "matrices", "spectra", "keep", "metrics"],
    "pipeline": [
        *("source", "checkpoint", "matrices", "spectra", "keep", "engine"),
        *("solver", "statistics", "ties", "wanted", "keys"),
    ],
    "opening": ["source", "checkpoint", "adapters", "matrices"],
    "scanner": [
        *("opening", "pipeline", "source", "checkpoint", "matrices", "spectra", "keep", "metrics", "engine"),
        "results",
    ],
    "inspector": ["opening", "wanted", "source", "checkpoint", "adapters", "spectra"],
    "refitter": ["spectra", "metrics", "results"],
    "batch": [
        *("scanner", "opening", "wanted", "source", "checkpoint", "adapters", "spectra", "engine"),
        "results",
    ],
    "__main__": ["cli"],
    "commands": ["batch", "engine", "results"],
    "lists": ["batch", "adapters", "source", "results"],
    "doctor": ["source", "checkpoint", "spectra", "engine", "results"],
    "cli": [
        *("batch", "commands", "lists", "doctor", "inspector", "refitter"),
        *("keep", "engine", "scanner", "show", "results", "demo", "streams"),
    ],
    "__init__": ["batch", "scanner", "results"],
}
LIMITED = {"typer": {"cli"}, "rich": {"show"}, "polars": {"results", "show", "batch"}}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "shardesd":
                yield from (f"shardesd.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_knows_only_the_rooms_before_it(path: Path) -> None:
    room = room_of(path)
    allowed = set(WORDS) if room in WORDS else {*WORDS, *ROOMS[room], room}
    for name in imports(path):
        if name.startswith("shardesd."):
            assert name.split(".")[1] in allowed, f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_right_rooms_import_the_terminal_and_the_tables(path: Path) -> None:
    for name in imports(path):
        for library, rooms in LIMITED.items():
            if name.split(".")[0] == library:
                assert room_of(path) in rooms, f"{path.relative_to(PACKAGE)} imports {library}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_shardesd_and_asking_for_help_import_no_heavy_library() -> None:
    heavy = "{'torch', 'numpy', 'polars', 'huggingface_hub'}"
    assert fresh(f"import sys, shardesd; print({heavy} & set(sys.modules))").strip() == "set()"
    code = f"""
import sys
sys.argv = ['shardesd', 'scan', '--help']
from shardesd.cli import main
try:
    main()
except SystemExit:
    pass
print({heavy} & set(sys.modules))
"""
    assert fresh(code).strip().endswith("set()")


def test_importing_everything_changes_no_global_state() -> None:
    modules = [
        "shardesd." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if path.name != "__init__.py" or path.parent != PACKAGE
    ]
    code = f"""
import logging, threading, warnings
before = (list(logging.root.handlers), logging.root.level, list(warnings.filters), threading.active_count())
import numpy, polars, typer, rich.live, huggingface_hub  # what others do on import is not ours
before = (list(logging.root.handlers), logging.root.level, list(warnings.filters), threading.active_count())
for name in {modules!r}:
    __import__(name)
after = (list(logging.root.handlers), logging.root.level, list(warnings.filters), threading.active_count())
print(before == after)
"""
    assert fresh(code).strip() == "True"


def test_the_public_surface() -> None:
    import shardesd

    names = "BatchOptions Result ScanOptions ShardesdError __version__ scan scan_many stream"
    assert shardesd.__all__ == names.split()
    for name in shardesd.__all__:
        assert getattr(shardesd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        shardesd.nonsense  # noqa: B018
