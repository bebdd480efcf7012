"""What the control groups that this process is in grant it: a container's, or those of a batch system's job.

Version 2 has one tree, version 1 one for each kind of limit. A group's limit holds for all below it, so those of its
parents count too. Within a container the path that the kernel tells may lead nowhere: then the tree's root is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Bytes: version 1 says a number near 2⁶³ where there is no limit."""


def cpu_quota() -> float:
    """Cores' worth of time that may be used; infinite where nothing limits it."""
    found = [float("inf")]
    for folder in _groups(""):
        quota = _read(folder / "cpu.max").split()
        if len(quota) == 2 and quota[0].isdigit():
            found.append(int(quota[0]) / int(quota[1]))
    for folder in _groups("cpu"):
        granted, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if granted and period:
            found.append(granted / period)
    return min(found)


def memory_left() -> float:
    """Bytes that may still be had: what only holds files counts as free. Infinite where nothing limits it."""
    found = [float("inf")]
    for kind, names in (
        ("", ("memory.max", "memory.current", "inactive_file", "active_file")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")),
    ):
        for folder in _groups(kind):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
                files = sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in names[2:])
                found.append(max(0, limit - used + files))
    return min(found)


def _groups(kind: str) -> Iterator[Path]:
    """The folders of the process's own group and its parents in the tree of `kind`; of version 2, that of ``""``."""
    for line in _read(_OWN).splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kind not in kinds.split(","):
            continue
        # Version 1's trees are mounted under their kinds' names, alone or as the kernel has them together.
        for root in [_ROOT, _ROOT / "unified"] if not kind else [_ROOT / kinds, _ROOT / kind]:
            own = root / path.strip("/")
            if root.is_dir():
                yield from (folder for folder in (own, *own.parents) if folder == root or root in folder.parents)
                break


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
