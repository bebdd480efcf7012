"""What went wrong between us and the Hub: huggingface_hub's, httpx's and the system's errors, sorted and put in words.

A bare status without the Hub's ``X-Error-Code`` header reaches us as `LocalEntryNotFoundError` or `HfHubHTTPError`, so
the whole chain of causes is looked at, never the outermost class alone.
"""

from __future__ import annotations

import email.utils
import errno
import importlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from shardesd.errors import AccessDenied, NotFound, Offline, SourceError

Kind = Literal["status", "connect", "transfer", "stalled", "space", "permission", "other"]


class Stalled(Exception):
    """A download starts over again and again without getting any further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure, as far as it can be told."""

    kind: Kind
    detail: str
    """The error's own first line, without secrets."""
    status: int | None = None
    code: str = ""
    """The Hub's own word: ``GatedRepo``, ``RepoNotFound``, ``RevisionNotFound``, ``EntryNotFound`` …"""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def passing(self) -> bool:
        """Whether trying again may help."""
        if self.kind == "status":
            return self.status is not None and (self.status in (408, 429) or self.status >= 500)
        return self.kind in ("connect", "transfer")

    @property
    def asked_wait(self) -> float | None:
        """Seconds that the server asks us to wait."""
        limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", self.headers.get("ratelimit", ""))
        if limit:
            return float(limit[1]) + 1  # the Hub rounds down
        after = self.headers.get("retry-after", "").strip()
        if after.isdigit():
            return float(after)
        try:
            return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
        except (TypeError, ValueError):
            return None


def fault_of(error: BaseException) -> Fault:
    """Sort an error out by its whole chain of causes."""
    httpx = _httpx()
    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return Fault(kind="space", detail=_detail(cause))
        if isinstance(cause, Stalled):
            return Fault(kind="stalled", detail=_detail(cause))
        response = getattr(cause, "response", None)
        if response is not None and isinstance(getattr(response, "status_code", None), int):
            headers = {key.lower(): value for key, value in response.headers.items()}
            code = headers.get("x-error-code", "")
            return Fault(kind="status", detail=_detail(cause), status=response.status_code, code=code, headers=headers)
        if isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)):
            return Fault(kind="connect", detail=_detail(cause))
        if isinstance(cause, (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)):
            return Fault(kind="transfer", detail=_detail(cause))
        if isinstance(cause, OSError) and str(cause).startswith("Consistency check failed"):
            return Fault(kind="transfer", detail=_detail(cause))
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Fault(kind="permission", detail=cause.strerror or _detail(cause))
        if "No space left on device" in str(cause):  # the Xet client's errors carry no errno
            return Fault(kind="space", detail=_detail(cause))
    return Fault(kind="other", detail=_detail(error))


def source_error(fault: Fault, *, repo_id: str, revision: str | None, file: str | None = None) -> SourceError:
    """`fault` as one clear line: what was wanted, what stood in the way, and what to do."""
    wanted = f"'{repo_id}'" + (f" (revision '{revision}')" if revision else "")
    what = f"'{file}' of {wanted}" if file else wanted
    if fault.kind == "status":
        return _status_error(fault, repo_id=repo_id, revision=revision, wanted=wanted, what=what, file=file)
    if fault.kind == "connect":
        return Offline(
            f"{endpoint()} can't be reached ({fault.detail}) and the Hub cache doesn't hold {what}; "
            "check the network, the proxy and HF_ENDPOINT"
        )
    if fault.kind in ("transfer", "stalled"):
        return SourceError(f"the connection to {endpoint()} kept breaking off at {what} ({fault.detail}); try again")
    if fault.kind == "permission":
        return SourceError(
            f"the Hub cache '{cache_folder()}' can't be written for {what} ({fault.detail}); set HF_HOME to a folder "
            "that can"
        )
    return SourceError(f"{what} can't be had from {endpoint()}: {fault.detail}")


def endpoint() -> str:
    """The Hub's address, without a password that it may carry."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def cache_folder() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _status_error(
    fault: Fault, *, repo_id: str, revision: str | None, wanted: str, what: str, file: str | None
) -> SourceError:
    from huggingface_hub import get_token

    log_in = "set HF_TOKEN or run `hf auth login`"
    page = f"{endpoint()}/{repo_id}"
    status, code = fault.status, fault.code
    if code == "GatedRepo":
        return AccessDenied(f"'{repo_id}' is gated: open {page} and accept its conditions, then {log_in}")
    if code == "RevisionNotFound":
        return NotFound(
            f"'{repo_id}' has no revision '{revision or 'main'}'; its branches and tags are listed at {page}"
        )
    if code == "EntryNotFound" or (status == 404 and file):
        return NotFound(f"there is no file {what} at {endpoint()}")
    if code == "RepoNotFound":
        # The Hub answers alike for a repo that isn't there and for a private one.
        return NotFound(
            f"no model '{repo_id}' at {endpoint()} (and no local path of that name); check the name, and if it is "
            f"private {log_in}"
        )
    if status == 404:
        other = f", or it has no revision '{revision}'" if revision else ""
        return NotFound(f"no model '{repo_id}' at {endpoint()}{other} (and no local path of that name)")
    if status == 401:
        reason = "the token was refused" if get_token() else "it needs a token"
        return AccessDenied(f"access to {what} was denied (401): {reason}; {log_in}")
    if status == 403:
        return AccessDenied(
            f"access to {what} was denied (403): open {page} and accept its conditions if it has any, then {log_in} "
            "with a token that may read it"
        )
    if status == 429:
        asked = fault.asked_wait
        wait = f" (it asks to wait {asked:.0f} s)" if asked else ""
        return SourceError(f"{endpoint()} limits the rate of requests{wait} at {what}; try later, or {log_in}")
    if status is not None and status >= 500:
        return SourceError(f"{endpoint()} keeps failing with status {status} at {what}; try again later")
    return SourceError(f"{endpoint()} answered with status {status} at {what}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _detail(error: BaseException) -> str:
    """The first line of an error's text, without tokens and without the query of a signed URL."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = re.sub(r"(?i)(bearer\s+)\S+", r"\1…", text)
    text = re.sub(r"\bhf_\w+", "hf_…", text)
    return re.sub(r"(https?://)(?:[^\s/@]+@)?([^\s?]+)\?\S+", r"\1\2", text)


def _httpx() -> Any:
    """The module whose errors huggingface_hub raises: httpx, or httpx2 behind the alias that newer versions give."""
    try:
        return importlib.import_module("huggingface_hub.utils").httpx
    except AttributeError:
        return importlib.import_module("httpx")
