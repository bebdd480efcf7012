from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardesd.checkpoint import StoredShard, open_shard, reader
from shardesd.errors import OptionError, ShardChanged, SourceError
from shardesd.records import ShardRef, TensorRef

LINUX = sys.platform.startswith("linux")
METHODS = [pytest.param("mmap", marks=pytest.mark.skipif(not LINUX, reason="Linux only")), "pread"]
RNG = np.random.default_rng(0)
ARRAYS = {
    "tiny": np.array([1.5], np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3, np.int64),
    "mask": RNG.random(77) > 0.5,
    # Larger than a chunk, and of a size that puts what follows at odd offsets.
    "large": RNG.integers(0, 256, reader.CHUNK_BYTES + 4097, np.uint8),
    "half": RNG.standard_normal((33, 17)).astype(np.float16),
    "stack": RNG.standard_normal((5, 40, 60)).astype(np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path)
    return path


@pytest.fixture
def open_it(path: Path) -> Iterator[Callable[[str], StoredShard]]:
    opened: list[StoredShard] = []

    def make(io: str) -> StoredShard:
        opened.append(open_shard(ShardRef(name=path.name), path, io=io))
        return opened[-1]

    yield make
    for shard in opened:
        shard.close()


def named(shard: StoredShard, name: str) -> TensorRef:
    return next(tensor for tensor in shard.tensors if tensor.name == name)


@pytest.mark.parametrize("io", METHODS)
def test_reads_what_was_written(open_it: Any, io: str) -> None:
    shard = open_it(io)
    assert shard.io == io
    for tensor in shard.tensors:
        with shard.read(tensor) as raw:
            assert raw.dtype == ARRAYS[tensor.name].dtype
            assert raw.flags.c_contiguous
            np.testing.assert_array_equal(raw, ARRAYS[tensor.name], strict=True)


@pytest.mark.parametrize("io", METHODS)
def test_reads_one_expert_of_a_stack(open_it: Any, io: str) -> None:
    shard = open_it(io)
    stack = named(shard, "stack")
    size = stack.nbytes // 5
    expert = replace(stack, shape=(40, 60), start=stack.start + 3 * size, end=stack.start + 4 * size)
    with shard.read(expert) as raw:
        np.testing.assert_array_equal(raw, ARRAYS["stack"][3])
    for wrong in ({"shape": (40, 61)}, {"start": shard.nbytes, "end": shard.nbytes + size}):
        with pytest.raises(ValueError, match="not a byte range"), shard.read(replace(expert, **wrong)):
            pass


def test_elements_that_are_no_whole_bytes_come_as_bytes(tmp_path: Path, shard_bytes: Any) -> None:
    path = tmp_path / "x.safetensors"
    content = shard_bytes({"t": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]}}, 0) + bytes(range(6))
    path.write_bytes(content)
    with open_shard(ShardRef(name="x"), path) as shard, shard.read(shard.tensors[0]) as raw:
        assert raw.tolist() == list(range(6))


@pytest.mark.parametrize("io", METHODS)
def test_threads_read_one_shard_at_once(open_it: Any, io: str) -> None:
    shard = open_it(io)

    def check(number: int) -> None:
        for tensor in (*shard.tensors[number % 7 :], *shard.tensors):
            with shard.read(tensor) as raw:
                np.testing.assert_array_equal(raw, ARRAYS[tensor.name])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(check, range(24)))


def test_the_buffer_is_used_again(open_it: Any) -> None:
    shard = open_it("auto")
    addresses = set()
    for _ in range(5):
        with shard.read(named(shard, "large")) as raw, shard.read(named(shard, "half")) as other:
            addresses.add(raw.ctypes.data)
            assert not np.shares_memory(raw, other)
    assert len(addresses) == 1


def test_arrays_in_use_outlive_the_shard(open_it: Any) -> None:
    shard = open_it("auto")
    with shard.read(named(shard, "stack")) as raw:
        shard.close()
        np.testing.assert_array_equal(raw, ARRAYS["stack"])
    with pytest.raises(ValueError, match="closed"), shard.read(named(shard, "stack")):
        pass


def test_the_file_stays_open_under_a_thread_that_reads(open_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = open_it("pread")
    preadv = os.preadv

    def closing(fd: int, buffers: Any, offset: int) -> int:
        shard.close()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", closing)
    with shard.read(named(shard, "large")) as raw:
        np.testing.assert_array_equal(raw, ARRAYS["large"])
    assert shard._reader.file.closed


# What may go wrong


@pytest.mark.parametrize("io", METHODS)
@pytest.mark.parametrize("kept", [0, 0.5])
def test_a_file_that_shrank(open_it: Any, path: Path, io: str, kept: float) -> None:
    shard = open_it(io)
    first, last = shard.tensors[0], named(shard, "large")
    with shard.read(last) as raw:
        size = path.stat().st_size
        os.truncate(path, int(size * kept))
        np.testing.assert_array_equal(raw, ARRAYS["large"])  # what was handed out is beyond reach
    for tensor in (last, first):
        with pytest.raises(ShardChanged, match=f"from {size} to {int(size * kept)} bytes"), shard.read(tensor):
            pass


@pytest.mark.parametrize("io", METHODS)
def test_a_file_that_shrinks_under_the_copy(open_it: Any, path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = open_it(io)
    large = named(shard, "large")
    cut = large.start + 5000

    def truncating(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            os.truncate(path, cut)
            return inner(*args)

        return call

    if io == "mmap":
        monkeypatch.setattr(shard._reader, "_copy", truncating(shard._reader._copy))
    else:
        monkeypatch.setattr(os, "preadv", truncating(os.preadv))
    with pytest.raises(ShardChanged, match=f"to {cut} bytes"), shard.read(large):
        pass


@pytest.mark.parametrize("io", METHODS)
def test_a_file_that_was_written_to(open_it: Any, path: Path, io: str) -> None:
    shard = open_it(io)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ShardChanged, match="in place"), shard.read(shard.tensors[0]):
        pass


def test_a_file_that_was_replaced_is_read_on(open_it: Any, path: Path) -> None:
    shard = open_it("auto")
    other = path.with_name("other")
    other.write_bytes(b"")
    other.replace(path)
    with shard.read(named(shard, "stack")) as raw:
        np.testing.assert_array_equal(raw, ARRAYS["stack"])


SHRINKER = """
import os, random, sys, threading, time
from pathlib import Path
from shardesd.checkpoint import open_shard
from shardesd.errors import ShardChanged
from shardesd.records import ShardRef

path, io = Path(sys.argv[1]), sys.argv[2]
size = path.stat().st_size
random.seed(0)
noticed = 0
for round in range(60):
    os.truncate(path, size)
    with open_shard(ShardRef(name="x"), path, io=io) as shard:
        ready = threading.Barrier(3)
        errors = []
        def loop():
            ready.wait()
            try:
                while True:
                    for tensor in shard.tensors:
                        with shard.read(tensor) as raw:
                            raw[::512].sum()
            except ShardChanged as error:
                errors.append(error)
        threads = [threading.Thread(target=loop) for _ in range(2)]
        for thread in threads:
            thread.start()
        ready.wait()
        time.sleep(random.random() * 0.01)
        os.truncate(path, random.randrange(4096, size))
        for thread in threads:
            thread.join()
        noticed += len(errors)
print(noticed)
"""


@pytest.mark.parametrize("io", METHODS)
def test_a_file_that_shrinks_at_any_moment_is_never_a_crash(tmp_path: Path, shard_bytes: Any, io: str) -> None:
    path = tmp_path / "x.safetensors"
    size = 4 << 20
    header = {f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i in range(4)}
    path.write_bytes(shard_bytes(header, 4 * size))
    done = subprocess.run([sys.executable, "-c", SHRINKER, str(path), io], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "120", "")


@pytest.mark.skipif(not LINUX, reason="Linux only")
def test_where_a_mapping_is_refused(open_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    explicit = open_it("mmap")

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with (
        pytest.raises(SourceError, match=r"model\.safetensors can't be memory-mapped \(No such device\): use --io"),
        explicit.read(named(explicit, "stack")),
    ):
        pass


@pytest.mark.skipif(not LINUX, reason="Linux only")
def test_where_the_copy_is_not_permitted(open_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = open_it("mmap")

    def forbid(*args: int) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(shard._reader, "_copy", forbid)
    with pytest.raises(SourceError, match="can't be memory-mapped"), shard.read(named(shard, "stack")):
        pass


def test_where_there_is_no_preadv(open_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    test_threads_read_one_shard_at_once(open_it, "pread")


def test_short_reads_and_io_errors(open_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = open_it("pread")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    with shard.read(named(shard, "half")) as raw:
        np.testing.assert_array_equal(raw, ARRAYS["half"])

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError, match="can't be read: Input/output error"), shard.read(named(shard, "half")):
        pass


def test_io_is_checked(path: Path) -> None:
    with pytest.raises(OptionError, match="--io 'fast' is invalid"):
        open_shard(ShardRef(name="x"), path, io="fast")


def test_a_folder_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="can't be read: Is a directory"):
        open_shard(ShardRef(name="x"), tmp_path)


def test_other_threads_go_on_during_a_read(open_it: Any) -> None:
    """Copies happen outside the interpreter's lock."""
    shard = open_it("pread")
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks[0]
        for _ in range(20):
            with shard.read(named(shard, "large")):
                pass
    finally:
        done.set()
        thread.join()
    assert ticks[0] > before


# Memory

WATCHER = """
import sys
from pathlib import Path
from shardesd.checkpoint import open_shard
from shardesd.records import ShardRef

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss"))

with open_shard(ShardRef(name="x"), Path(sys.argv[1]), io=sys.argv[2]) as shard:
    assert shard.io == sys.argv[2]
    start = most = resident()
    for tensor in shard.tensors:
        with shard.read(tensor) as raw:
            raw.max()
            most = max(most, resident())
print(most - start, resident() - start)
"""


@pytest.mark.skipif(not LINUX, reason="Linux only")
@pytest.mark.parametrize("io", METHODS)
def test_one_tensor_is_resident_at_a_time(tmp_path: Path, shard_bytes: Any, io: str) -> None:
    path = tmp_path / "x.safetensors"
    size = 20_000_000
    header = {f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i in range(20)}
    path.write_bytes(shard_bytes(header))
    os.truncate(path, path.stat().st_size + 20 * size)
    done = subprocess.run([sys.executable, "-c", WATCHER, str(path), io], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    most, after = map(int, done.stdout.split())
    assert size * 0.9 < most < size * 1.3
    assert after < size * 1.1
