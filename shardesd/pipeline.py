"""One checkpoint's way through the rooms: shards → tensors → matrices → tasks for the engine → rows.

Held apart from `scan`, which opens the place and keeps the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from shardesd import keys, matrices, spectra, ties
from shardesd.checkpoint import Checkpoint, RangedShard, Shard
from shardesd.engine import Engine, Outcome, Task
from shardesd.errors import CheckpointError, SourceError
from shardesd.events import Event, MatrixStarted, Notice, RowDone, ShardDone, ShardOpened
from shardesd.keep import Keep, Recall
from shardesd.keys import Analysed, Count, Key, OpenShard
from shardesd.options import ScanOptions, size_text
from shardesd.records import NEEDS, MatrixRef, Row, Skip, TensorRef, is_done
from shardesd.solver import Solver, Solving, factors, settled
from shardesd.source import Fetcher
from shardesd.statistics import Statistics
from shardesd.wanted import Wanted

_FITTING = 2  # threads at least: groups of a GPU may end together
_Plan = list[MatrixRef | Skip]
_Item = TypeVar("_Item", bound="MatrixRef | Skip")


@dataclass(slots=True)
class Pipeline:
    """Analyses every matrix of `checkpoint` that is not in `done`. `rows` may be called once."""

    checkpoint: Checkpoint
    options: ScanOptions
    engine: Engine
    template: Row
    """Holds what all rows share: model_id, revision, is_adapter, source_model."""
    table: matrices.Table = matrices.BUILT_IN
    """Which tensors are fused or stacked, and how."""
    done: Mapping[str, str | None] = field(default_factory=dict)
    """Longname → tensor, where that is known, of the rows that are there already."""
    emit: Callable[[Event], None] = lambda event: None
    stop: threading.Event = field(default_factory=threading.Event)
    keep: Keep | None = None
    """Where λ are kept by content; None: nowhere."""
    skipped: dict[str, Row] = field(default_factory=dict)
    """Longname → row of each tensor that was left out, once it has been seen."""
    numels: dict[str, int] = field(default_factory=dict)
    """Tensor name → elements, of every header read so far."""
    owners: dict[str, str] = field(default_factory=dict)
    """Longname → tensor, of all matrices and skipped tensors seen so far."""
    statistics: Statistics = field(default_factory=Statistics)
    """Gathered where `options.stats` asks for them."""
    _context: matrices.Context = field(init=False)
    _ties: dict[str, str] = field(init=False)
    """`Checkpoint.ties` among the tensors that the globs leave."""
    _shared: dict[str, Any] = field(init=False)  # the template's values
    _recall: Recall = field(init=False)
    _fitting: ThreadPoolExecutor = field(init=False)
    _solver: Solver = field(init=False)
    _wanted: Wanted = field(init=False)
    _open: dict[str, OpenShard] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _exact: int = 0  # matrices of the shards opened so far
    _estimated: int = 0  # what the names of the shards opened so far had promised
    _whole: int | None = None  # matrices of all shards, once all headers are here
    _plans: dict[TensorRef, _Plan] = field(default_factory=dict)  # made to count those; not yet made tasks of
    _met: bool = False  # whether names met that weren't all known
    _opened: int = 0
    _closed: bool = False
    _counted: set[str] = field(default_factory=set)
    """Longnames of matrices whose bytes are counted for the statistics when they are read."""

    def __post_init__(self) -> None:
        self._learn()
        self._shared = {one.name: getattr(self.template, one.name) for one in fields(Row)}
        self._ties = ties.among_left(self.checkpoint, self._context)
        self._recall = Recall(self.keep, self.options, [device.name for device in self.engine.devices])
        self._fitting = ThreadPoolExecutor(max(_FITTING, self.engine.gpus), thread_name_prefix="shardesd-fits")
        self._solver = Solver(self.options, self._recall, self.engine.budget, self._fitting, self._counter)
        self._wanted = Wanted(
            self.checkpoint, self.options, self._plan, matrices.may_be_tied, self._recall, self.done, self.emit
        )

    def total(self) -> tuple[int | None, bool]:
        """How many matrices there are, and whether that is exact (all headers are here) or guessed from names."""
        if self.checkpoint.complete:
            if self._whole is None:
                self._whole = sum(map(self._count, self.checkpoint.tensors()))
            return self._whole, True
        names = self.checkpoint.names
        if names is None:
            return None, False
        if self._opened == len(self.checkpoint.shards):
            return self._exact, True
        return max(self._exact, self._exact - self._estimated + matrices.estimate(names, self._context)), False

    def names_meet(self) -> bool:
        """Whether tensors want one longname, so that what each is called depends on which names are known."""
        return self._met or bool(self._context.renamed)

    def _learn(self) -> None:
        known = self.checkpoint
        self._whole, self._plans = None, {}
        self._context = matrices.Context(
            config=known.config, names=known.names, options=self.options, hints=known.hints, table=self.table
        )
        for tensor in known.tensors():
            self.numels[tensor.name] = tensor.numel

    def params(self, longname: str, numel: int) -> int:
        """Elements of a weight, plus its bias where it has one and the matrix is the whole tensor; else `numel`."""
        name = self.owners.get(longname)
        weight = self.numels.get(name, 0) if name in (longname, f"{longname}.weight") else None
        return numel if weight is None else weight + self.numels.get(f"{longname}.bias", 0)

    def rows(self) -> Iterator[Analysed]:
        """Rows as they are done, in no particular order; skipped ones only go to `skipped` and to `emit`.

        Raises `SourceError` or `CheckpointError` where the rest of the checkpoint can't be had; the rows before it
        have been given by then.
        """
        shards = self.checkpoint.shards
        wanted = self._wanted
        uncounted: SourceError | None = None
        wanted.begin()
        with Fetcher(self.checkpoint.source, shards, self.emit, wanted.whole) as fetcher:
            outcomes = self.engine.map(
                self._tasks(fetcher),
                run_many=self._solve_many,
                on_start=self._started,
                on_state=lambda state: self.emit(keys.engine_report(state)),
                stop=self.stop,
            )
            try:
                for outcome in outcomes:
                    if isinstance(outcome.key.item, Count):
                        if isinstance(outcome.error, CheckpointError | SourceError):
                            raise outcome.error
                        if outcome.error is not None:
                            uncounted = keys.not_counted(outcome.key.item, outcome.key.shard, outcome.error)
                    else:
                        analysed = self._analysed(outcome.key.item, outcome)
                        yield analysed
                        self.emit(RowDone(row=analysed.row, nbytes=analysed.nbytes, kept=analysed.kept))
                    self._left(outcome.key.shard, fetcher)
                for name, why in self.statistics.refused.items():
                    self.emit(Notice(message=f"'{name}' has no statistics: {why}"))
                if uncounted is not None and not self.stop.is_set():
                    raise uncounted
            finally:
                outcomes.close()
                with self._lock:
                    self._closed = True
                    for state in self._open.values():
                        state.shard.close()
                wanted.close()
                self._fitting.shutdown()  # what is solved is kept, though nobody asks for it any more
                if self.keep is not None:
                    self.keep.flush()

    def _tasks(self, fetcher: Fetcher) -> Iterator[Task[Key, Solving]]:
        last: list[tuple[TensorRef, Shard]] = []
        seen: set[str] = set()
        for number, (ref, path) in enumerate(fetcher, start=1):
            shard = self._wanted.open(ref, path)
            with self._lock:
                if self._closed:  # while the header was read
                    shard.close()
                    return
                state = self._open[ref.name] = OpenShard(shard, number)
            self._opened = number
            state.kept = self.checkpoint.is_needed_later(ref.name)
            if self.checkpoint.config != self._context.config:  # a GGUF file tells it itself, once it is here
                self._context, self._plans = replace(self._context, config=self.checkpoint.config), {}
            for tensor in shard.tensors:
                seen.add(tensor.name)
                self.numels[tensor.name] = tensor.numel
            if self._context.names is None and self.checkpoint.complete:
                self._learn()
            if not self.checkpoint.complete:
                self._exact += sum(map(self._count, shard.tensors))
                self._estimated += matrices.estimate((tensor.name for tensor in shard.tensors), self._context)
            total, exact = self.total()
            self.emit(ShardOpened(shard=ref.name, number=number, nbytes=shard.nbytes, matrices=total, exact=exact))
            for tensor in self._in_order(shard):
                plan = self._plans.pop(tensor, None) or self._plan(tensor)
                if matrices.may_be_tied(tensor.name):
                    last.append((tensor, self._for_later(state)))
                    read = any(isinstance(item, MatrixRef) for item in plan)
                    if not read and not isinstance(shard, RangedShard):  # these know later what is wanted of them
                        yield from self._counts(tensor, plan, shard)
                else:
                    yield from self._planned(tensor, plan, shard)
            yield from self._counts_alone(shard, rest=True)
            state.planned = True
            self._left(ref.name, fetcher, 0)
        # Quantised weights that lacked a part (a scale in a later shard) when their own shard was opened.
        for tensor in self.checkpoint.tensors():
            if tensor.name not in seen:
                self.numels[tensor.name] = tensor.numel
                last.append((tensor, self._open[tensor.shard].shard))
        # Whether a head is tied to an embedding can be told only when both are here; and the answer must not depend
        # on which shard holds which.
        last.sort(key=lambda pair: matrices.tie_order(pair[0].name))
        left = ties.candidates(last, self.checkpoint, self._context)
        for tensor, shard in last:
            twin = ties.twin(tensor, shard, left) if (tensor, shard) in left else None
            if twin is None:
                if isinstance(shard, RangedShard):
                    self._wanted.want_last(shard, tensor)
                yield from self._planned(tensor, self._plan(tensor), shard)
            else:
                tie = self._owned(matrices.tied(tensor, twin))
                self._skip(tie)
                yield from self._counts(tensor, [tie], shard)
            yield from self._counts_alone(shard, rest=True)

    def _in_order(self, shard: Shard) -> Sequence[TensorRef]:
        if isinstance(shard, RangedShard) or self._context.names is None:  # comes in this order; names may yet meet
            return shard.tensors
        for tensor in shard.tensors:
            if tensor not in self._plans:  # no more, since a shard has told the config
                self._count(tensor)
        return matrices.largest_first(shard.tensors, self._plans, self._context)

    def _count(self, tensor: TensorRef) -> int:
        """Its matrices, failed ones too. A plan that this takes is kept; of thousands of experts it takes none, and a
        GPU begins with the first of them while the others are planned."""
        if tensor.name not in self._ties and (count := matrices.stacked(tensor, self._context)):
            return count
        plan = self._plans[tensor] = self._plan(tensor)
        return sum(isinstance(item, MatrixRef) or item.status == "failed" for item in plan)

    def _for_later(self, state: OpenShard) -> Shard:
        """What a tensor of an open shard is read from when all shards have been seen."""
        if not state.later and self._wanted.goes(state.shard.ref) and state.number < len(self.checkpoint.shards):
            # An open file takes its room on the disk, deleted or not.
            state.later = self.checkpoint.peek(state.shard.ref)
        state.kept |= state.later is None
        return state.later or state.shard

    def _plan(self, tensor: TensorRef) -> _Plan:
        if tensor.name in self._ties:
            return [matrices.tied(tensor, self._ties[tensor.name])]
        return matrices.plan(tensor, self._context)

    def _owned(self, item: _Item) -> _Item:
        """`item` under a longname that no other tensor has: where names that came late didn't let
        `matrices.Context.renamed` see to it."""
        longname, number = item.longname, 1
        while self.owners.setdefault(longname, item.tensor.name) != item.tensor.name:
            number += 1
            longname = f"{item.longname}#{number}"
        self._met |= number > 1
        return item if longname == item.longname else replace(item, longname=longname)

    def _planned(self, tensor: TensorRef, plan: _Plan, shard: Shard) -> Iterator[Task[Key, Solving]]:
        items = [self._owned(item) for item in plan]
        yield from self._counts(tensor, items, shard)
        for item in items:
            if is_done(item, self.done):
                continue
            if isinstance(item, Skip) and item.status == "skipped":
                self._skip(item)
                continue
            with self._lock:
                self._open[shard.ref.name].left += 1
            yield self._task(item, shard)

    def _counts(
        self, tensor: TensorRef, items: Sequence[MatrixRef | Skip], shard: Shard
    ) -> Iterator[Task[Key, Solving]]:
        """Tasks that read, for the statistics, what no matrix of `items` reads."""
        if not self.options.stats or tensor.name in self.statistics:
            return
        read = {
            item.longname
            for item in items
            if isinstance(item, MatrixRef)
            and not is_done(item, self.done)
            and self._fits(item, shard)
            and not (self.options.delta and factors(item, shard))
        }
        in_pieces = shard.in_blocks(tensor) and not self.options.delta
        on_gpus = in_pieces and self.engine.gpus > 0
        self._counted |= self.statistics.expect(tensor, items, read, in_pieces=in_pieces, on_gpus=on_gpus)
        yield from self._counts_alone(shard, rest=False)

    def _counts_alone(self, shard: Shard, *, rest: bool) -> Iterator[Task[Key, Solving]]:
        for task in self.statistics.tasks(shard, rest=rest):
            with self._lock:
                self._open[shard.ref.name].left += 1
            yield task

    def _counter(self, item: MatrixRef) -> Statistics | None:
        """What counts a matrix's elements for the statistics, where that is asked for."""
        return self.statistics if item.longname in self._counted else None

    def _host_bytes(self, item: MatrixRef, shard: Shard) -> int:
        work = spectra.work_bytes(item.M, item.N, solver=self.options.solver, precision=self.options.precision)
        if self._solver.by_blocks(item, shard):
            return work
        # Parts of several groups are copied together.
        copied = item.numel * item.tensor.nbytes // max(1, item.tensor.numel) if item.pick else 0
        return work + item.tensor.nbytes + copied

    def _fits(self, item: MatrixRef, shard: Shard) -> bool:
        return self.options.max_memory is None or self._host_bytes(item, shard) <= self.engine.budget

    def _task(self, item: MatrixRef | Skip, shard: Shard) -> Task[Key, Solving]:
        key = Key(item, shard.ref.name)
        if isinstance(item, Skip):
            return Task(key=key, run=keys.fail(item.reason))
        known = self._recall.unread(item, shard)
        if known is not None:
            return Task(key=replace(key, kept=True), run=lambda device: self._solver.measured(item, known, kept=True))
        host = self._host_bytes(item, shard)
        if not self._fits(item, shard):
            words = f"{NEEDS}{size_text(host)}, and --max-memory is {size_text(self.engine.budget)}"
            return Task(key=key, run=keys.fail(words))
        options = self.options
        size = keys.needs(item.M, item.N, item.slices, options.solver)
        together = item.slices == 1 and item.scale == 1 and options.solver != "svd" and not options.delta
        return Task(
            key=key,
            run=lambda device: self._solver.solve(item, shard, device),
            host_bytes=host,
            group=min(item.M, item.N) if together else None,
            **size,
            **keys.limits(size["cost"], item.tensor.nbytes, shard),
        )

    def _solve_many(self, tasks: Sequence[Task[Key, Solving]], device: str) -> list[Outcome[Key, Solving]]:
        asked = [task.key for task in tasks]
        # Nothing but matrices has a group (`_task`).
        pairs = [(key.item, self._open[key.shard].shard) for key in asked if isinstance(key.item, MatrixRef)]
        found = self._solver.solve_many(pairs, device)
        return [
            Outcome(key=key, error=result, device=device)
            if isinstance(result, Exception)
            else Outcome(key=key, value=result, device=device, seconds=seconds)
            for key, (result, seconds) in zip(asked, found, strict=True)
        ]

    def _started(self, key: Key, device: str) -> None:
        if not (isinstance(key.item, Count) or key.kept):
            self.emit(MatrixStarted(longname=key.item.longname, device=device))

    def _analysed(self, item: MatrixRef | Skip, outcome: Outcome[Key, Solving]) -> Analysed:
        solved, error = settled(outcome.value, outcome.error)
        if solved is None:
            if isinstance(error, CheckpointError | SourceError):
                raise error
            return Analysed(row=self._row(item, status="failed", reason=keys.reason_of(error)), spectrum=None, nbytes=0)
        spectrum, values, kept = solved
        if self.options.stats:
            self.statistics.analysed(item.longname, spectrum.eigs)
        by = {"solver": spectrum.solver, "precision": spectrum.precision, "device": spectrum.device}
        row = self._row(item, **values, **by, seconds=round(outcome.seconds, 6))
        nbytes = 0 if outcome.key.kept else item.tensor.stored_nbytes
        return Analysed(row=row, spectrum=spectrum, nbytes=nbytes, kept=kept)

    def _row(self, item: MatrixRef | Skip, **values: Any) -> Row:
        M, N = keys.sides(item)
        known = {
            "longname": item.longname,
            "layer_index": item.layer_index,
            "block_type": item.block_type,
            "dtype": item.tensor.label,
            "M": M,
            "N": N,
            "params": self.params(item.longname, item.numel if isinstance(item, MatrixRef) else item.tensor.numel),
            "reason": item.note if isinstance(item, MatrixRef) else item.reason,
            "quantised": item.tensor.quantised,
        }
        return Row(**self._shared | known | values)

    def _skip(self, item: Skip) -> None:
        row = self._row(item, status="skipped")
        self.skipped[item.longname] = row
        self.emit(RowDone(row=row))

    def _left(self, name: str, fetcher: Fetcher, done: int = 1) -> None:
        with self._lock:
            state = self._open[name]
            state.left -= done
            finished = state.planned and not state.left
        if finished and not state.kept:
            state.shard.close()
            state.shard = state.later or state.shard
        if finished:
            self._wanted.evict(name)
        if finished and fetcher.done(name):
            self.emit(ShardDone(shard=name, number=state.number))
