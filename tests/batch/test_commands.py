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
from shardesd.errors import Held, ListError, NoSpace, OptionError
from shardesd.events import JobEnded, JobStarted, Notice
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


def test_logs_and_exit_codes_of_other_lists_are_kept(tmp_path: Path) -> None:
    Commands(["echo a", "echo b; exit 3"], tmp_path, gpu=GpuOptions()).run()
    Commands(["echo c", "echo b; exit 3"], tmp_path, gpu=GpuOptions()).run()
    rows = table(tmp_path)
    assert [(row["number"], row["command"], row["exit_code"]) for row in rows] == [
        ("1", "echo c", "0"),
        ("2", "echo b; exit 3", "3"),
        ("", "echo a", "0"),
    ]
    assert [(tmp_path / row["log"]).read_text() for row in rows] == ["c\n", "b\n", "a\n"]
    assert Commands(["x() { echo d; }; x", "echo a"], tmp_path, gpu=GpuOptions()).run().before == 1
    assert [(tmp_path / row["log"]).read_text() for row in table(tmp_path)] == ["d\n", "a\n", "c\n", "b\n"]


def test_what_still_runs_after_a_kill_is_not_started_twice(tmp_path: Path) -> None:
    mark, go = tmp_path / "mark", tmp_path / "go"
    wait = f"echo x >> {mark}; while [ ! -e {go} ]; do sleep 0.05; done >/dev/null; echo y >> {mark}"
    (tmp_path / "commands.txt").write_text(f"{wait}\necho z >> {mark}\n")
    arguments = command("run", tmp_path / "commands.txt", "--out", tmp_path / "out")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    first = subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)
    assert wait_until(mark.exists, 20)
    first.kill()
    first.wait()
    again = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: "z" in mark.read_text(), 20)
    go.touch()
    _, stderr = again.communicate(timeout=20)
    assert again.returncode == 0, stderr
    assert "command 1 still runs since an earlier run" in stderr
    assert mark.read_text().split() == ["x", "z", "y", "x", "y"]


def test_what_cannot_be_started_fails_by_itself(tmp_path: Path) -> None:
    too_long = "echo " + "é" * 70_000  # more bytes than the system takes
    assert Commands([too_long, "echo fine"], tmp_path, gpu=GpuOptions()).run() == Counts(1, 1, 0)
    (failed, _) = table(tmp_path)
    assert (failed["state"], failed["exit_code"]) == ("failed", "126")
    assert "can't be started" in (tmp_path / failed["log"]).read_text()
    (tmp_path / "long.txt").write_text("echo a\x0cb\u2028c\n" + "x" * 200_000)
    with pytest.raises(ListError, match="line 2: a command of 200,000 characters"):
        read_commands(tmp_path / "long.txt")
    (tmp_path / "nul.txt").write_bytes(b"echo a\necho \0\n")
    with pytest.raises(ListError, match="line 2: a command with a NUL"):
        read_commands(tmp_path / "nul.txt")
    (tmp_path / "one.txt").write_text("echo a\x0cb\u2028c\n")
    assert read_commands(tmp_path / "one.txt") == ["echo a\x0cb\u2028c"]
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="--timeout"):
            Commands([], tmp_path, gpu=GpuOptions(), timeout=seconds)


def test_a_full_disk_ends_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    real = shardesd.commands.atomic

    def atomic(path: Path) -> object:
        if full.exists():
            raise NoSpace("no space left")
        return real(path)

    monkeypatch.setattr(shardesd.commands, "atomic", atomic)
    second = tmp_path / "second"  # has started: while the disk is full, it would not
    lines = [
        f"until [ -e {second} ]; do sleep 0.02; done; touch {full}; sleep 1; rm {full}",
        f"touch {second}; until [ -e {full} ]; do sleep 0.05; done; exit 5",
        "echo fine",
    ]
    events: list[object] = []
    work = Commands(lines, tmp_path / "out", gpu=GpuOptions(), workers=2, on_event=events.append)
    assert work.run() == Counts(2, 1, 0)
    assert [row["state"] for row in table(tmp_path / "out")] == ["done", "failed", "done"]
    assert [str(event.message) for event in events if isinstance(event, Notice)] == [
        "no space left; until then no more commands are started"
    ]
    full.touch()
    with pytest.raises(NoSpace):
        Commands(["echo other"], tmp_path / "out", gpu=GpuOptions()).run()


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
