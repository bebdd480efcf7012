"""How long to go on asking: retries that are bounded by time and number since the last byte that was new."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from shardesd.source.base import Progress
from shardesd.source.faults import Stalled, fault_of

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")
_log = logging.getLogger(__name__)

ATTEMPTS = 6
"""Failures in a row, without a new byte, that end it; waits between them double from 0.5 s to 8 s."""
CONNECT_ATTEMPTS = 3
"""The same where no connection is made at all: the cache may hold what is needed."""
QUIET_SECONDS = 20.0
"""Failures after so long without a new byte end it too, since huggingface_hub has waited and retried by then."""
LIMIT_ATTEMPTS = 5
"""Waits for a rate limit, each as long as the server asks."""
LONGEST_LIMIT_WAIT = 330.0
"""The Hub counts requests in windows of 300 s; a server that asks for much more is not waited for."""
LIMIT_SECONDS = 900.0
"""Not waited for any more after so long in huggingface_hub's own waits."""
_REPORT_SECONDS = 0.1


class Meter:
    """Counts a download's bytes over all its attempts, and tells `report` of them."""

    def __init__(self, total: int | None = None, report: Progress | None = None) -> None:
        self.total = total
        self.done = 0
        self.furthest = 0
        self.last_new = time.monotonic()
        self.quiet = QUIET_SECONDS
        """Seconds without a new byte after which the next failure is the last."""
        self.attempt = 1
        """Number of the first attempt since the last new byte."""
        self._report = report
        self._told: int | None = None
        self._told_at = 0.0
        self._again = 0

    def at(self, done: int) -> None:
        """The download begins, or begins again, with `done` bytes here."""
        self.done = done
        self._tell(force=True)

    def advance(self, count: int) -> None:
        """`count` more bytes have come; fewer than none where the library started over. Raises `Stalled`."""
        self.done += count
        if self.done > self.furthest:
            self.furthest = self.done
            self.last_new = time.monotonic()
            self.attempt = 0
            self._again = 0
        else:
            # A server that cuts at the same place each time and ignores ranges would be asked for ever.
            self._again += max(count, 0)
            if self.total and self._again > 2 * self.total:
                raise Stalled(f"{self.furthest} of {self.total} bytes, again and again")
        self._tell(force=self.done == self.total)

    def _tell(self, *, force: bool) -> None:
        now = time.monotonic()
        if self._report is not None and self.done != self._told and (force or now - self._told_at >= _REPORT_SECONDS):
            self._told, self._told_at = self.done, now
            self._report(self.done, self.total)


def patiently(action: Callable[[], T], meter: Meter | None = None) -> T:
    """Call `action` until it succeeds, its error is one that won't pass, or patience is at its end."""
    from tenacity import Retrying, retry_if_exception

    meter = meter or Meter()
    retrying = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and fault_of(error).passing),
        stop=lambda state: _exhausted(state, meter),
        wait=_wait,
        before_sleep=lambda state: _note_limit(state, meter),
        reraise=True,
    )
    return retrying(action)


def _exhausted(state: RetryCallState, meter: Meter) -> bool:
    fault = fault_of(_error(state))
    if meter.attempt == 0:
        meter.attempt = state.attempt_number
    failures = state.attempt_number - meter.attempt + 1
    quiet = time.monotonic() - meter.last_new
    if fault.status == 429:
        return failures > LIMIT_ATTEMPTS or quiet > LIMIT_SECONDS or (fault.asked_wait or 0) > LONGEST_LIMIT_WAIT
    return failures >= (CONNECT_ATTEMPTS if fault.kind == "connect" else ATTEMPTS) or quiet > meter.quiet


def _wait(state: RetryCallState) -> float:
    from tenacity import wait_exponential

    fault = fault_of(_error(state))
    if fault.status == 429 and fault.asked_wait is not None:
        return fault.asked_wait
    return float(wait_exponential(multiplier=0.5, max=8)(state))


def _note_limit(state: RetryCallState, meter: Meter) -> None:
    if fault_of(_error(state)).status != 429 or state.next_action is None:
        return
    wait = state.next_action.sleep
    meter.last_new += wait  # a wait that was asked for is no sign of trouble
    if wait > 5:
        _log.warning("The Hub limits the rate of requests; going on in %.0f s.", wait)


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome else None
    assert error is not None
    return error


@contextmanager
def hushed() -> Iterator[None]:
    """Keep huggingface_hub's warnings of this thread off stderr: what they are about is handled here.

    Its word that it waits for a rate limit comes through, and so does everything where a user has turned its verbosity
    up.
    """
    library = logging.getLogger("huggingface_hub")
    thread = threading.get_ident()

    def heard(record: logging.LogRecord) -> bool:
        return (
            record.thread != thread
            or record.levelno >= logging.ERROR
            or record.getMessage().startswith("Rate limited")
            or library.getEffectiveLevel() < logging.WARNING
        )

    handlers = list(library.handlers)
    for handler in handlers:
        handler.addFilter(heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(heard)
