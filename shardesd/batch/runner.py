"""Works through a list: claims a model, scans it, notes what became of it, goes on. One engine carries all the work."""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace

from shardesd import spectra
from shardesd.batch.ahead import Ahead
from shardesd.batch.attempt import as_asked, attempt
from shardesd.batch.claims import Claim, Claims
from shardesd.batch.control import Metrics, read_config
from shardesd.batch.devices import shared_engine
from shardesd.batch.failures import Failure
from shardesd.batch.jobs import Job
from shardesd.batch.listing import ModelList
from shardesd.batch.model import ListRow
from shardesd.batch.plan import Plan, Planned, chosen, make_plan
from shardesd.batch.tables import Ledger
from shardesd.engine import Neighbours, SharedEngine, cpu_device
from shardesd.events import (
    BatchEvent,
    BatchFinished,
    BatchStarted,
    ModelDone,
    ModelEvent,
    ModelFailed,
    ModelStarted,
    Notice,
)
from shardesd.options import BatchOptions, OutputOptions, ScanOptions
from shardesd.results import Finished, find_finished, make_folders

LOOK_AGAIN = 1.0
"""Seconds between two looks at a model that another process has claimed."""
_POLL = 0.2


class Batch:
    """One process's part in working through a list. `run` may be called once.

    Raises `ShardesdError` only for what concerns all models: a list without models' column, an output folder that
    can't be written. What concerns one model is noted, and costs that model only.
    """

    def __init__(
        self,
        models: ModelList,
        *,
        output: OutputOptions,
        scan: ScanOptions,
        batch: BatchOptions,
        on_event: Callable[[BatchEvent], None] = lambda event: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.models, self.output, self.scan, self.batch = models, output, scan, batch
        self.out = output.folder
        self.stop = stop or threading.Event()
        self._emit = on_event
        self._rows = chosen(models, batch)
        self._ledger = Ledger(self.out, models)
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._active: dict[str, Job] = {}
        self._done: queue.SimpleQueue[ListRow | BaseException] = queue.SimpleQueue()
        self._halt = threading.Event()
        self._at_work = False
        self._began = 0.0
        self._workers = batch.workers
        self._threads: set[threading.Thread] = set()
        self._counts = {"done": 0, "failed": 0, "failed_rows": 0}
        self._metrics = Metrics()
        self._watch: Neighbours | None = None
        self._claims = Claims(self.out)
        self._ahead = Ahead(scan)
        self._engine: SharedEngine | None = None

    def plan(self, on_model: Callable[[Planned], None] = lambda model: None) -> Plan:
        """What there is to do; nothing is written but what the Hub cache keeps."""
        return make_plan(
            self._rows,
            self.out,
            self.scan,
            failures=self._ledger.failures(),
            overwrite=self.output.overwrite,
            retry_failed=self.batch.retry_failed,
            on_model=on_model,
            stop=self.stop,
        )

    def run(self, plan: Plan | None = None) -> Generator[ListRow, None, None]:
        """The models that are done, as they are: those of earlier runs first. Closing it stops the work.

        Raises `ResultsError` where the output folder can't be written.
        """
        self._prepare()
        plan = plan or self.plan()
        try:
            yield from self._settle(plan)
            with ExitStack() as stack:
                stack.enter_context(self._claims)
                stack.enter_context(spectra.blas_threads(cpu_device().threads, on_cpu=True))
                self._open_engine(stack)
                stack.callback(self._dismiss)
                stack.callback(self._ahead.close)
                self._at_work = True
                self._hire()
                yield from self._results()
        finally:
            self._finish()

    def reconfigure(self) -> None:
        """Reads ``gpu_config.json`` again; what it doesn't name stays as it is. Called on SIGHUP."""
        try:
            found = read_config(self.out, self.batch)
        except ValueError as error:
            self._emit(Notice(message=f"gpu_config.json is left aside: {error}"))
            return
        if found is None:
            self._emit(Notice(message=f"there is no {self.out / 'gpu_config.json'}"))
            return
        self.batch, says = found
        self._workers = self.batch.workers
        if self._watch is not None:
            self._watch.set_options(self.batch.gpu)
        self._emit(Notice(message=f"gpu_config.json: {says}"))
        if self._at_work:
            self._hire()

    def _prepare(self) -> None:
        make_folders([self.out])
        with tempfile.TemporaryFile(dir=self.out) as marker:
            self._began = os.fstat(marker.fileno()).st_mtime  # by the clock of the filesystem
        if (self.out / "gpu_config.json").exists():
            self.reconfigure()

    def _settle(self, plan: Plan) -> Iterator[ListRow]:
        """Notes what the plan has found out, and makes jobs of the rest; gives what is done."""
        lost = self._ledger.note_problems(self.models.problems)
        self._counts["failed"] += lost
        earlier = self._ledger.failures()
        total = plan.left_bytes
        jobs: list[Job] = []
        for planned in plan.models:
            row = planned.row
            if planned.left:
                before = earlier.get(row.key)
                jobs.append(Job(planned, len(jobs), known_attempts=before.attempts if before else 0))
            elif planned.state != "done":
                self._counts["failed"] += 1
        done = [planned for planned in plan.models if planned.state == "done"]
        self._ledger.note_done([planned.row for planned in done])
        self._jobs = jobs
        found = [(model.row, model.failure) for model in plan.models if model.state == "impossible" and model.failure]
        self._ledger.note_found(found)
        for row, failure in found:
            self._emit(_failed(row, failure))
        self._emit(
            BatchStarted(
                models=len(plan.models) + lost,
                done=len(done),
                failed=self._counts["failed"],
                left=len(jobs),
                total_bytes=total,
                out=str(self.out),
                rate=plan.rate,
            )
        )
        for planned in done:
            as_asked(planned.row, self.output)
            self._counts["done"] += 1
            self._counts["failed_rows"] += bool(planned.failed_rows)
            yield planned.row

    def _open_engine(self, stack: ExitStack) -> None:
        def changed() -> None:
            with self._changed:
                self._changed.notify_all()

        self._engine, self._watch = stack.enter_context(
            shared_engine(
                self.scan,
                self.batch.gpu if self._jobs else None,
                emit=self._emit,
                on_busy=self._metrics.busy,
                on_change=changed,
            )
        )

    def _hire(self) -> None:
        """As many workers as are wanted; those too many leave by themselves after their model."""
        with self._changed:
            self._changed.notify_all()
            while len(self._threads) < min(self._workers, max(1, len(self._jobs) + len(self._active))):
                thread = threading.Thread(target=self._work, name=f"shardesd-model-{len(self._threads)}", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _results(self) -> Iterator[ListRow]:
        while True:
            if self.stop.is_set():
                self._stop_all()
            with self._changed:
                ended = not self._threads
            try:
                # Not with a timeout of 0, with which Python 3.10 may wait for ever.
                item = self._done.get_nowait() if ended else self._done.get(timeout=_POLL)
            except queue.Empty:
                if ended:
                    return
                continue
            if isinstance(item, BaseException):
                raise item
            yield item

    def _stop_all(self) -> None:
        self._halt.set()
        with self._changed:
            for job in self._active.values():
                job.stop.set()
            self._changed.notify_all()

    def _dismiss(self) -> None:
        """Waits until the matrices in flight are done and kept."""
        self._stop_all()
        with self._changed:
            while self._threads:
                self._changed.wait(_POLL)

    def _work(self) -> None:
        try:
            while True:
                taken = self._next()
                if taken is None:
                    return
                job, claim = taken
                try:
                    self._do(job, claim)
                finally:
                    self._claims.release(claim)
                    with self._changed:
                        self._active.pop(job.row.stem, None)
                        self._changed.notify_all()
        except BaseException as error:  # the output folder can't be written: this ends it all
            self._done.put(error)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _next(self) -> tuple[Job, Claim] | None:
        """The next model, claimed; None where there is none any more, or too many workers. Waits for its turn."""
        me = threading.current_thread()
        while True:
            with self._changed:
                too_many = len(self._threads) > self._workers
                if self._halt.is_set() or self.stop.is_set() or too_many or not (self._jobs or self._active):
                    self._threads.discard(me)
                    return None
                now = time.monotonic()
                due = [job for job in self._jobs if job.not_before <= now] if self._may_start() else []
                for job in sorted(due, key=lambda job: (job.tried, job.number)):
                    claim = self._claims.take(job.row.stem)
                    if claim is None:
                        job.not_before = now + LOOK_AGAIN
                        continue
                    self._jobs.remove(job)
                    if self._by_others(job):
                        self._claims.release(claim)
                        continue
                    job.stop = threading.Event()
                    self._active[job.row.stem] = job
                    self._look_ahead()
                    return job, claim
                waits = [job.not_before - now for job in self._jobs if job.not_before > now]
                self._changed.wait(min([LOOK_AGAIN, *waits]))

    def _may_start(self) -> bool:
        """A model starts only when there are as many GPUs as a job wants; on the CPU, at once."""
        return self._watch is None or bool(self._active) or len(self._watch.ours) >= self.batch.gpu.per_job

    def _look_ahead(self) -> None:
        for job in sorted(self._jobs, key=lambda job: job.number):
            begun = job.tried > 0 or job.planned.state != "new"  # which of its shards comes next isn't known
            if job.row.on_hub and not (job.planned.adapter or begun or self._claims.taken(job.row.stem)):
                self._ahead.fetch(job.row, [device.name for device in self._engine.devices] if self._engine else ())
                return

    def _by_others(self, job: Job) -> bool:
        """Whether another process has dealt with a model since this one planned it. Asked while holding the claim."""
        row = job.row
        finished = find_finished(self.out, row.model_id, row.revision)
        if finished is not None and self._made_now(job, finished):
            rows, failed = finished.rows()
            seconds = float(finished.run.get("seconds") or 0)
            self._ledger.note_done([job.row])
            self._finished(job, analysed=rows - failed, failed=failed, seconds=seconds, by_other=True)
            return True
        noted = self._ledger.failures().get(row.key)
        tried = noted.attempts - job.known_attempts if noted else 0
        if noted is None or tried <= job.tried:
            return False
        job.tried = tried
        self._failed(job, noted, by_other=True)
        return True

    def _made_now(self, job: Job, finished: Finished) -> bool:
        """Whether results that were not there, or not to be kept, when this process planned have been made since."""
        if finished.fingerprint.get("options") != json.loads(json.dumps(self.scan.numbers())):
            return False
        if not self.output.overwrite:
            return True
        try:
            return finished.run_path.stat().st_mtime >= self._began
        except OSError:
            return False

    def _do(self, job: Job, claim: Claim) -> None:
        row = job.row
        self._emit(ModelStarted(model=row.name, nbytes=job.planned.nbytes, attempt=job.known_attempts + job.tried + 1))
        ended = attempt(
            row,
            # What this run has begun anew is gone on with.
            output=replace(self.output, overwrite=self.output.overwrite and job.tried == 0),
            options=self.scan,
            engine=self._engine,
            emit=lambda event: self._emit(ModelEvent(model=row.name, event=event)),
            stop=job.stop,
            lost=claim.lost,
        )
        if ended.state == "done":
            self._ledger.note_done([job.row])
            self._finished(job, analysed=ended.analysed, failed=ended.failed, seconds=ended.seconds)
        elif ended.failure is not None:
            noted = self._ledger.note_failure(row, ended.failure)
            job.tried += 1
            self._failed(job, noted)
        else:
            self._postpone(job, LOOK_AGAIN)

    def _finished(self, job: Job, *, analysed: int, failed: int, seconds: float, by_other: bool = False) -> None:
        self._counts["done"] += 1
        self._counts["failed_rows"] += bool(failed)
        if not by_other:
            self._metrics.job(failed=False)
        self._emit(ModelDone(model=job.row.name, analysed=analysed, failed=failed, seconds=seconds, by_other=by_other))
        self._done.put(job.row)

    def _failed(self, job: Job, failure: Failure, *, by_other: bool = False) -> None:
        """Tries again later what may pass, if it hasn't been tried often enough."""
        wait = None
        if failure.passing and job.tried <= self.batch.retries and not self._halt.is_set():
            wait = self.batch.backoff * 2 ** (job.tried - 1)
            self._postpone(job, wait)
        else:
            self._counts["failed"] += 1
            if not by_other:
                self._metrics.job(failed=True)
        self._emit(replace(_failed(job.row, failure), again_in=wait, by_other=by_other))

    def _postpone(self, job: Job, seconds: float) -> None:
        with self._changed:
            job.not_before = time.monotonic() + seconds
            self._jobs.append(job)
            self._changed.notify_all()

    def _finish(self) -> None:
        left = len(self._jobs) + len(self._active)
        files = self._ledger.finish()
        files += self._metrics.write(self.out, self._watch)
        self._emit(
            BatchFinished(
                done=self._counts["done"],
                failed=self._counts["failed"],
                left=left,
                failed_rows=self._counts["failed_rows"],
                seconds=time.monotonic() - self._started,
                files=tuple(str(path) for path in files),
                interrupted=left > 0,
            )
        )


def _failed(row: ListRow, failure: Failure) -> ModelFailed:
    return ModelFailed(
        model=row.name,
        stage=failure.stage,
        reason=failure.reason,
        message=failure.message,
        attempts=failure.attempts,
    )
