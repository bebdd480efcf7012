"""One file of the Hub read by HTTP ranges, by any number of threads, without any of it on the disk.

The file is the one of a commit, so it can't change; a server that answers otherwise all the same (another size, another
ETag, other bytes than were asked for, all of them where a part was asked for) is never believed.

The Hub redirects large files to signed addresses of another host, which hold for some time. Such an address is used for
all ranges until it is refused, then asked for anew: a request to the Hub for each range would soon meet its rate limit.
A token goes to the Hub's own origin (scheme, host and port) and nowhere else.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from shardesd.errors import NoRanges, ShardChanged, SourceError
from shardesd.source.faults import Fault, fault_of
from shardesd.source.patience import Meter, patiently

Sink = Callable[[int, bytes], None]
"""Is told bytes of the file, and at which of its bytes they begin."""

_TIMEOUT = 10.0
"""Seconds without a byte after which a connection counts as broken."""
_QUIET_SECONDS = 60.0
_REDIRECTS = 5
_REFUSED = (400, 401, 403, 404, 410)
"""How hosts of signed addresses say that one has expired."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Expired(Exception):
    """A signed address holds no longer."""


class Remote:
    """A file at `url`; `what` names it in messages, `explain` puts a fault into words.

    `size` and `sha256` are what the Hub's listing says of it; a size that is not known yet is learned from the first
    answer.
    """

    def __init__(
        self,
        url: str,
        *,
        what: str,
        size: int | None,
        sha256: str | None,
        explain: Callable[[Fault], SourceError],
    ) -> None:
        self.size = size
        self._url = url
        self._what = what
        self._sha256 = sha256
        self._explain = explain
        self._lock = threading.Lock()
        self._signed: str | None = None
        self._etags: dict[str, str] = {}

    def bytes(self, start: int, end: int) -> bytes:
        """Bytes `start`…`end`, fewer where the file ends before; raises as `read`."""
        parts: list[bytes] = []
        self.read(start, end, lambda at, data: parts.append(data))
        return b"".join(parts)

    def read(self, start: int, end: int, sink: Sink) -> None:
        """Gives bytes `start`…`end` to `sink` in order, each once; up to the file's end where that comes before.

        Broken connections and passing refusals are waited out, and the rest is asked for from where it broke. Raises
        `NoRanges` where the server sends the whole file instead, `ShardChanged` where it sends another, and the kinds
        of `SourceError`. What `sink` raises passes through and ends the connection.
        """
        meter = Meter()
        meter.quiet = _QUIET_SECONDS
        at = start

        def go_on() -> None:
            nonlocal at
            while at < (end if self.size is None else min(end, self.size)):
                with self._opened(at, end) as response:
                    for data in response.iter_raw():
                        sink(at, data)
                        at += len(data)
                        meter.advance(len(data))

        try:
            patiently(go_on, meter)
        except (NoRanges, ShardChanged):
            raise
        except Exception as error:
            raise self._explain(fault_of(error)) from error

    @contextmanager
    def _opened(self, start: int, end: int) -> Iterator[Any]:
        """The answer to a request for a range, checked; its body not yet read."""
        for renewals_left in (2, 1, 0):
            signed = self._signed
            try:
                with self._answered(signed or self._url, start, end, last_try=not renewals_left) as response:
                    yield response
                    return
            except _Expired:
                with self._lock:
                    if signed in (None, self._signed):
                        self._signed = None

    @contextmanager
    def _answered(self, url: str, start: int, end: int, *, last_try: bool) -> Iterator[Any]:
        hub: Any = importlib.import_module("huggingface_hub.utils")
        last = (end if self.size is None else min(end, self.size)) - 1
        wanted = {"Range": f"bytes={start}-{last}", "Accept-Encoding": "identity"}
        for _ in range(_REDIRECTS + 1):
            home = _origin(url) == _origin(self._url)
            headers = {**hub.build_hf_headers(), **wanted} if home else wanted
            with hub.get_session().stream(
                "GET", url, headers=headers, follow_redirects=False, timeout=_TIMEOUT
            ) as response:
                if response.is_redirect and "location" in response.headers:
                    self._check_link(response)
                    url = urljoin(url, response.headers["location"])
                    if _origin(url) != _origin(self._url):
                        self._signed = url
                    continue
                if response.status_code >= 400:
                    if not home and not last_try and response.status_code in _REFUSED:
                        raise _Expired
                    if response.status_code == 416:
                        raise self._changed("ends before the range that was asked for")
                    response.read()
                    hub.hf_raise_for_status(response)
                self._check(response, start, last, home=home)
                yield response
                return
        raise SourceError(f"{self._what} is redirected without end")

    def _check_link(self, response: Any) -> None:
        """What the Hub's redirect says of the file behind it."""
        size = response.headers.get("x-linked-size", "")
        if size.isdigit():
            self._check_size(int(size))
        self._check_etag("hub", response.headers.get("x-linked-etag"))

    def _check(self, response: Any, start: int, last: int, *, home: bool) -> None:
        if response.status_code != 206 or response.headers.get("content-encoding", "identity") != "identity":
            raise NoRanges(
                f"{_host(response)} doesn't send parts of a file (status {response.status_code} at {self._what}); "
                "use --fetch shards"
            )
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if not found:
            raise NoRanges(f"{_host(response)} doesn't say which part of {self._what} it sends; use --fetch shards")
        first, final, total = map(int, found.groups())
        self._check_size(total)
        if (first, final) != (start, min(last, total - 1)):
            raise self._changed(f"came with bytes {first} to {final} where {start} to {last} were asked for")
        self._check_etag("hub" if home else "signed", response.headers.get("etag"))

    def _check_size(self, size: int) -> None:
        with self._lock:
            known, self.size = self.size, size if self.size is None else self.size
        if known not in (None, size):
            raise self._changed(f"has {size} bytes where it had {known}")

    def _check_etag(self, whose: str, header: str | None) -> None:
        etag = (header or "").removeprefix("W/").strip('"')
        if not etag:
            return
        with self._lock:
            known = self._etags.setdefault(whose, etag)
        digest = self._sha256 if whose == "hub" and _SHA256.fullmatch(etag) else None
        if etag != known or (digest and etag != digest):
            raise self._changed("is another file than before (its ETag has changed)")

    def _changed(self, how: str) -> ShardChanged:
        return ShardChanged(f"{self._what} {how}: run again, or use --fetch shards")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _host(response: Any) -> str:
    parts = urlsplit(str(response.url))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
