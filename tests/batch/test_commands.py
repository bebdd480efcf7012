"""`shardesd run`: commands that succeed, fail, hang, are killed, and wait for GPUs."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from checkpoints import command
from hub_server import wait_until

import shardesd.commands
from shardesd.commands import Commands, Counts, read_commands
from shardesd.engine import Neighbours, visible_gpus
from shardesd.errors import Held, ListError
from shardesd.events import JobEnded, JobStarted
from shardesd.options import GpuOptions


def table(out: Path) -> list[dict[str, str]]:
    with open(out / "commands.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_what_counts_as_a_command(tmp_path: Path) -> None:
    path = tmp_path / "commands.txt"
    path.write_bytes("\ufeff# mine\r\n\r\n  echo a # b\r\necho c\r\n".encode())
    assert read_commands(path) == ["echo a # b", "echo c"]
    with pytest.raises(ListError, match="can't read the commands"):
        read_commands(tmp_path / "nothing.txt")


def test_succeed_fail_hang_and_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardesd.commands, "KILL_AFTER", 0.3)
    lines = [
        "echo out; echo err >&2",
        "exit 7",
        "sleep 104729",
        "trap '' TERM; sleep 104729 & sleep 104729",
        "kill -9 $$",
        "no-such-command",
    ]
    events: list[object] = []
    work = Commands(lines, tmp_path, gpu=GpuOptions(), workers=3, timeout=0.7, on_event=events.append)
    began = time.monotonic()
    assert work.run() == Counts(done=1, failed=5, left=0)
    assert time.monotonic() - began < 20
    rows = table(tmp_path)
    states = [(row["state"], row["exit_code"]) for row in rows]
    assert states == [
        ("done", "0"),
        ("failed", "7"),
        ("timeout", "-15"),
        ("timeout", "-9"),
        ("killed", "-9"),
        ("failed", "127"),
    ]
    assert (tmp_path / rows[0]["log"]).read_text() == "out\nerr\n"
    ended = [event for event in events if isinstance(event, JobEnded)]
    assert sorted(event.number for event in ended) == [1, 2, 3, 4, 5, 6]
    metrics = json.loads((tmp_path / "gpu_metrics.json").read_text())["processes"][-1]
    assert (metrics["jobs"], metrics["successes"], metrics["failures"]) == (6, 1, 5)
    assert "sleep 104729" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    lines = [f"echo x >> {mark}", "test -e " + str(tmp_path / "later"), f"echo x >> {mark}"]
    assert Commands(lines, tmp_path / "out", gpu=GpuOptions()).run() == Counts(2, 1, 0)
    (tmp_path / "later").touch()
    assert Commands(lines, tmp_path / "out", gpu=GpuOptions()).run() == Counts(3, 0, 0, before=2)
    assert mark.read_text() == "x\nx\n"
    assert Commands(lines, tmp_path / "out", gpu=GpuOptions(), overwrite=True).run() == Counts(3, 0, 0)
    assert mark.read_text() == "x\n" * 4
    lock = shardesd.commands.Lock(tmp_path / "out" / ".run.lock")
    lock.acquire(0, lambda holder: holder)
    with pytest.raises(Held, match="is running commands"):
        Commands(lines, tmp_path / "out", gpu=GpuOptions()).run()
    lock.release()


def test_gpus_are_dealt_out_by_the_rules(tmp_path: Path) -> None:
    from fake_nvml import FakeNvml

    nvml = FakeNvml(3)
    nvml.gpus[1].used = 9_000_000_000
    options = GpuOptions(max_checks=2, check_every=0.01)
    visible = visible_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "2,1,0"})
    watch = Neighbours(nvml, visible, options, locks=tmp_path, auto_take=False).start()
    events: list[object] = []
    lines = ["echo $CUDA_VISIBLE_DEVICES; sleep 0.2"] * 4
    try:
        work = Commands(lines, tmp_path / "out", gpu=options, watch=watch, on_event=events.append)
        assert work.run() == Counts(4, 0, 0)
    finally:
        watch.close()
    said = [(tmp_path / "out" / row["log"]).read_text().strip() for row in table(tmp_path / "out")]
    assert sorted(said) == ["0", "0", "2", "2"]
    assert [row["gpus"] for row in table(tmp_path / "out")] == said
    running = most = 0
    for event in events:
        running += isinstance(event, JobStarted) - isinstance(event, JobEnded)
        most = max(most, running)
    assert most == 2
    devices = json.loads((tmp_path / "out" / "gpu_metrics.json").read_text())["processes"][-1]["devices"]
    assert devices["cuda:0"]["tasks"] == devices["cuda:2"]["tasks"] == 2
    assert devices["cuda:1"]["wait_seconds"] > 0.3


def test_ctrl_c_waits_for_what_runs_and_twice_ends_it(tmp_path: Path) -> None:
    (tmp_path / "commands.txt").write_text("sleep 1\nsleep 1\nsleep 1\n")
    arguments = command("run", tmp_path / "commands.txt", "--out", tmp_path / "out")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: (tmp_path / "out" / "commands.csv").exists(), 20)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "1 done, 0 failed, 2 left" in stderr
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: "running" in (tmp_path / "out" / "commands.csv").read_text(), 20)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 0.9
