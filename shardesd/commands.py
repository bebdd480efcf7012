"""`shardesd run`: any commands, one a line, each started when as many GPUs as it wants are free.

Files: ``OUT/commands.csv`` (a row a command, kept current; commands of other lists that have run into OUT come last,
without a number), ``OUT/logs/0001.log`` … (what each has said, stdout and stderr as they came), and
``OUT/gpu_metrics.json`` in the end.

A command's log is locked (flock) through the handle that it and all that it starts inherit: as long as one of them
runs the lock stands, even if the process that started them was killed. So what still runs is not started once more.
"""

from __future__ import annotations

import csv
import fcntl
import io
import math
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
from typing import BinaryIO

from shardesd.batch import Metrics, configuration
from shardesd.engine import Neighbours
from shardesd.errors import ListError, NoSpace, OptionError, ResultsError
from shardesd.events import JobEnded, JobStarted, JobState, Notice
from shardesd.options import GpuOptions
from shardesd.results import Lock, atomic, make_folders, named_errors, remove_leftovers

COLUMNS = ("number", "command", "state", "exit_code", "gpus", "started", "seconds", "log")
KILL_AFTER = 10.0
"""Seconds between asking a command to end and ending it."""
_POLL = 0.05
_LONGEST = 100_000
"""Characters of a command: neither the system nor csv takes much more."""
_CAN_T_START = 126
"""The exit code of a command that the system refuses to start, as a shell would give it."""

JobEvent = JobStarted | JobEnded | Notice


@dataclass(slots=True)
class _Running:
    number: int
    process: subprocess.Popen[bytes]
    gpus: tuple[int, ...]
    started: float
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
    lines = [line.strip() for line in text.split("\n")]
    for number, line in enumerate(lines, start=1):
        if len(line) > _LONGEST:
            raise ListError(f"{path}, line {number}: a command of {len(line):,} characters (at most {_LONGEST:,})")
        if "\0" in line:  # no command can hold one, nor csv on Python 3.10
            raise ListError(f"{path}, line {number}: a command with a NUL character")
    return [line for line in lines if line and not line.startswith("#")]


class Commands:
    """Runs commands. What an earlier run has done (the same line, exit code 0) is not done again; what it has started
    and still runs, since the run itself was killed, is waited for, and then started again.

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
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise OptionError(f"--timeout {timeout} is invalid (expected a finite number above 0)")
        self._stop = stop or threading.Event()
        self._environment = environment
        self._rows: dict[int, dict[str, str]] = {}
        self._before: dict[int, dict[str, str]] = {}
        """What became of the commands that are left in an earlier run, where they were in one."""
        self._others: list[dict[str, str]] = []
        self._trouble: NoSpace | ResultsError | None = None
        """Why the table can't be written just now."""
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
            still = [number for number in left if self._still_runs(number)]
            for number in still:
                self._emit(
                    Notice(message=f"command {number} still runs since an earlier run: it starts when that ends")
                )
            while self._running or (left and not self._stop.is_set()):
                if self._reread.is_set():
                    self._configure()
                still = [number for number in still if self._still_runs(number)]
                ready = [number for number in left if number not in still]
                while ready and not self._trouble and not self._stop.is_set() and self._start(ready[0]):
                    left.remove(ready.pop(0))
                self._look()
                if self._trouble and not self._running:
                    self._write()
                    if self._trouble:
                        raise self._trouble
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
        known: dict[str, list[dict[str, str]]] = {}
        with suppress(FileNotFoundError):
            try:
                with open(self._table, newline="", encoding="utf-8") as file:
                    for row in csv.DictReader(file, restval=""):
                        known.setdefault(row["command"], []).append({name: row[name] for name in COLUMNS})
            except (UnicodeDecodeError, csv.Error, KeyError) as error:
                raise ResultsError(f"can't read {self._table}: {error}; move it away") from error
        for rows in known.values():
            rows.sort(key=lambda row: row["state"] != "done")  # those that are done come first
        left = []
        for number, command in enumerate(self._commands, start=1):
            found = known[command].pop(0) if known.get(command) else None
            if found is not None and found["state"] == "done" and not self._overwrite:
                self._rows[number] = found | {"number": str(number)}
                continue
            left.append(number)
            if found is not None:
                self._before[number] = found
        self._others = [row | {"number": ""} for rows in known.values() for row in rows]
        return left

    def _still_runs(self, number: int) -> bool:
        """Whether a command that an earlier run has started has not ended, though that run has."""
        before = self._before.get(number)
        if before is None or before["state"] != "running":
            return False
        with suppress(OSError), open(self._out / before["log"], "rb") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _log(self, number: int) -> Path:
        """A command's log: the one that it had before, or one that no other command's row names."""
        if before := self._before.get(number, {}).get("log"):
            return self._out / before
        rows = (*self._rows.values(), *self._before.values(), *self._others)
        taken = {row["log"] for row in rows}
        numbers = (number, *range(len(self._commands) + 1, len(self._commands) + len(rows) + 2))
        return self._out / next(name for n in numbers if (name := f"logs/{n:04}.log") not in taken)

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
        log = self._log(number)
        environment = dict(self._environment)
        words = tuple(self._watch.word(index) for index in gpus) if self._watch else ()
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(words)
            environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
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
        self._write()  # before it is: whoever kills us now leaves no command that nobody knows of
        process = None
        try:
            if self._trouble is None:
                with named_errors(log), open(log, "wb") as output:
                    process = self._popen(command, environment, output)
        except (NoSpace, ResultsError) as error:
            self._in_trouble(error)
        if self._trouble is not None:
            del self._rows[number]
            self._leave(gpus)
            return False
        self._before.pop(number, None)
        if process is None:
            self._note_end(number, gpus, "failed", _CAN_T_START, 0.0)
            return True
        self._running.append(_Running(number, process, gpus, time.monotonic()))
        self._emit(JobStarted(number=number, command=command, gpus=words, pid=process.pid))
        return True

    def _popen(self, command: str, environment: Mapping[str, str], output: BinaryIO) -> subprocess.Popen[bytes] | None:
        """The command's process; None where the system refuses to start it, which its log then says."""
        with suppress(OSError):  # a filesystem without locks
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return subprocess.Popen(
                command,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(output.fileno(),),  # the lock, for commands that send their output elsewhere
                start_new_session=True,  # Ctrl-C is ours to act on, and a command goes with all that it has started
            )
        except (OSError, ValueError) as error:
            output.write(f"it can't be started: {error}\n".encode())
            return None

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
        state: JobState = "timeout" if running.asked else "done" if code == 0 else "killed" if code < 0 else "failed"
        self._note_end(running.number, running.gpus, state, code, seconds)

    def _note_end(self, number: int, gpus: tuple[int, ...], state: JobState, code: int, seconds: float) -> None:
        ended = JobEnded(
            number=number,
            command=self._commands[number - 1],
            state=state,
            exit_code=code,
            seconds=round(seconds, 3),
            log=str(self._out / self._rows[number]["log"]),
        )
        for index in gpus:
            self._metrics.busy(f"cuda:{index}", seconds)
        self._leave(gpus)
        self._metrics.job(failed=ended.state != "done")
        changed = {"state": ended.state, "exit_code": str(code), "seconds": str(ended.seconds)}
        self._rows[number] |= changed
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
        rows = {**self._before, **self._rows}
        writer.writerows(row | {"number": str(number)} for number, row in sorted(rows.items()))
        writer.writerows(self._others)
        try:
            with atomic(self._table) as file:
                file.write(text.getvalue().encode())
        except (NoSpace, ResultsError) as error:
            self._in_trouble(error)
        else:
            self._trouble = None

    def _in_trouble(self, error: NoSpace | ResultsError) -> None:
        """Nothing can be written. What runs may have run for days: it goes on, and when it ends it is tried again."""
        if self._trouble is None:
            self._emit(Notice(message=f"{error}; until then no more commands are started"))
        self._trouble = error

    def _leave(self, gpus: tuple[int, ...]) -> None:
        for index in gpus:
            if self._watch is not None:
                self._watch.leave(index)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
