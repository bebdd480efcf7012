"""The next model's first shard, downloaded while the current model is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

from shardesd.batch.model import ListRow
from shardesd.checkpoint import open_checkpoint
from shardesd.errors import ShardesdError
from shardesd.options import ScanOptions
from shardesd.source import Fetcher, open_source
from shardesd.wanted import wanted_beforehand


class Ahead:
    """Fetches one model's beginning at a time; what goes wrong is left for the model's own scan to meet.

    Nothing is fetched that the scan would not download whole: what it reads by ranges, or needs nothing of since its
    λ are kept. Nor is anything with ``--evict`` or ``--max-disk``, which count shards of one scan, by that scan.
    """

    def __init__(self, scan: ScanOptions) -> None:
        self._scan = scan
        self._allowed = scan.fetch != "ranges" and not scan.evict and scan.max_disk is None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fetcher: Fetcher | None = None
        self._last: ListRow | None = None
        self._closed = False

    def fetch(self, row: ListRow, devices: Iterable[str]) -> None:
        """Begins in a thread, unless one is busy or this model has been fetched already. Returns at once.

        `devices` are those that the scan would have now.
        """
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if not self._allowed or self._closed or busy or row is self._last:
                return
            self._last = row
            what = (row, tuple(devices))
            self._thread = threading.Thread(target=self._run, args=what, name="shardesd-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends a download that is under way."""
        with self._lock:
            self._closed = True
            fetcher = self._fetcher
        if fetcher is not None:
            fetcher.__exit__(None, None, None)

    def _run(self, row: ListRow, devices: Iterable[str]) -> None:
        with suppress(ShardesdError):
            checkpoint = open_checkpoint(
                open_source(row.model, revision=row.revision), io=self._scan.io, allow_pickle=self._scan.allow_pickle
            )
            wanted = wanted_beforehand(checkpoint, self._scan, devices)
            first = checkpoint.shards[:1]
            with Fetcher(checkpoint.source, first, lambda event: None, wanted.would_be_whole) as fetcher:
                with self._lock:
                    self._fetcher = fetcher
                    if self._closed:
                        return
                for _ in fetcher:
                    pass
