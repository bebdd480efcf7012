"""The folder of kept entries: sound or absent, bounded, least recently used first, for many processes at once."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shardesd.cachefolder import CacheFolder


def key(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.kept"))


def used(folder: Path) -> int:
    """Bytes of everything, unfinished files too."""
    return sum(path.stat().st_size for path in folder.glob("??/*"))


def listed(folder: Path) -> dict[int, tuple[int, int]]:
    """Of every file, unfinished ones too: its number → bytes, and the time of its content."""
    found = {}
    for path in folder.glob("??/*"):
        with suppress(OSError):  # removed between listing and asking
            status = path.stat()
            found[status.st_ino] = (status.st_size, status.st_mtime_ns)
    return found


def test_what_is_put_is_got(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 10**6)
    assert files.get(key(1)) is None
    files.put(key(1), {"a": 1}, b"data")
    files.put(key(2), {"b": "é"})
    assert files.get(key(1)) == ({"a": 1}, b"data")
    assert files.get(key(2)) == ({"b": "é"}, b"")
    files.put(key(1), {}, b"other")
    assert CacheFolder(tmp_path, 10**6).get(key(1)) == ({}, b"other")


@pytest.mark.parametrize("position", [0, 19, 20, 23, 24, 30, -1])
def test_a_damaged_entry_is_as_if_it_had_never_been(tmp_path: Path, position: int) -> None:
    files = CacheFolder(tmp_path, 10**6)
    files.put(key(1), {"a": 1}, bytes(1000))
    (path,) = entries(tmp_path)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert files.get(key(1)) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 3, 20, 22, 500])
def test_a_torn_entry_too(tmp_path: Path, length: int) -> None:
    files = CacheFolder(tmp_path, 10**6)
    files.put(key(1), {"a": 1}, bytes(1000))
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    assert files.get(key(1)) is None


def test_an_entry_under_the_name_of_another_is_not_taken(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 10**6)
    files.put(key(1), {}, b"one")
    files.put(key(2), {}, b"two")
    os.replace(files._path(key(1)), files._path(key(2)))
    assert files.get(key(2)) is None


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 5000)
    for n in range(4):
        files.put(key(n), {}, bytes(1000))
        os.utime(files._path(key(n)), (n, n))
    files.get(key(0))  # used now
    files.put(key(4), {}, bytes(1000))
    assert files.get(key(1)) is None
    assert files.get(key(0)) is not None
    assert files.get(key(4)) is not None
    assert used(tmp_path) <= 5000


def test_one_that_is_too_large_is_not_kept_and_drives_nothing_out(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 2000)
    files.put(key(1), {}, bytes(1000))
    files.put(key(2), {}, bytes(3000))
    assert files.get(key(1)) is not None
    assert files.get(key(2)) is None


def test_many_are_put_within_the_bound(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 20_000)
    files.put_all((key(n), {"n": n}, bytes([n]) * 1000) for n in range(100))
    found = [files.get(key(n)) for n in range(100)]
    assert found[-1] == ({"n": 99}, bytes([99]) * 1000)
    assert 15 <= sum(one is not None for one in found) < 20
    assert used(tmp_path) <= 20_000
    assert int((tmp_path / "size").read_text()) >= used(tmp_path)


def test_a_lost_or_wrong_sum_is_mended(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 5000)
    for n in range(4):
        files.put(key(n), {}, bytes(1000))
    for wrong in (b"", b"nonsense", b"%020d" % 10**12):
        (tmp_path / "size").write_bytes(wrong)
        files.put(key(9), {}, bytes(1000))
        assert used(tmp_path) <= 5000
    assert int((tmp_path / "size").read_text()) >= used(tmp_path)


def test_prune_and_clear(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, 10**6)
    assert files.prune(0) == 0
    for n in range(10):
        files.put(key(n), {}, bytes(1000))
    stranger = tmp_path / "00" / "mine.txt"
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("not ours")
    assert files.prune(5200) == 5
    assert files.contents().entries == 5
    assert files.prune(0) == 5
    assert entries(tmp_path) == []
    assert stranger.exists()


WRITER = """
import hashlib, random, sys
from shardesd.cachefolder import CacheFolder
files = CacheFolder(__import__("pathlib").Path(sys.argv[1]), 100_000)
seed = random.Random(int(sys.argv[2]))
while True:
    n = seed.randrange(200)
    key = hashlib.sha256(str(n).encode()).hexdigest()
    found = files.get(key)
    assert found is None or found[1] == bytes([n]) * 1000, n
    other = hashlib.sha256(str(n ^ 1).encode()).hexdigest()
    files.put_all([(key, {"n": n}, bytes([n]) * 1000), (other, {"n": n ^ 1}, bytes([n ^ 1]) * 1000)])
"""


def test_four_processes_under_kill_9(tmp_path: Path) -> None:
    """Never a wrong entry, never beyond the bound, always readable; the processes check what they read themselves."""
    seed = random.Random(3)
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(k)]) for k in range(4)]
    over = 0
    before: dict[int, tuple[int, int]] = {}
    deadline = time.monotonic() + 6
    killed = 0
    while time.monotonic() < deadline:
        time.sleep(0.02)
        found = listed(tmp_path)
        # Files come and go during a listing; what two of them show was there between them.
        over = max(over, sum(size for _, (size, _) in found.items() & before.items()))
        before = found
        if seed.random() < 0.1:
            victim = seed.randrange(4)
            assert running[victim].poll() is None, "a writer found a wrong entry"
            running[victim].send_signal(signal.SIGKILL)
            running[victim].wait()
            killed += 1
            running[victim] = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path), str(100 + killed)],
            )
    for process in running:
        assert process.poll() is None
        process.kill()
        process.wait()
    assert killed > 5
    assert 20_000 < over <= 100_000
    files = CacheFolder(tmp_path, 100_000)
    files.put(key(1000), {}, bytes(500))  # the lock of a dead process is free
    for n in range(200):
        found = files.get(key(n))
        assert found is None or found == ({"n": n}, bytes([n]) * 1000)
    assert files.contents().entries > 30
