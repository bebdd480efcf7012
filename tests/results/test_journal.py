"""The journal of an unfinished scan: nothing that was written is lost, nothing that is damaged is believed."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardesd.errors import NoSpace, ResultsError
from shardesd.records import Row
from shardesd.results.journal import Journal

ROOT = Path(__file__).parents[2]
Rows = Callable[..., Row]
Eigs = Callable[..., np.ndarray]


def filled(path: Path, names: list[str], row: Rows, eigs: Eigs) -> None:
    journal = Journal.create(path, {"options": {"bins": 100}})
    for name in names:
        journal.append(row(name), eigs(name))
    journal.close()


def reopened(path: Path) -> Journal:
    journal = Journal.open(path)
    assert journal is not None
    return journal


def test_comes_back_exactly(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    journal = Journal.create(tmp_path / "j", {"a": [1, 2.5]})
    journal.append(row("x", alpha=0.1 + 0.2), eigs("x", 1000))
    journal.append(row("bad", status="failed", reason="NaN"), None)
    journal.append(row("none"), np.empty(0))
    assert journal.eigs("x").tobytes() == eigs("x", 1000).tobytes()
    journal.append(row("y"), eigs("y").astype("float32"))  # after a read, still at the end
    journal.close()
    journal = reopened(tmp_path / "j")
    assert journal.fingerprint == {"a": [1, 2.5]}
    assert list(journal.rows.values()) == [
        row("x", alpha=0.1 + 0.2),
        row("bad", status="failed", reason="NaN"),
        row("none"),
        row("y"),
    ]
    assert journal.lengths() == {"x": 1000, "none": 0, "y": 6}
    assert journal.eigs("x").tobytes() == eigs("x", 1000).tobytes()
    assert journal.eigs("none").size == 0
    assert journal.eigs("y").dtype == np.float64
    journal.close()


def test_torn_at_every_byte(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    path = tmp_path / "j"
    filled(path, ["x", "y"], row, eigs)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(0, len(data) + 1, 7):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        journal = Journal.open(path)
        if whole == 0:
            assert journal is None
            continue
        assert journal is not None
        assert list(journal.rows) == ["x", "y"][: whole - 1]
        assert path.stat().st_size == ends[whole - 1]
        journal.append(row("z"), eigs("z"))
        journal.close()
        journal = reopened(path)
        assert list(journal.rows) == [*["x", "y"][: whole - 1], "z"]
        journal.close()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_its_own_line(tmp_path: Path, row: Rows, eigs: Eigs, where: float, bit: int) -> None:
    path = tmp_path / "j"
    filled(path, ["x", "y", "z"], row, eigs)
    data = bytearray(path.read_bytes())
    place = int(where * len(data))
    line = data[:place].count(b"\n")
    newline = data[place] == ord("\n")
    data[place] ^= 1 << bit
    path.write_bytes(data)
    journal = Journal.open(path)
    if line == 0:
        assert journal is None
        return
    assert journal is not None
    # Without its newline a line swallows the next one; nothing else may be lost, and nothing may differ.
    lost = {line, line + 1} if newline else {line}
    assert list(journal.rows) == [name for i, name in enumerate("xyz", 1) if i not in lost]
    for name in journal.rows:
        assert journal.rows[name] == row(name)
        assert np.array_equal(journal.eigs(name), eigs(name))
    journal.append(row("w"), eigs("w"))
    journal.close()
    journal = reopened(path)
    assert "w" in journal.rows
    journal.close()


@pytest.mark.parametrize("junk", [b"\0" * 5000, b"{}\n", b'{"crc":"00000000","row":{}}\n', b"\xff\n\n\n", b'"\n'])
def test_junk_behind_the_rows(tmp_path: Path, row: Rows, eigs: Eigs, junk: bytes) -> None:
    path = tmp_path / "j"
    filled(path, ["x"], row, eigs)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(junk)
    journal = reopened(path)
    assert list(journal.rows) == ["x"]
    assert path.stat().st_size == size
    journal.close()
    path.write_bytes(junk)
    assert Journal.open(path) is None


def test_none_to_open(tmp_path: Path) -> None:
    assert Journal.open(tmp_path / "gone") is None
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="is not a folder"):
        Journal.open(tmp_path / "file" / "j")


def test_damage_under_an_open_journal(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    journal = Journal.create(tmp_path / "j", {})
    journal.append(row("layers.3.mlp"), eigs("x"))
    with open(tmp_path / "j", "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(ResultsError, match=r"layers\.3\.mlp can't be read back"):
        journal.eigs("layers.3.mlp")
    journal.close()


@pytest.mark.parametrize("written", [0, 1, 200])
def test_no_space_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Rows, eigs: Eigs, written: int
) -> None:
    path = tmp_path / "j"
    journal = Journal.create(path, {})
    journal.append(row("x"), eigs("x"))
    before = path.read_bytes()
    write, left = os.write, [written]

    def full(handle: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(handle, data[: left[0]])
        left[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpace, match="no space left in"):
            journal.append(row("y"), eigs("y"))
    assert path.read_bytes() == before
    assert list(journal.rows) == ["x"]
    journal.append(row("z"), eigs("z"))  # space came back
    journal.close()
    journal = reopened(path)
    assert list(journal.rows) == ["x", "z"]
    assert np.array_equal(journal.eigs("z"), eigs("z"))
    journal.close()


def test_a_limit_of_the_system_in_mid_line(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    """The real thing: the kernel takes half a line and refuses the rest (a limit on file size)."""
    path = tmp_path / "j"
    journal = Journal.create(path, {})
    journal.append(row("x"), eigs("x"))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(ResultsError, match="file too large"):
            journal.append(row("y"), eigs("y"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    journal.close()


CHILD = """
import sys
import numpy as np
from pathlib import Path
from shardesd.records import Row
from shardesd.results.journal import Journal
path = Path(sys.argv[1])
journal = Journal.open(path) or Journal.create(path, {"a": 1})
for i in range(len(journal.rows), 100000):
    journal.append(Row(model_id="m", longname=str(i), M=i), np.full(200, float(i)))
    sys.stdout.write(f"{i}\\n")
    sys.stdout.flush()
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """Every row whose `append` had returned is there after a SIGKILL, whole, and the next process goes on behind it."""
    path, chance, total = tmp_path / "j", random.Random(5), 0
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert child.stdout is not None
        first = child.stdout.readline()
        assert int(first) == total, "the rows that were there were not computed again"
        time.sleep(chance.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        acknowledged = [first, *child.stdout]
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        last = max(int(line) for line in acknowledged if line.endswith("\n"))
        journal = reopened(path)
        assert len(journal.rows) in (last + 1, last + 2)  # one may have been written and not yet acknowledged
        assert [row.M for row in journal.rows.values()] == list(range(len(journal.rows)))
        for name in (str(total), str(last), str(len(journal.rows) - 1)):
            assert (journal.eigs(name) == float(name)).all()
        assert sum(journal.lengths().values()) == 200 * len(journal.rows)
        total = len(journal.rows)
        journal.close()
    assert total > 20
