"""Iterators that are left open end with the interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import one_file, random_weights, sharded
from hub_server import HubServer

MANY = """
import shardesd
results = shardesd.scan_many({models!r}, out={out!r}, cache=False, device="cpu", workers=2)
for result in results:
    raise ValueError("the user's")
"""
ONE = """
import shardesd
results = shardesd.scan_many({models!r}, out={out!r}, cache=False, device="cpu")
next(results)
"""
STREAM = """
import shardesd
rows = shardesd.stream("org/name", fetch={fetch!r}, cache=False, cache_dir={out!r}, device="cpu")
next(rows)
"""


def seconds(code: str, env: dict[str, str] | None = None) -> float:
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == ("raise" in code), ended.stderr
    return time.monotonic() - started


@pytest.mark.parametrize(("code", "count"), [(MANY, 4), (ONE, 1)])
def test_a_batch_that_is_left_open(tmp_path: Path, code: str, count: int) -> None:
    models = [str(one_file(tmp_path / f"m{i}", random_weights(layers=6, size=64, seed=i))) for i in range(count)]
    assert seconds(code.format(models=models, out=str(tmp_path / "out"))) < 45


@pytest.mark.parametrize("fetch", ["shards", "ranges"])
def test_a_stream_from_the_hub_that_is_left_open(tmp_path: Path, fetch: str) -> None:
    with HubServer() as hub:
        hub.add("org/name", sharded(tmp_path / "m", random_weights(layers=6, size=64), 5))
        assert seconds(STREAM.format(fetch=fetch, out=str(tmp_path / "kept")), hub.env(tmp_path / "hf")) < 45


def test_a_scan_in_a_thread_that_outlives_the_main_thread(tmp_path: Path) -> None:
    folder = str(one_file(tmp_path / "m", random_weights(layers=2, size=16)))
    code = f"""
import shardesd, threading
def work():
    threading.main_thread().join()
    print(shardesd.scan({folder!r}, cache=False, device="cpu").layers.height)
threading.Thread(target=work).start()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, "6"), ended.stderr
