"""Which bytes of a shard a scan needs, how they come (the whole file into the Hub cache, or ranges into memory), and
when a downloaded file goes again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardesd import matrices, ties
from shardesd.cachefolder import users_folder
from shardesd.checkpoint import Checkpoint, RangedShard, Shard, open_local
from shardesd.errors import NoRanges, NoSpace, SourceError
from shardesd.events import Event, Fetching, Notice
from shardesd.keep import Keep, Recall
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, ShardRef, Skip, TensorRef, is_done
from shardesd.source import Claims, cache_folder

MOST = 0.5
"""``--fetch auto`` downloads a shard as a whole where more of its bytes than this share is needed."""
AHEAD_BYTES = 64 << 20
"""Of ranges that lie in memory before they are read, at most (or one tensor, where that is larger)."""

Plan = Callable[[TensorRef], list[MatrixRef | Skip]]


@dataclass(slots=True)
class Wanted:
    """Decides for each shard that is not on this machine. For any number of threads."""

    checkpoint: Checkpoint
    options: ScanOptions
    plan: Plan
    last: Callable[[str], bool]
    """Whether a tensor of this name is looked at only when all shards have been seen."""
    recall: Recall
    done: Mapping[str, str | None]
    emit: Callable[[Event], None]
    _peeked: dict[str, Shard] = field(default_factory=dict)
    _mine: dict[str, int] = field(default_factory=dict)
    """Shards that this run, or one that was killed, has put on the disk → bytes."""
    _claims: Claims | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _no_ranges: bool = False

    def begin(self) -> None:
        """Takes over what a killed run has left. A scan that starts anew has no use for it yet: it goes."""
        source = self.checkpoint.source
        if not self.options.evict or source.remote(next((s.name for s in self.checkpoint.shards), "")) is None:
            return
        source.evict("")  # raises now rather than when the first shard is done
        self._claims = Claims(users_folder(self.options.cache_dir), source.location, cache_folder())
        for name in self._claims.orphans():
            source.remove_unfinished(name)
            self._mine[name] = 0
            if not self.done:
                self.evict(name)

    def whole(self, ref: ShardRef) -> bool:
        """Whether a shard is to be downloaded; if not, `open` has it. Raises what opening it raises."""
        shard = self._by_ranges(ref)
        if shard is None:
            with self._lock:
                self._mine[ref.name] = self.checkpoint.source.cost(ref.name) or 0
            if self._claims is not None:
                self._claims.make(ref.name)
            return True
        if isinstance(shard, RangedShard):
            self._want(shard, self._read(shard)[0])
        with self._lock:
            self._peeked[ref.name] = shard
        return False

    def would_be_whole(self, ref: ShardRef) -> bool:
        """What `whole` would answer, with nothing begun: for whoever downloads before the scan is here."""
        shard = self._by_ranges(ref)
        if shard is not None:
            shard.close()
        return shard is None

    def needed(self, shard: Shard) -> int:
        """Bytes of a shard that the scan would read."""
        if self.options.stats:
            return shard.nbytes
        now, later = self._read(shard)
        spans = {(tensor.name, tensor.start, tensor.end): tensor.stored_nbytes for tensor in (*now, *later)}
        return sum(spans.values())

    def better_whole(self, shard: Shard) -> bool:
        """Whether `options.fetch`, what is needed of a shard and the disk speak for downloading all of it."""
        source, fetch = self.checkpoint.source, self.options.fetch
        needed = self.needed(shard)
        if not needed or fetch == "ranges":
            return False
        cost, free = source.cost(shard.ref.name), source.free()
        fits = (cost is None or free is None or cost <= free) and self._within_limit(cost)
        if not cost or fetch == "shards":
            return True
        # What is merged or decoded is read in pieces, each of which would be a request.
        pieced = not isinstance(shard, RangedShard) or any(tensor.encoding for tensor in shard.tensors)
        return fits and (pieced or needed > MOST * shard.nbytes)

    def open(self, ref: ShardRef, path: Path | None) -> Shard:
        """A shard that lies at `path`; without one, that of which `whole` has said that it comes by ranges, those that
        are needed on their way. What has just gone from `path`, since another scan evicted it, comes once more."""
        while path is not None:
            shard = open_local(self.checkpoint, ref, path)
            if shard is not None:
                return shard
            path = self.checkpoint.source.path(ref.name) if self.whole(ref) else None
        with self._lock:
            return self._peeked.pop(ref.name)

    def want_last(self, shard: RangedShard, tensor: TensorRef) -> None:
        """Fetch one of the tensors that are looked at last."""
        self._want(shard, [item.tensor for item in self._open_items(tensor, shard)])

    def goes(self, ref: ShardRef) -> bool:
        """Whether a shard will be evicted once it is done, so that nothing may be left to be read from it."""
        return self._claims is not None and ref.name in self._mine

    def evict(self, name: str) -> None:
        """Removes a shard that is done from the Hub cache, if it is to be removed and wasn't there before the scan."""
        if self._claims is None or name not in self._mine:
            return
        try:
            self.checkpoint.source.evict(name)
        except SourceError as error:
            self.emit(Notice(message=str(error)))
            return
        self._claims.forget(name)
        with self._lock:
            del self._mine[name]

    def close(self) -> None:
        """Let go of shards that nobody has taken. What is on the disk and not done stays for the next run."""
        with self._lock:
            for shard in self._peeked.values():
                shard.close()
        if self._claims is not None:
            self._claims.close()

    def _by_ranges(self, ref: ShardRef) -> Shard | None:
        """A shard that is not to be downloaded, opened on its server; None for one that is."""
        fetch = self.options.fetch
        if self._no_ranges or (fetch == "shards" and not self.options.cache):
            self._check_disk(ref)
            return None
        try:
            shard = self.checkpoint.peek(ref)
        except NoRanges as error:
            if fetch == "ranges":
                raise
            self._no_ranges = True
            if fetch == "auto":
                self.emit(Notice(message=f"whole shards are downloaded: {error}".partition("; use --fetch")[0]))
            self._check_disk(ref)
            return None
        if shard is None:
            return None
        if self.needed(shard) and fetch == "shards":
            self._check_disk(ref)
        if self.better_whole(shard):
            shard.close()
            return None
        return shard

    def _within_limit(self, cost: int | None) -> bool:
        limit = self.options.max_disk
        with self._lock:
            return limit is None or sum(self._mine.values()) + (cost or 0) <= limit

    def _check_disk(self, ref: ShardRef) -> None:
        """Raises `NoSpace` where ``--max-disk`` forbids a download that can't be helped."""
        cost = self.checkpoint.source.cost(ref.name)
        if not self._within_limit(cost):
            limit, size = (self.options.max_disk or 0) / 1e6, (cost or 0) / 1e6
            raise NoSpace(
                f"'{ref.name}' takes {size:,.1f} MB, and --max-disk {limit:,.1f} MB leaves no room for it; use --evict "
                "or --fetch ranges"
            )

    def _want(self, shard: RangedShard, tensors: list[TensorRef]) -> None:
        name = shard.ref.name
        limit = min(AHEAD_BYTES, (self.options.max_memory or 8 * AHEAD_BYTES) // 8)
        shard.want(
            tensors,
            limit=limit,
            report=lambda done, total: self.emit(Fetching(shard=name, done=done, total=total)),
        )

    def _read(self, shard: Shard) -> tuple[list[TensorRef], list[TensorRef]]:
        """What is read when the shard's turn comes, and what is read last; a tensor once for each of its matrices."""
        now: list[TensorRef] = []
        later: list[TensorRef] = []
        for tensor in shard.tensors:
            (later if self.last(tensor.name) else now).extend(item.tensor for item in self._open_items(tensor, shard))
        return now, later

    def _open_items(self, tensor: TensorRef, shard: Shard) -> list[MatrixRef]:
        return [
            item
            for item in self.plan(tensor)
            if isinstance(item, MatrixRef) and not is_done(item, self.done) and not self.recall.unread(item, shard)
        ]


def wanted_beforehand(checkpoint: Checkpoint, options: ScanOptions, devices: Iterable[str]) -> Wanted:
    """What a scan of `checkpoint` on `devices` will want that has not begun."""
    context = matrices.Context(
        config=checkpoint.config,
        names=checkpoint.names,
        options=options,
        hints=checkpoint.hints,
        table=matrices.user_table(options.layout),
    )
    repeated = ties.among_left(checkpoint, context)

    def plan(tensor: TensorRef) -> list[MatrixRef | Skip]:
        if tensor.name in repeated:
            return [matrices.tied(tensor, repeated[tensor.name])]
        return matrices.plan(tensor, context)

    keep = Keep(options.cache_dir, options.max_cache) if options.cache else None
    recall = Recall(keep, options, devices)
    return Wanted(checkpoint, options, plan, matrices.may_be_tied, recall, done={}, emit=lambda event: None)
