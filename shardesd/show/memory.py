"""How much memory this process holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes resident now, and at the most so far."""

    rss: int
    peak: int


class MemoryMeter:
    """Reads the process's memory; the peak is the kernel's own where it keeps one, else the greatest value seen."""

    def __init__(self) -> None:
        self._seen = 0

    def read(self) -> Memory:
        try:
            with open("/proc/self/status", encoding="ascii", errors="replace") as file:
                words = dict(line.split(":", 1) for line in file)
            rss, peak = (int(words[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        except (OSError, KeyError, ValueError):
            # Imported late: 25 ms that Linux needn't spend.
            import psutil

            rss = peak = psutil.Process().memory_info().rss
        self._seen = max(self._seen, rss, peak)
        return Memory(rss, self._seen)
