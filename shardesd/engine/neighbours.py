"""Which GPUs may be used on a machine that others use too: watched through NVML, taken when free, left when not.

A GPU counts as free after `GpuOptions.max_checks` checks in a row in which others hold less than the threshold on it.
One that is ours is given up when others come to hold as much, and has to become free again like any other. A lock
beside the system's temporary files keeps two processes of shardesd from taking one GPU at the same moment.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from shardesd.events import GpuChanged, GpuState
from shardesd.options import GpuOptions

_MB = 1_000_000
_CONTEXT = 1_000_000_000
"""What a driver's context takes on a GPU at the most."""


@dataclass(frozen=True, slots=True)
class Visible:
    """One GPU that this process may see."""

    index: int
    """As CUDA counts in this process: ``cuda:0`` is 0."""
    handle: Any
    """NVML's."""
    uuid: str
    word: str
    """What CUDA_VISIBLE_DEVICES calls it for a process that is started from here."""


@dataclass(slots=True)
class _Gpu:
    visible: Visible
    state: GpuState = "waiting"
    quiet: int = 0
    """Checks in a row in which it was free."""
    errors: int = 0
    touched: bool = False
    """This process has used it, or is about to, and so holds at least a driver's context on it."""
    context: int | None = None
    """Bytes that our own driver context is taken to hold on it, where the driver doesn't tell whose memory is whose."""
    lock: filelock.BaseFileLock | None = None
    since: float = 0.0
    waited: float = 0.0
    held: float = 0.0
    left: int = 0
    """How often it was given up to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What became of one GPU, for gpu_metrics.json."""

    name: str
    uuid: str
    wait_seconds: float
    held_seconds: float
    left: int


def visible_gpus(nvml: Any, environment: Mapping[str, str] = os.environ) -> list[Visible]:
    """The GPUs that CUDA shows to a process with this environment, in CUDA's order.

    CUDA_VISIBLE_DEVICES may hold numbers, ``GPU-…`` UUIDs or beginnings of them, and ``MIG-…``; as for CUDA, the first
    one that is invalid ends the list. Numbers are taken in the order of the PCI bus. Raises NVML's errors.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    if wanted is None:
        return [Visible(i, handles[i], uuids[i], str(i)) for i in range(count)]
    found: list[Visible] = []
    for word in (part.strip() for part in wanted.split(",")):
        if re.fullmatch(r"\d+", word) and int(word) < count:
            handle, uuid = handles[int(word)], uuids[int(word)]
        elif word.startswith("MIG-"):
            try:
                handle, uuid = nvml.nvmlDeviceGetHandleByUUID(word), word
            except nvml.NVMLError:
                break
        else:
            matching = [i for i in range(count) if word.startswith("GPU-") and uuids[i].startswith(word)]
            if len(matching) != 1:
                break
            handle, uuid = handles[matching[0]], uuids[matching[0]]
        if any(uuid == other.uuid for other in found):
            break
        found.append(Visible(len(found), handle, uuid, word))
    return found


class Neighbours:
    """Watches GPUs; `ours` are those that may be used now. `check` looks once, `start` goes on looking.

    `own` gives the bytes that this process itself has allocated on a GPU, by its CUDA number; None where it has not
    used that GPU at all, and so not even a driver's context is there.
    """

    def __init__(
        self,
        nvml: Any,
        gpus: list[Visible],
        options: GpuOptions,
        *,
        on_change: Callable[[GpuChanged], None] = lambda change: None,
        own: Callable[[int], int | None] = lambda index: None,
        clock: Callable[[], float] = time.monotonic,
        locks: Path | None = None,
        auto_take: bool = True,
    ) -> None:
        """With `auto_take` every GPU that becomes free is ours at once, and given up when others come.

        Without it, `take` and `leave` say which are ours, and what happens on them meanwhile is not looked at: a
        command that runs can't be moved elsewhere.
        """
        self.options = options
        self._nvml, self._on_change, self._own, self._clock = nvml, on_change, own, clock
        self._locks = Path(tempfile.gettempdir()) if locks is None else locks
        self._auto = auto_take
        now = clock()
        self._gpus = {gpu.index: _Gpu(gpu, since=now) for gpu in gpus}
        self._lock = threading.RLock()
        self._untold: deque[GpuChanged] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition(self._lock)

    @property
    def ours(self) -> tuple[int, ...]:
        """CUDA numbers of the GPUs that are ours now."""
        with self._lock:
            return tuple(index for index, gpu in self._gpus.items() if gpu.state == "ours")

    @property
    def free(self) -> tuple[int, ...]:
        """Those that may be taken."""
        with self._lock:
            return tuple(index for index, gpu in self._gpus.items() if gpu.state == "free" and self._may(index))

    def word(self, index: int) -> str:
        """What CUDA_VISIBLE_DEVICES calls a GPU for a process started from here."""
        return self._gpus[index].visible.word

    def start(self) -> Neighbours:
        """Checks every `check_every` seconds, in a thread, until `close`."""
        self._thread = threading.Thread(target=self._watch, name="shardesd-gpus", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)
        with self._lock:
            for gpu in self._gpus.values():
                self._unlock(gpu)

    def set_options(self, options: GpuOptions) -> None:
        """Other rules from the next check on."""
        with self._lock:
            self.options = options

    def check(self) -> None:
        """Looks at every GPU once."""
        with self._lock:
            for gpu in self._gpus.values():
                self._check(gpu)
            self.changed.notify_all()
        self._tell()

    def take(self, count: int) -> tuple[int, ...]:
        """So many free GPUs, ours from now on; none where there aren't enough."""
        chosen = self._chosen(count)
        self._tell()
        return chosen

    def _chosen(self, count: int) -> tuple[int, ...]:
        with self._lock:
            allowed = (self.options.max_gpus or len(self._gpus)) - self._held()
            free = self.free if count <= allowed else ()
            if len(free) < count:
                return ()
            chosen: list[int] = []
            for index in free:
                if len(chosen) < count and self._take(self._gpus[index]):
                    chosen.append(index)
            if len(chosen) < count:
                for index in chosen:
                    self._leave(index)
                return ()
            return tuple(chosen)

    def leave(self, index: int) -> None:
        """A GPU is no longer needed. It has to prove free again, since what ran on it may still be ending."""
        with self._lock:
            self._leave(index)
            self.changed.notify_all()
        self._tell()

    def _leave(self, index: int) -> None:
        gpu = self._gpus[index]
        if gpu.state == "ours":
            self._set(gpu, "waiting")
            gpu.quiet = 0

    def use(self) -> list[GpuUse]:
        """How long each GPU was waited for and held so far."""
        with self._lock:
            for gpu in self._gpus.values():
                self._account(gpu)
            return [
                GpuUse(
                    name=f"cuda:{index}",
                    uuid=gpu.visible.uuid,
                    wait_seconds=round(gpu.waited, 3),
                    held_seconds=round(gpu.held, 3),
                    left=gpu.left,
                )
                for index, gpu in self._gpus.items()
            ]

    def _watch(self) -> None:
        while True:
            self.check()
            if self._closed.wait(max(0.01, self.options.check_every)):
                return

    def _check(self, gpu: _Gpu) -> None:
        index = gpu.visible.index
        if gpu.state == "ours" and not self._auto:
            return
        try:
            others = self._others(gpu)
        except self._nvml.NVMLError as error:
            gpu.errors += 1
            gpu.quiet = 0
            # One failed question says little of a GPU that works for us; a row of them does.
            if gpu.state != "ours" or gpu.errors >= self.options.max_checks:
                self._set(gpu, "gone", why=str(error))
            return
        gpu.errors = 0
        busy = others >= self.options.mem_threshold * _MB
        gpu.quiet = 0 if busy else gpu.quiet + 1
        if gpu.state == "ours":
            if busy:
                gpu.left += 1
                self._set(gpu, "busy", others)
            elif not self._listed(index) or self._held() > (self.options.max_gpus or len(self._gpus)):
                self._set(gpu, "waiting", others)  # the options have changed
            return
        if busy:
            self._set(gpu, "busy", others)
        elif gpu.quiet < self.options.max_checks:
            self._set(gpu, "waiting", others)
        else:
            self._set(gpu, "free", others)
            if self._auto and self._may(index):
                self._take(gpu)

    def _others(self, gpu: _Gpu) -> int:
        """Bytes that others hold on a GPU. Raises NVMLError."""
        handle, index = gpu.visible.handle, gpu.visible.index
        before, used, after = self._own(index), self._used(handle), self._own(index)
        gpu.touched |= before is not None or after is not None
        if not gpu.touched:
            return used
        before, after = before or 0, after or 0
        with suppress(self._nvml.NVMLError):
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return max(0, used - int(process.usedGpuMemory))
        # In a container NVML names no process, or by another number: then what torch has not allocated itself, and
        # what the driver's context takes, is others'. The context grows as libraries load their kernels: what comes
        # in smaller steps than a neighbour worth leaving for is taken for that, up to a gigabyte.
        beyond = max(0, used - max(before, after))
        if 0 < before == after:  # else `beyond` tells of what torch has allocated or freed meanwhile
            context = min(beyond, _CONTEXT)
            if gpu.context is None:
                gpu.context = context
            elif beyond - gpu.context < self.options.mem_threshold * _MB:
                gpu.context = max(gpu.context, context)
        return max(0, beyond - (_CONTEXT if gpu.context is None else gpu.context))

    def _used(self, handle: Any) -> int:
        """Bytes in use, without what the driver reserves for itself: half a gigabyte, which the call's first version
        counts as used on a GPU that nobody uses."""
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2).used)
        except self._nvml.NVMLError:  # an old driver
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)

    def _listed(self, index: int) -> bool:
        return not self.options.gpus or index in self.options.gpus

    def _may(self, index: int) -> bool:
        """Whether the options allow one more, and this one."""
        return self._listed(index) and self._held() < (self.options.max_gpus or len(self._gpus))

    def _held(self) -> int:
        return sum(gpu.state == "ours" for gpu in self._gpus.values())

    def _take(self, gpu: _Gpu) -> bool:
        lock = filelock.FileLock(
            str(self._locks / f"shardesd-{gpu.visible.uuid}.lock"), thread_local=False, mode=0o666, timeout=0
        )
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            self._set(gpu, "busy", why="another shardesd has it")
            gpu.quiet = 0
            return False
        except OSError:
            pass  # another user's lock file: the memory tells who is there
        gpu.lock, gpu.touched = lock, self._auto
        self._set(gpu, "ours")
        return True

    def _set(self, gpu: _Gpu, state: GpuState, others: int | None = None, why: str = "") -> None:
        if gpu.state == state:
            return
        self._account(gpu)
        if gpu.state == "ours":
            self._unlock(gpu)
        gpu.state = state
        self._untold.append(GpuChanged(gpu=f"cuda:{gpu.visible.index}", state=state, others_bytes=others, why=why))

    def _tell(self) -> None:
        """Never while the lock is held: who is told may wait for a lock of their own, whose holder asks for `ours`."""
        while True:
            try:
                change = self._untold.popleft()
            except IndexError:
                return
            self._on_change(change)

    def _account(self, gpu: _Gpu) -> None:
        now = self._clock()
        if gpu.state == "ours":
            gpu.held += now - gpu.since
        elif gpu.state != "free" and self._listed(gpu.visible.index):
            gpu.waited += now - gpu.since
        gpu.since = now

    def _unlock(self, gpu: _Gpu) -> None:
        if gpu.lock is not None:
            with suppress(OSError):
                gpu.lock.release()
            gpu.lock = None


def load_nvml() -> Any:
    """nvidia-ml-py, initialised. Raises ImportError, or NVMLError where there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
