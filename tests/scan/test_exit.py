"""The interpreter exits cleanly whenever a scan ends early: no abort by a thread that is still within torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import one_file, random_weights

HEAD = "import sys, shardesd\nfolder = sys.argv[1]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_file(tmp_path_factory.mktemp("exit") / "model", random_weights(layers=12, size=500))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("for row in shardesd.stream(folder): break", 0),
        ("rows = shardesd.stream(folder); next(rows)", 0),
        ("rows = shardesd.stream(folder); next(rows); rows.close()", 0),
        ("for row in shardesd.stream(folder): sys.exit(5)", 5),
        ("for row in shardesd.stream(folder): raise ValueError", 1),
    ],
)
def test_an_early_end(folder: Path, code: str, status: int) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", HEAD + code, str(folder)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == status, done.stderr
        assert "terminate" not in done.stderr


COMMAND = """
import atexit, gc, sys
from shardesd.cli import main
gc.collect()
before = len(gc.get_objects())
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > before, "numpy" in sys.modules))
main()
"""


@pytest.mark.parametrize("name", ["scan", "batch"])
def test_commands_spare_the_collector_what_is_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "models.txt").write_text(f"{folder}\n")
    what = folder if name == "scan" else tmp_path / "models.txt"
    options = ["--device", "cpu", "--quiet", "--no-cache", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", COMMAND, name, str(what), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "frozen: True True" in done.stdout, done.stderr


def test_the_library_leaves_the_collector_as_it_is(folder: Path) -> None:
    code = "import gc; before = gc.get_freeze_count(); shardesd.scan(folder, cache=False)\n"
    code = f"{HEAD}{code}print('frozen:', gc.get_freeze_count() - before)"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "frozen: 0\n", done.stderr


def test_ctrl_c_while_the_command_is_loaded() -> None:
    code = """
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from shardesd.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "error: interrupted\n")
