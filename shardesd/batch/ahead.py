"""The next model's first shard, downloaded while the current model is computed."""

from __future__ import annotations

import threading
from contextlib import suppress

from shardesd.batch.model import ListRow
from shardesd.checkpoint import open_checkpoint
from shardesd.errors import ShardesdError
from shardesd.options import ScanOptions
from shardesd.source import Fetcher, open_source


class Ahead:
    """Fetches one model's beginning at a time; what goes wrong is left for the model's own scan to meet."""

    def __init__(self, scan: ScanOptions) -> None:
        self._scan = scan
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fetcher: Fetcher | None = None
        self._last: ListRow | None = None
        self._closed = False

    def fetch(self, row: ListRow) -> None:
        """Begins in a thread, unless one is busy or this model has been fetched already. Returns at once."""
        with self._lock:
            if self._closed or row is self._last or (self._thread is not None and self._thread.is_alive()):
                return
            self._last = row
            self._thread = threading.Thread(target=self._run, args=(row,), name="shardesd-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends a download that is under way."""
        with self._lock:
            self._closed = True
            fetcher = self._fetcher
        if fetcher is not None:
            fetcher.__exit__(None, None, None)

    def _run(self, row: ListRow) -> None:
        with suppress(ShardesdError):
            checkpoint = open_checkpoint(
                open_source(row.model, revision=row.revision), io=self._scan.io, allow_pickle=self._scan.allow_pickle
            )
            with Fetcher(checkpoint.source, checkpoint.shards[:1], lambda event: None) as fetcher:
                with self._lock:
                    self._fetcher = fetcher
                    if self._closed:
                        return
                for _ in fetcher:
                    pass
