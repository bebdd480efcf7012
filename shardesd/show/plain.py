"""A scan in plain lines: for logs, pipes and dumb terminals."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardesd.events import Event, Fetching, Notice, RowDone, ScanFinished, ScanStarted, ShardOpened
from shardesd.records import Row
from shardesd.show.alpha import alpha_range
from shardesd.show.live import devices, place
from shardesd.show.progress import View
from shardesd.show.text import clock, count, duration, number, printable, size, size_of

EVERY = 10.0
"""Seconds between two lines of mere progress."""


class PlainLines:
    """Says what a line is to be written for, and which; not safe to call from two threads at once."""

    def __init__(self, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._verbose = verbose
        self._clock = clock
        self._last = clock()
        self._fetching: set[str] = set()
        self._shards = 0

    def lines(self, event: Event, view: Callable[[], View]) -> list[str]:
        """The lines to write for `event`; `view` is asked only where one is due."""
        written: list[str] = []
        match event:
            case ScanStarted():
                self._shards = event.shards
                self._last = self._clock()
                self._fetching.clear()
                written += started_lines(event)
            case Fetching(shard=shard, done=done, total=total) if shard not in self._fetching:
                self._fetching.add(shard)
                if total is None or done < total:
                    written.append(f"downloading {printable(shard)}" + (f" ({size(total)})" if total else ""))
            case ShardOpened():
                written.append(
                    f"shard {event.number}/{max(self._shards, event.number)} {printable(event.shard)} "
                    f"({size(event.nbytes)})"
                )
            case RowDone(row=row) if row.status == "failed":
                written.append(failed_line(row))
            case RowDone(row=row) if self._verbose:
                written.append(skipped_line(row) if row.status == "skipped" else row_line(row))
            case Notice():
                written.append(f"note: {printable(event.message)}")
            case ScanFinished():
                written.append(finished_line(event))
            case _:
                pass
        if not isinstance(event, ScanStarted | ScanFinished) and self._clock() - self._last >= EVERY:
            self._last = self._clock()
            written.append(progress_line(view()))
        return written


def started_lines(event: ScanStarted) -> list[str]:
    commit = f" ({event.commit[:7]})" if event.commit else ""
    bytes_ = f", {size(event.total_bytes)}" if event.total_bytes is not None else ""
    matrices = "" if event.matrices is None else f", {'' if event.exact else 'about '}"
    matrices += "" if event.matrices is None else count(event.matrices, "matrix", "matrices")
    out = f", to {printable(event.out)}" if event.out else ""
    lines = [f"{place(event)}{commit}: {count(event.shards, 'shard')}{bytes_}{matrices}, on {devices(event)}{out}"]
    if event.resumed:
        lines.append(f"continuing after {count(event.resumed, 'row')} of an earlier run")
    return lines


def progress_line(view: View) -> str:
    total = "" if view.matrices is None else f" of {'' if view.exact else 'about '}{view.matrices}"
    pieces = [f"{view.matrices_done}{total} matrices", f"{size_of(view.bytes_done, view.total_bytes)} read"]
    if view.bytes_per_second:
        pieces.append(f"{size(view.bytes_per_second)}/s")
    if view.fetched and view.fetched.active:
        rate = f" at {size(view.fetched.per_second)}/s" if view.fetched.per_second else ""
        pieces.append(f"{size_of(view.fetched_bytes, view.needed_bytes)} fetched{rate}")
    if view.kept:
        pieces.append(f"{view.kept} kept from before")
    if view.failed:
        pieces.append(f"{view.failed} failed")
    if view.eta is not None:
        pieces.append(f"ETA {clock(view.eta)}")
    pieces.append(f"memory {size(view.memory.rss)}, peak {size(view.memory.peak)}")
    return f"  {clock(view.elapsed)}: " + ", ".join(pieces)


def failed_line(row: Row) -> str:
    return f"failed: {printable(row.longname)}: {printable(row.reason)}"


def skipped_line(row: Row) -> str:
    return f"skipped: {printable(row.longname)}: {printable(row.reason)}"


def row_line(row: Row) -> str:
    reading = alpha_range(row.alpha)
    alpha = reading.name if reading.mark == "-" else f"{number(row.alpha, 2, 9)} ({reading.name})"
    seconds = "" if row.seconds is None else f", {duration(row.seconds)}"
    return f"{printable(row.longname)}: {row.M}×{row.N}, alpha {alpha}, D {number(row.D, 3, 9)}{seconds}"


def finished_line(event: ScanFinished) -> str:
    text = f"{'interrupted' if event.interrupted else 'done'}: {count(event.analysed, 'matrix', 'matrices')} analysed"
    if event.failed:
        text += f", {event.failed} failed"
    if skipped := sum(event.skipped.values()):
        text += f", {count(skipped, 'tensor')} skipped"
    text += f" in {duration(event.seconds)}"
    return text + (f", to {printable(event.files[0])}" if event.files else "")
