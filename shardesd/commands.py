"""`shardesd run`: any commands, one a line, each started when as many GPUs as it wants are free.

Files: ``OUT/commands.csv`` (a row a command, kept current), ``OUT/logs/0001.log`` … (what each has said, stdout and
stderr as they came), and ``OUT/gpu_metrics.json`` in the end.
"""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from shardesd.batch import Metrics, configuration
from shardesd.engine import Neighbours
from shardesd.errors import ListError, ResultsError
from shardesd.events import JobEnded, JobStarted
from shardesd.options import GpuOptions
from shardesd.records import Notice
from shardesd.results import Lock, atomic, make_folders, remove_leftovers

COLUMNS = ("number", "command", "state", "exit_code", "gpus", "started", "seconds", "log")
KILL_AFTER = 10.0
"""Seconds between asking a command to end and ending it."""
_POLL = 0.05

JobEvent = JobStarted | JobEnded | Notice


@dataclass(slots=True)
class _Running:
    number: int
    process: subprocess.Popen[bytes]
    gpus: tuple[int, ...]
    started: float
    log: Path
    asked: float | None = None
    """When it was asked to end, since it had run for too long."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What has become of all commands."""

    done: int
    failed: int
    left: int
    before: int = field(default=0)
    """Of those done: by earlier runs."""


def read_commands(path: Path) -> list[str]:
    """The commands of a file, one a line; blank lines and lines that begin with ``#`` are none. Raises `ListError`."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ListError(f"can't read the commands {path}: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


class Commands:
    """Runs commands. What an earlier run has done (the same line, exit code 0) is not done again.

    With a `watch` (one that takes nothing by itself) every command gets `per_job` GPUs of its own, as its
    CUDA_VISIBLE_DEVICES; without one, `workers` commands run at once. `timeout` seconds after its start a command is
    asked to end (SIGTERM to it and all that it has started), and ended `KILL_AFTER` seconds later.
    """

    def __init__(
        self,
        commands: list[str],
        out: Path,
        *,
        gpu: GpuOptions,
        workers: int | None = None,
        timeout: float | None = None,
        watch: Neighbours | None = None,
        overwrite: bool = False,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        stop: threading.Event | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._commands, self._out, self._gpu, self._workers = commands, out, gpu, workers
        self._timeout, self._watch, self._overwrite, self._emit = timeout, watch, overwrite, on_event
        self._stop = stop or threading.Event()
        self._environment = environment
        self._rows: dict[int, dict[str, str]] = {}
        self._running: list[_Running] = []
        self._metrics = Metrics()
        self._reread = threading.Event()

    def run(self) -> Counts:
        """Runs what is left; gives what has become of all. Once `stop` is set, no more are started.

        Raises `ResultsError` where the folder can't be written or another process runs commands into it.
        """
        make_folders([self._out, self._out / "logs"])
        lock = Lock(self._out / ".run.lock")
        lock.acquire(0, lambda holder: f"{holder} is running commands into {self._out}; wait, or choose another --out")
        try:
            remove_leftovers([self._table])
            left = self._left()
            before = len(self._commands) - len(left)
            if (self._out / "gpu_config.json").exists():
                self._reread.set()
            while self._running or (left and not self._stop.is_set()):
                if self._reread.is_set():
                    self._configure()
                while left and not self._stop.is_set() and self._start(left[0]):
                    left.pop(0)
                self._look()
                time.sleep(_POLL)
            self._metrics.write(self._out, self._watch)
        finally:
            self.kill()
            lock.release()
        states = Counter(row["state"] for row in self._rows.values())
        return Counts(states["done"], states.total() - states["done"], len(left), before)

    def reconfigure(self) -> None:
        """Reads ``OUT/gpu_config.json`` again, at the next look. Safe to call from anywhere."""
        self._reread.set()

    def kill(self) -> None:
        """Ends all commands that run, and what they have started, at once."""
        for running in self._running:
            _signal(running.process, signal.SIGKILL)

    @property
    def _table(self) -> Path:
        return self._out / "commands.csv"

    def _left(self) -> list[int]:
        """Numbers of the commands that no earlier run has done."""
        done: Counter[str] = Counter()
        rows: dict[str, list[dict[str, str]]] = {}
        with suppress(FileNotFoundError):
            try:
                with open(self._table, newline="", encoding="utf-8") as file:
                    for row in csv.DictReader(file, restval=""):
                        if row.get("state") == "done" and not self._overwrite:
                            rows.setdefault(row["command"], []).append(row)
            except (UnicodeDecodeError, csv.Error, KeyError) as error:
                raise ResultsError(f"can't read {self._table}: {error}; move it away") from error
        left = []
        for number, command in enumerate(self._commands, start=1):
            known = rows.get(command, [])
            if done[command] < len(known):
                self._rows[number] = {**known[done[command]], "number": str(number)}
                done[command] += 1
            else:
                left.append(number)
        return left

    def _start(self, number: int) -> bool:
        """Starts a command if it may start now."""
        gpus: tuple[int, ...] = ()
        limit = self._workers or (len(self._commands) if self._watch else 1)
        if len(self._running) >= limit:
            return False
        if self._watch is not None:
            gpus = self._watch.take(self._gpu.per_job)
            if not gpus:
                return False
        command = self._commands[number - 1]
        log = self._out / "logs" / f"{number:04}.log"
        environment = dict(self._environment)
        words = tuple(self._watch.word(index) for index in gpus) if self._watch else ()
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(words)
            environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to act on, and a command goes with all that it has started
            )
        self._running.append(_Running(number, process, gpus, time.monotonic(), log))
        self._rows[number] = {
            "number": str(number),
            "command": command,
            "state": "running",
            "exit_code": "",
            "gpus": " ".join(words),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seconds": "",
            "log": log.relative_to(self._out).as_posix(),
        }
        self._write()
        self._emit(JobStarted(number=number, command=command, gpus=words, pid=process.pid))
        return True

    def _look(self) -> None:
        now = time.monotonic()
        for running in list(self._running):
            if running.process.poll() is not None:
                self._end(running, now - running.started)
            elif self._timeout is not None and now - running.started > self._timeout:
                if running.asked is None:
                    running.asked = now
                    _signal(running.process, signal.SIGTERM)
                elif now - running.asked > KILL_AFTER:
                    _signal(running.process, signal.SIGKILL)

    def _end(self, running: _Running, seconds: float) -> None:
        self._running.remove(running)
        _signal(running.process, signal.SIGKILL)  # what it may have left behind holds the GPU
        code = running.process.returncode
        ended = JobEnded(
            number=running.number,
            command=self._commands[running.number - 1],
            state="timeout" if running.asked else "done" if code == 0 else "killed" if code < 0 else "failed",
            exit_code=code,
            seconds=round(seconds, 3),
            log=str(running.log),
        )
        for index in running.gpus:
            self._metrics.busy(f"cuda:{index}", seconds)
            if self._watch is not None:
                self._watch.leave(index)
        self._metrics.job(failed=ended.state != "done")
        changed = {"state": ended.state, "exit_code": str(code), "seconds": str(ended.seconds)}
        self._rows[running.number] |= changed
        self._write()
        self._emit(ended)

    def _configure(self) -> None:
        self._reread.clear()
        try:
            found = configuration(self._out, self._gpu, self._workers)
        except ValueError as error:
            self._emit(Notice(message=f"gpu_config.json is left aside: {error}"))
            return
        if found is not None:
            self._gpu, self._workers, says = found
            if self._watch is not None:
                self._watch.set_options(self._gpu)
            self._emit(Notice(message=f"gpu_config.json: {says}"))

    def _write(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for _, row in sorted(self._rows.items()))
        with atomic(self._table) as file:
            file.write(text.getvalue().encode())


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
