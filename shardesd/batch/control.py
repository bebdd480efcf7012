"""What can be said to a running batch (``gpu_config.json``), and what it says in the end (``gpu_metrics.json``)."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from shardesd.engine import Neighbours
from shardesd.errors import OptionError
from shardesd.options import BatchOptions, GpuOptions
from shardesd.results import atomic, remove_leftovers

CONFIG = "gpu_config.json"
METRICS = "gpu_metrics.json"
_KEPT = 20
"""Processes whose metrics are kept."""


def read_config(out: Path, options: BatchOptions) -> tuple[BatchOptions, str] | None:
    """`options` with what ``OUT/gpu_config.json`` says, and that in words; None where there is no such file.

    Raises `ValueError` where it says something else than `configuration` knows.
    """
    found = configuration(out, options.gpu, options.workers)
    return found and (replace(options, gpu=found[0], workers=found[1] or options.workers), found[2])


def configuration(out: Path, gpu: GpuOptions, workers: int | None) -> tuple[GpuOptions, int | None, str] | None:
    """GPU options and workers as ``OUT/gpu_config.json`` changes them, and that in words; None without such a file.

    Its keys: ``gpus`` (a list of numbers; null: all), ``max_gpus``, ``gpus_per_job``, ``gpu_mem_threshold`` (MB),
    ``max_checks``, ``workers``. Raises `ValueError` where it says something else.
    """
    try:
        found = json.loads((out / CONFIG).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"it can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    says = ", ".join(f"{name} {json.dumps(value)}" for name, value in found.items()) or "nothing"
    return (*_configured(found, gpu, workers), says)


def _configured(found: Mapping[str, Any], gpu: GpuOptions, workers: int | None) -> tuple[GpuOptions, int | None]:
    fields = {
        "gpus": ("gpus", list),
        "max_gpus": ("max_gpus", int),
        "gpus_per_job": ("per_job", int),
        "gpu_mem_threshold": ("mem_threshold", (int, float)),
        "max_checks": ("max_checks", int),
        "workers": ("workers", int),
    }
    changes: dict[str, Any] = {}
    for name, value in found.items():
        if name not in fields:
            raise ValueError(f"'{name}' is unknown (expected one of: {', '.join(fields)})")
        field, kind = fields[name]
        if value is None and name in ("gpus", "max_gpus"):
            changes[field] = () if name == "gpus" else None
            continue
        numbers = value if isinstance(value, list) else [value]
        right = isinstance(value, kind) and all(  # type: ignore[arg-type]
            isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
        )
        if not right or (name == "gpus" and not all(isinstance(number, int) for number in numbers)):
            raise ValueError(f"'{name}' is {json.dumps(value)}")
        changes[field] = tuple(value) if name == "gpus" else value
    wanted = changes.pop("workers", workers)
    if wanted is not None and wanted < 1:
        raise ValueError(f"'workers' is {wanted}")
    try:
        return replace(gpu, **changes), wanted
    except OptionError as error:
        raise ValueError(str(error)) from error


class Metrics:
    """Counts what becomes of jobs, and how long each device works."""

    def __init__(self) -> None:
        self._started_at = datetime.now(timezone.utc)
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._busy: dict[str, float] = defaultdict(float)
        self._tasks: dict[str, int] = defaultdict(int)
        self._jobs = {"successes": 0, "failures": 0}

    def busy(self, device: str, seconds: float) -> None:
        """A device has worked for so long on one task."""
        with self._lock:
            self._busy[device] += seconds
            self._tasks[device] += 1

    def job(self, *, failed: bool) -> None:
        """A job has ended."""
        with self._lock:
            self._jobs["failures" if failed else "successes"] += 1

    def summary(self, watch: Neighbours | None) -> dict[str, Any]:
        """One process's part of gpu_metrics.json."""
        with self._lock:
            devices: dict[str, dict[str, Any]] = {
                name: {"busy_seconds": round(seconds, 3), "tasks": self._tasks[name]}
                for name, seconds in sorted(self._busy.items())
            }
            for use in watch.use() if watch else ():
                known = {"busy_seconds": 0.0, "tasks": 0, **devices.get(use.name, {})}
                devices[use.name] = known | {key: value for key, value in asdict(use).items() if key != "name"}
            return {
                "host": platform.node(),
                "pid": os.getpid(),
                "started_at": self._started_at.isoformat(timespec="seconds"),
                "runtime_seconds": round(time.monotonic() - self._started, 3),
                "jobs": sum(self._jobs.values()),
                **self._jobs,
                "devices": devices,
            }

    def write(self, out: Path, watch: Neighbours | None) -> list[Path]:
        """Adds this process to ``OUT/gpu_metrics.json``, where it has done anything; gives the path."""
        mine = self.summary(watch)
        if not mine["jobs"] and not mine["devices"]:
            return []
        path = out / METRICS
        before: list[Any] = []
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = list(json.loads(path.read_bytes())["processes"])
        remove_leftovers([path])
        with atomic(path) as file:
            file.write(json.dumps({"processes": [*before, mine][-_KEPT:]}, indent=1).encode() + b"\n")
        return [path]
