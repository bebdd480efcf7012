"""Shards in order, the next one downloading while the current one is worked on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from shardesd.events import Fetching
from shardesd.records import ShardRef
from shardesd.source.base import Source

# How long a shard is held back until the next one's bytes begin to come.
_BEGIN_SECONDS = 0.5
# How long closing waits for a download to notice that it is no longer wanted.
_GRACE_SECONDS = 1.0


class _Unwanted(BaseException):
    """Raised inside a download to end it. Not an `Exception`, so that nobody takes it for a failure and retries."""


class _Download:
    """One shard's download in a thread of its own, which never keeps the interpreter from exiting."""

    def __init__(
        self, source: Source, shard: ShardRef, on_fetch: Callable[[Fetching], None], whole: Callable[[ShardRef], bool]
    ) -> None:
        self._source = source
        self._whole = whole
        self._shard = shard
        self._on_fetch = on_fetch
        self._unwanted = threading.Event()
        self.begun = threading.Event()
        """Set once the first bytes are here, or there will be none."""
        self._path: Future[Path | None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"fetch {shard.name}", daemon=True)
        self._thread.start()

    def result(self) -> Path | None:
        return self._path.result()

    def stop(self) -> None:
        self._unwanted.set()
        self._thread.join(_GRACE_SECONDS)

    def _run(self) -> None:
        try:
            whole = self._whole(self._shard)
            self._path.set_result(self._source.path(self._shard.name, self._progress) if whole else None)
        except _Unwanted:
            self._path.set_exception(RuntimeError(f"the download of {self._shard.name} was ended by closing"))
        except BaseException as error:
            self._path.set_exception(error)
        finally:
            self.begun.set()

    def _progress(self, done: int, total: int | None) -> None:
        if self._unwanted.is_set():
            raise _Unwanted
        if done:
            self.begun.set()
        self._on_fetch(Fetching(shard=self._shard.name, done=done, total=total))


class Fetcher:
    """Hands out shards with their local paths, in order, and downloads one ahead. A context manager; iterate it once.

    At most two shards that are not local are under way at any moment, downloading or handed out and not yet `done`:
    the next one starts downloading when the one before it is handed out, and is held back until the one before that is
    done. What is local starts no download. A download's error is raised when its shard's turn comes. `on_fetch` is
    called from the downloading thread. Leaving the context ends what is under way.

    `whole` is asked, in that thread, whether a shard is to be downloaded at all; where it says no, the shard is handed
    out in its turn without a path, and counts as under way until it is done.
    """

    def __init__(
        self,
        source: Source,
        shards: Sequence[ShardRef],
        on_fetch: Callable[[Fetching], None],
        whole: Callable[[ShardRef], bool] = lambda shard: True,
    ) -> None:
        self._whole = whole
        self._source = source
        self._shards = tuple(shards)
        self._on_fetch = on_fetch
        self._changed = threading.Condition()
        self._downloads: dict[str, _Download] = {}
        self._handed = 0
        self._finished: set[str] = set()
        self._closed = False

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            downloads = list(self._downloads.values())
        for download in downloads:
            download.stop()

    def __iter__(self) -> Iterator[tuple[ShardRef, Path | None]]:
        for number, shard in enumerate(self._shards):
            path = self._source.local(shard.name)
            with self._changed:
                # What is under way here is not handed out because another scan has brought it: if it were worked
                # off and removed first, the download would bring it once more, for nobody to remove.
                if path is None or shard.name in self._downloads:
                    self._changed.wait_for(lambda: self._closed or self._begin_next())
                    if self._closed:
                        return
                    # Another scan has brought it meanwhile, and may remove it again: for this one to decide anew.
                    download = self._downloads.get(shard.name) or self._begin(shard)
                else:
                    download = None
                    self._handed = number + 1  # none begins from here on
            if download is not None:
                path = download.result()
            with self._changed:
                self._downloads.pop(shard.name, None)
                self._handed = number + 1
                self._begin_next()
                ahead = list(self._downloads.values())
            for download in ahead:
                # So that a small shard isn't worked off before the next one has been asked for.
                download.begun.wait(_BEGIN_SECONDS)
            yield shard, path

    def done(self, name: str) -> bool:
        """Say that a shard which was handed out is worked off. True the first time."""
        with self._changed:
            if name in self._finished:
                return False
            self._finished.add(name)
            self._begin_next()
            self._changed.notify_all()
            return True

    def _begin_next(self) -> bool:
        """Lets the shard after those handed out start downloading, if it may; whether it is under way or local."""
        if self._closed or self._handed == len(self._shards) or self._handed - len(self._finished) > 1:
            return False
        shard = self._shards[self._handed]
        if shard.name not in self._downloads and self._source.local(shard.name) is None:
            self._begin(shard)
        return True

    def _begin(self, shard: ShardRef) -> _Download:
        download = self._downloads[shard.name] = _Download(self._source, shard, self._on_fetch, self._whole)
        return download
