"""A batch that is killed at any moment, or that several processes share, ends as an undisturbed one does."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import polars as pl
import pytest
from checkpoints import command, one_file, random_weights, sharded
from hub_server import wait_until

KILLS = 22


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that take long enough to be killed in; one is truncated, one is not there, one has a NaN."""
    place = tmp_path_factory.mktemp("models")
    lines = ["full_name,likes"]
    for i in range(12):
        make = sharded if i % 3 == 0 else one_file
        tensors = random_weights(layers=12, size=96, seed=i)
        if i == 4:
            tensors["model.layers.3.self_attn.q_proj.weight"][0, 0] = float("nan")
        lines.append(f"{make(place / f'm{i}', tensors)},{i}")
    broken = one_file(place / "broken", random_weights()) / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-10])
    lines += [f"{place}/broken,100", f"{place}/missing,101"]
    path = place / "models.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def start(listed: Path, out: Path, *arguments: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("batch", listed, "--out", out, *arguments),
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def holds_a_claim(out: Path, process: subprocess.Popen[str]) -> bool:
    """Claims may go while they are looked at."""
    for path in out.glob("claims/*.claim"):
        with suppress(FileNotFoundError):
            if f'"pid": {process.pid},' in path.read_text(errors="replace"):
                return True
    return False


def finish(process: subprocess.Popen[str]) -> str:
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    assert "Traceback" not in stderr
    return stderr


@pytest.fixture(scope="module")
def whole(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    finish(start(listed, out))
    return out


def without_times(path: Path) -> str:
    return pl.read_csv(path, infer_schema=False).drop("seconds", "time", strict=False).write_csv()


def files(out: Path) -> set[str]:
    found = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    return {name for name in found if not name.startswith(("logs/", "gpu_metrics.json"))}


def same(out: Path, whole: Path) -> None:
    assert files(out) == files(whole)
    for name in sorted(files(whole)):
        if name.endswith(".csv"):
            assert without_times(out / name) == without_times(whole / name), name
        elif name.startswith("spectra/"):
            assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_kill_9_at_random_moments(listed: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seed = random.Random(11)
    kills = half_done = 0
    while kills < KILLS:
        process = start(listed, out)
        if seed.random() < 0.8:  # once it is at work; else at any moment of its beginning
            wait_until(lambda p=process: holds_a_claim(out, p) or p.poll() is not None, 30)
        time.sleep(seed.random() * 0.4)
        if process.poll() is not None:
            finish(process)
            # All done before it could be killed: from here on, into one more half-done state.
            for name in seed.sample(sorted(p.name for p in (out / "models").glob("*.csv")), 6):
                (out / "models" / name).unlink()
            continue
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        half_done += bool(list(out.glob("partial/*.jsonl")))
    assert half_done >= 5
    finish(start(listed, out))
    same(out, whole)


def test_three_processes_one_killed_one_with_a_wrong_clock(listed: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 3600\n"
    )
    late = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "late"), os.environ.get("PYTHONPATH", "")])}
    victim = start(listed, out, "--shuffle", 1)
    others = [start(listed, out, **late), start(listed, out, "--shuffle", 2, "--workers", 2)]
    assert wait_until(lambda: any(p.stat().st_size > 20_000 for p in out.glob("partial/*.jsonl")), 60)

    assert wait_until(lambda: holds_a_claim(out, victim), 60)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    for process in others:
        finish(process)
    same(out, whole)
    done: Counter[str] = Counter()
    for log in out.glob("logs/*.log"):
        done.update(re.findall(r"(?:INFO|WARNING) +(\S+): done: ", log.read_text()))
    assert set(done.values()) == {1}, done
    assert set(done) == {f"m{i}" for i in range(12)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_matrices_in_flight(tmp_path: Path, number: int) -> None:
    out = tmp_path / "out"
    for name in ("a", "b"):
        one_file(tmp_path / name, random_weights(layers=40, size=300))
    (tmp_path / "models.txt").write_text("./a\n./b\n")
    process = start(tmp_path / "models.txt", out)
    assert wait_until(lambda: any(p.stat().st_size > 5_000 for p in out.glob("partial/*.jsonl")), 60)
    process.send_signal(number)
    stderr = finish(process)
    assert "again to continue" in stderr
    assert not (out / "claims").exists()
    assert list(out.glob("partial/*.jsonl"))
    assert not list(out.glob("partial/*.lock"))


def test_two_signals_stop_at_once(listed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(listed, out)
    assert wait_until(lambda: any(p.stat().st_size > 5_000 for p in out.glob("partial/*.jsonl")), 60)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode in (3, 128 + signal.SIGTERM)


def test_hangup_reads_the_configuration_again(listed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(listed, out)
    assert wait_until(lambda: any(p.stat().st_size > 5_000 for p in out.glob("partial/*.jsonl")), 60)
    (out / "gpu_config.json").write_text('{"workers": 3, "max_checks": 4}')
    process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: len(list((out / "claims").glob("*.claim"))) == 3, 20)
    stderr = finish(process)
    assert "gpu_config.json: workers 3, max_checks 4" in stderr
