"""stdout and stderr may be closed, full, or in an encoding that lacks most characters: results are written all the
same."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import command, one_file

from shardesd.show.unfailing import Unfailing
from shardesd.streams import encodable_json

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    return one_file(tmp_path / "model", {f"λ😀.{i}.weight": rng.standard_normal((12, 12)) for i in range(3)})


def shell(arguments: list[str], redirection: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    text = f"{shlex.join(arguments)} {redirection}"
    return subprocess.run(["sh", "-c", text], env={**os.environ, **env}, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        (">&-", 0),
        ("2>&-", 0),
        (">&- 2>&- <&-", 0),
        pytest.param("2>/dev/full", 0, marks=FULL),
        pytest.param(">/dev/full", 1, marks=FULL),
        pytest.param("--json >/dev/full", 1, marks=FULL),
        pytest.param("--json 2>/dev/full >/dev/full", 1, marks=FULL),
    ],
)
def test_results_are_written_whatever_the_streams_are(
    folder: Path, tmp_path: Path, redirection: str, code: int
) -> None:
    done = shell(command("scan", folder, "--out", tmp_path / "results"), redirection)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"unexpected" not in done.stderr
    if code and "2>" not in redirection:
        assert done.stderr.splitlines()[-1].startswith(
            b"error: can't write to stdout: no space left on device; the res"
        )
    table = pl.read_csv(tmp_path / "results" / "models" / "model.csv")
    assert table["status"].to_list() == ["ok"] * 3
    assert (tmp_path / "results" / "spectra" / "model.safetensors").read_bytes().count(b"shard 1/1") == 0


@FULL
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("scan", "--help")])
def test_help_into_a_full_disk(arguments: tuple[str, ...]) -> None:
    done = shell(command(*arguments), ">/dev/full")
    assert (done.returncode, done.stderr) == (1, b"error: can't write to stdout: no space left on device\n")


@FULL
@pytest.mark.parametrize("what", ["inspect", "inspect --json", "summarize", "summarize --json", "cache info"])
def test_what_other_commands_tell_into_a_full_disk(what: str, folder: Path, tmp_path: Path) -> None:
    place = {"inspect": [folder], "summarize": [tmp_path / "results"], "cache": []}[what.split()[0]]
    if what.startswith("summarize"):
        assert not shell(command("scan", folder, "--out", *place), ">/dev/null").returncode
    done = shell(command(*what.split(), *place), ">/dev/full", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stderr) == (1, b"error: can't write to stdout: no space left on device\n")


@pytest.mark.parametrize("redirection", ["2>&-", "2>&1 | true", pytest.param("2>/dev/full", marks=FULL)])
def test_a_batch_goes_on_whatever_becomes_of_stderr(folder: Path, tmp_path: Path, redirection: str) -> None:
    (tmp_path / "list.txt").write_text(f"{folder}\n{folder}\n")  # the second is told of
    shell(command("batch", tmp_path / "list.txt", "--out", tmp_path / "results", "--device", "cpu"), redirection)
    assert (tmp_path / "results" / "models" / "model.csv").exists()


def test_a_width_of_nothing_is_none(folder: Path, tmp_path: Path) -> None:
    done = shell(command("scan", folder, "--out", tmp_path / "results"), "", COLUMNS="0", LINES="0")
    assert done.returncode == 0
    assert b"3 matrices" in done.stdout


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2>/dev/full", marks=FULL)])
def test_an_error_that_nobody_can_read_is_an_exit_code(tmp_path: Path, redirection: str) -> None:
    assert shell(command("scan", tmp_path / "nowhere"), redirection).returncode == 1


def test_json_in_ascii_is_escaped(folder: Path, tmp_path: Path) -> None:
    arguments = command("scan", folder, "--out", tmp_path / "results", "--json")
    done = shell(arguments, "", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    rows = [json.loads(line) for line in done.stdout.decode("ascii").splitlines()]
    assert [row["longname"] for row in rows] == [f"λ😀.{i}" for i in range(3)]


def test_help_and_report_in_ascii(folder: Path, tmp_path: Path) -> None:
    done = shell(command("scan", "--help"), "", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"evals-thresh" in done.stdout.replace(b"\\u03bb", b"!")
    assert b"\\u" not in done.stdout
    done = shell(command("scan", folder, "--out", tmp_path / "results"), "", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"3 matrices" in done.stdout


def test_escapes_are_those_of_json() -> None:
    text = json.dumps("aλ😀\ud800", ensure_ascii=False)
    assert encodable_json(text, "utf-8") is text
    assert json.loads(encodable_json(text, "latin-1").encode("ascii")) == "aλ😀\ud800"


def test_a_stream_that_is_gone_takes_everything(tmp_path: Path) -> None:
    file = open(tmp_path / "log", "w", encoding="utf-8")  # noqa: SIM115
    stream = Unfailing(file)
    assert stream.write("kept\n") == 5
    file.close()
    assert stream.write("lost\n") == 5
    stream.flush()
    assert not stream.isatty()
    assert (tmp_path / "log").read_text() == "kept\n"
    assert Unfailing(None).write("lost") == 4
    assert Unfailing(sys.stderr).encoding == sys.stderr.encoding
