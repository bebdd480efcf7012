"""Who works on which model, told through files alone, for any number of processes on any number of hosts.

A claim is the file ``claims/STEM.claim``, which only one process can create. Its owner counts up a number in it every
`BEAT` seconds. Whoever wants the model watches that number and measures by its own stopwatch how long it has stood
still: no clock is ever compared with another's. A claim that has stood still for `STILL` seconds is dead, as is at
once one whose process, on this same host, is no more.

A dead claim is taken over by whoever can create ``STEM.HIS-ID.taken``, looks once more whether the claim is still that
one, and replaces it. An owner that was only asleep finds another's claim when it wakes up, and leaves the model alone;
until then the lock that every model's results have keeps the two apart.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardesd.results import named_errors

BEAT = 5.0
"""Seconds between two signs of life."""
STILL = 90.0
"""Seconds without one that make a claim dead: more than network filesystems keep what they have read."""
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class _Seen:
    content: bytes
    since: float


class Claim:
    """This process's hold on one model. `lost` is set when another process has it instead."""

    def __init__(self, path: Path, handle: int, me: dict[str, Any]) -> None:
        self.path = path
        self.lost = threading.Event()
        self._handle = handle
        self._me = me
        self._count = 0

    def beat(self) -> None:
        """A sign of life, and a look whether the claim is still this process's."""
        if self.lost.is_set():
            return
        self._count += 1
        try:
            # In place: should another have taken over, this goes to a file that has no name any more.
            os.pwrite(self._handle, _count(self._count), 0)
            os.fsync(self._handle)
            mine = _read(self.path)[_DIGITS:] == _owner(self._me)
        except OSError:
            return  # a filesystem that is away for a moment takes nobody's claim
        if not mine:
            self.lost.set()

    def release(self) -> None:
        with suppress(OSError):
            if _read(self.path)[_DIGITS:] == _owner(self._me):
                self.path.unlink()
        with suppress(OSError):
            os.close(self._handle)


class Claims:
    """The claims on the models of one output folder. `start` lets this process's own beat until `close`."""

    def __init__(
        self,
        out: Path,
        *,
        beat: float = BEAT,
        still: float = STILL,
        clock: Callable[[], float] = time.monotonic,
        place: str | None = None,
    ) -> None:
        self.folder = out / "claims"
        self._beat, self._still, self._clock = beat, still, clock
        self._place = _this_place() if place is None else place
        self._held: list[Claim] = []
        self._seen: dict[str, _Seen] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Claims:
        with named_errors(self.folder / "x"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._live, name="shardesd-claims", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with self._lock:
            held, self._held = self._held, []
        for claim in held:
            claim.release()
        with suppress(OSError):
            for path in self.folder.glob("*.claim"):  # of processes that were killed after their last model
                if (left := self.take(path.stem)) is not None:
                    self.release(left)
            if not any(self.folder.glob("*.claim")):  # nobody is at work: what is left was a killed process's
                for path in self.folder.iterdir():
                    if path.suffix != ".claim":  # of a process that begins just now
                        path.unlink(missing_ok=True)
                self.folder.rmdir()

    def take(self, stem: str) -> Claim | None:
        """A claim on a model; None where another process has it. Takes over a claim whose process is dead."""
        path = self.folder / f"{stem}.claim"
        claim = self._create(path)
        if claim is None and (dead := self._dead(stem, path)) is not None:
            claim = self._take_over(path, dead)
        if claim is not None:
            self._seen.pop(stem, None)
            with self._lock:
                self._held.append(claim)
        return claim

    def release(self, claim: Claim) -> None:
        with self._lock:
            if claim in self._held:
                self._held.remove(claim)
        claim.release()

    def taken(self, stem: str) -> bool:
        """Whether anybody has a claim on a model, dead or alive."""
        return (self.folder / f"{stem}.claim").exists()

    def _live(self) -> None:
        while not self._closed.wait(self._beat):
            with self._lock:
                held = list(self._held)
            for claim in held:
                claim.beat()

    def _me(self) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "place": self._place,
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "host": platform.node(),
        }

    def _create(self, path: Path, *, replacing: bool = False) -> Claim | None:
        """A claim of this process: a new file, or `replacing` the one that is there; None where there is one.

        It appears with its content: of one that a killed process has left empty nobody could tell whose it is.
        """
        me = self._me()
        fresh = path.with_name(f".{path.name}.{me['id']}.tmp")
        with named_errors(path):
            try:
                handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)  # another process was the last to leave
                return self._create(path, replacing=replacing)
            try:
                os.write(handle, _count(0) + _owner(me))
                os.fsync(handle)
                if replacing:
                    os.replace(fresh, path)
                    made = True
                else:
                    made = _appears(fresh, path)
            except FileNotFoundError:  # the last to leave has removed it
                os.close(handle)
                if replacing:
                    raise
                return self._create(path)
        if not made:
            os.close(handle)
            return None
        return Claim(path, handle, me)

    def _dead(self, stem: str, path: Path) -> bytes | None:
        """What stands in a claim that is dead; None where it is alive, or has been let go of."""
        try:
            content = _read(path)
        except OSError:
            self._seen.pop(stem, None)
            return None
        seen = self._seen.get(stem)
        if seen is None or seen.content != content:
            seen = self._seen[stem] = _Seen(content, self._clock())
        dead = self._gone(_parsed(content)) or self._clock() - seen.since >= self._still
        return content if dead else None

    def _gone(self, owner: dict[str, Any]) -> bool:
        """Whether an owner ran on this host and does no more."""
        if owner.get("place") != self._place or not isinstance(owner.get("pid"), int):
            return False
        return not psutil.pid_exists(owner["pid"]) or _start_of(owner["pid"]) != owner.get("started")

    def _take_over(self, path: Path, dead: bytes) -> Claim | None:
        who = _parsed(dead).get("id", "unreadable")
        marker = path.with_name(f"{path.stem}.{who}.taken")
        taking = self._create(marker)
        if taking is None:
            if self._dead(marker.name, marker) is not None:  # who took it over died on the way
                with suppress(OSError):
                    marker.unlink()
            return None
        try:
            if _read(path) != dead:
                return None
            return self._create(path, replacing=True)
        except OSError:
            return None
        finally:
            taking.release()


def _appears(fresh: Path, path: Path) -> bool:
    """Gives a file its name; False where there is one of that name."""
    try:
        os.link(fresh, path)
    except FileNotFoundError:
        raise
    except FileExistsError:
        return os.stat(fresh).st_nlink > 1  # a network's answer that it was done can get lost
    except OSError:  # a filesystem without links
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        os.replace(fresh, path)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return True


def _count(number: int) -> bytes:
    return b"%0*d" % (_DIGITS, number)


def _owner(me: dict[str, Any]) -> bytes:
    return b"\n" + json.dumps(me).encode() + b"\n"


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content[_DIGITS:])
    except ValueError:
        return {}  # without links, its owner died, or is yet, between creating and filling it
    return owner if isinstance(owner, dict) else {}


def _start_of(pid: int) -> float | None:
    """When a process began, by the kernel's own count: pids are used again."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return float(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        with suppress(psutil.Error):
            return psutil.Process(pid).create_time()
        return None


def _this_place() -> str:
    """What tells this host and this container from all others, so that pids mean the same."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
