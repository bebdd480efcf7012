"""A small Hugging Face Hub on 127.0.0.1, for tests with huggingface_hub's real client.

    with HubServer() as hub:
        commit = hub.add("org/name", {"config.json": b"{}", "model.safetensors": data})
        hub.fail("*/model.safetensors", Fault(status=500), Fault(cut=1000))      # the next two requests, then no more
        subprocess.run([...], env=hub.env(cache_home=tmp_path))
        assert hub.paths("GET", "*.safetensors") == [...]

It speaks model info, searches by author and text, the tree, and HEAD and GET of files with ranges; gated and private
repos, tokens, and redirects of LFS files as the Hub makes them. Every request is logged with its time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_sleep = time.sleep  # the server's own, whatever a test does to the client's
_LFS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one request instead of, or on the way to, a proper answer."""

    status: int | None = None
    """Answer with this status and nothing else."""
    code: str = ""
    """Its X-Error-Code."""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Close the connection after so many bytes of the body."""
    delay: float = 0.0
    """Seconds before the answer."""
    drip: float = 0.0
    """Seconds between pieces of a tenth of the body."""
    whole: bool = False
    """Ignore a Range: answer 200 with all of the body."""
    etag: str = ""
    """Claim this ETag."""
    shift: int = 0
    """Send another range than was asked for, so many bytes on."""
    hold: threading.Event | None = None
    """Wait for it before the answer."""


@dataclass(kw_only=True)
class Request:
    """One line of the log, written when a request comes; `status` and `sent` follow as it is answered."""

    time: float
    method: str
    path: str
    range: str | None
    token: str | None
    status: int | None = None
    sent: int = 0
    """Bytes of the body."""


@dataclass(kw_only=True)
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: set[str] = field(default_factory=set)
    """Tokens that may read it where it is gated or private."""


class HubServer:
    """The server; a context manager. `tokens` are the ones it knows; others are refused."""

    def __init__(self, *, tokens: set[str] | None = None, redirect: bool = False, error_codes: bool = True) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens = tokens or set()
        self.redirect = redirect
        """Whether LFS files are redirected to another origin, as the Hub does."""
        self.renamed: dict[str, str] = {}
        """Old → new id of a repo; requests for the old one are redirected."""
        self.error_codes = error_codes
        """False: refusals come as a bare status, as mirrors and proxies send them."""
        self.log: list[Request] = []
        self._faults: list[tuple[str, str, list[Fault], bool]] = []
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def add(
        self,
        repo_id: str,
        files: Mapping[str, bytes] | Path,
        *,
        branch: str = "main",
        tag: str | None = None,
        gated: bool = False,
        private: bool = False,
        readers: set[str] | None = None,
    ) -> str:
        """Commit `files` (all there are, or a folder's) to a branch; returns the commit."""
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        repo = self.repos.setdefault(repo_id, Repo())
        seed = json.dumps([repo_id, len(repo.commits), sorted((n, _sha256(d)) for n, d in files.items())])
        commit = hashlib.sha1(seed.encode()).hexdigest()
        repo.commits[commit] = dict(files)
        repo.refs[branch] = commit
        if tag:
            repo.refs[tag] = commit
        repo.gated, repo.private = gated, private
        repo.readers = readers or set()
        self.tokens |= repo.readers
        return commit

    def fail(self, pattern: str, *faults: Fault, method: str = "*", forever: bool = False) -> None:
        """Let the next requests whose path fits meet `faults`, one each; the last one for ever if so wished."""
        with self._lock:
            self._faults.append((pattern, method, list(faults), forever))

    def mend(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def paths(self, method: str = "*", pattern: str = "*") -> list[str]:
        """The log's paths, in the order in which the requests came."""
        return [request.path for request in self.requests(method, pattern)]

    def requests(self, method: str = "*", pattern: str = "*") -> list[Request]:
        with self._lock:
            log = list(self.log)
        return [r for r in log if fnmatch(r.method, method) and fnmatch(r.path, pattern)]

    def env(self, cache_home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """Environment of a subprocess that uses this hub and an own cache, and nothing of the user's."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        kept.pop("TRANSFORMERS_OFFLINE", None)
        kept |= {"HF_ENDPOINT": self.url, "HF_HOME": str(cache_home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        if token:
            kept["HF_TOKEN"] = token
        return kept | more

    def _fault(self, method: str, path: str) -> Fault:
        with self._lock:
            for pattern, wanted, faults, forever in self._faults:
                if faults and fnmatch(path, pattern) and fnmatch(method, wanted):
                    return faults[0] if forever and len(faults) == 1 else faults.pop(0)
        return Fault()

    def _note(self, request: Request) -> None:
        with self._lock:
            self.log.append(request)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            hub._connections.add(self.connection)

        def finish(self) -> None:
            hub._connections.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._serve()

        def do_HEAD(self) -> None:
            self._serve()

        def _serve(self) -> None:
            self._path = urlsplit(self.path).path
            self._entry = Request(
                time=time.time(),
                method=self.command,
                path=self._path,
                range=self.headers.get("Range"),
                token=self._token(),
            )
            hub._note(self._entry)
            self._fault = hub._fault(self.command, self._path)
            if self._fault.hold is not None:
                self._fault.hold.wait(30)
            if self._fault.delay:
                _sleep(self._fault.delay)
            try:
                if self._fault.status is not None:
                    return self._refuse(self._fault.status, self._fault.code, headers=self._fault.headers)
                return self._route()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _route(self) -> None:
            for old, new in hub.renamed.items():
                if self._path.startswith((f"/{old}/", f"/api/models/{old}")):
                    return self._answer(307, b"", {"Location": self.path.replace(old, new, 1)})
            if match := re.fullmatch(r"/cdn/([0-9a-f]{64})", self._path):
                return self._cdn(match[1])
            if self._path == "/api/models":
                return self._search()
            if self._path == "/api/whoami-v2":
                return self._json({"name": "me"}) if self._token() in hub.tokens else self._refuse(401)
            if match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", self._path):
                return self._api(match[1], match[2], unquote(match[3] or "main"))
            if match := re.fullmatch(r"/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", self._path):
                return self._resolve(match[1], unquote(match[2]), unquote(match[3]))
            return self._refuse(404)

        def _token(self) -> str | None:
            scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
            return token if scheme == "Bearer" else None

        def _repo(self, repo_id: str, *, contents: bool) -> Repo | None:
            """The repo, where the request may have it; else it has been refused."""
            token = self._token()
            if token and token not in hub.tokens:
                return self._refuse(401, message="Invalid credentials in Authorization header")
            repo = hub.repos.get(repo_id)
            if repo is None or (repo.private and token not in repo.readers):
                return self._refuse(404 if token or repo is None else 401, "RepoNotFound")
            if contents and repo.gated and token not in repo.readers:
                return self._refuse(403 if token else 401, "GatedRepo")
            return repo

        def _files(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]] | None:
            commit = repo.refs.get(revision, revision)
            found = [full for full in repo.commits if full == commit or (len(commit) >= 7 and full.startswith(commit))]
            return (found[0], repo.commits[found[0]]) if found else self._refuse(404, "RevisionNotFound")

        def _api(self, repo_id: str, kind: str | None, revision: str) -> None:
            repo = self._repo(repo_id, contents=False)
            found = repo and self._files(repo, revision)
            if not found:
                return None
            commit, files = found
            entries = []
            for name, data in sorted(files.items()):
                lfs = {"sha256": _sha256(data), "oid": _sha256(data), "size": len(data), "pointerSize": 134}
                entry: dict[str, Any] = {"size": len(data)} | ({"lfs": lfs} if name.endswith(_LFS) else {})
                if kind == "tree":
                    entries.append({"type": "file", "path": name, "oid": _oid(data)} | entry)
                else:
                    blobs = "blobs" in urlsplit(self.path).query
                    entries.append({"rfilename": name} | ({"blobId": _oid(data)} | entry if blobs else {}))
            if kind == "tree":
                return self._json(entries)
            return self._json({"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": entries, "tags": []})

        def _search(self) -> None:
            query = {key: values[-1] for key, values in parse_qs(urlsplit(self.path).query).items()}
            names = sorted(name for name in hub.repos if query.get("search", "") in name)
            author = query.get("author")
            found = [name for name in names if author is None or name.startswith(f"{author}/")]
            rows = [{"id": name, "modelId": name, "downloads": 0, "likes": 0, "tags": []} for name in found]
            return self._json(rows[: int(query.get("limit", "100"))])

        def _resolve(self, repo_id: str, revision: str, name: str) -> None:
            repo = self._repo(repo_id, contents=True)
            found = repo and self._files(repo, revision)
            if not found:
                return None
            commit, files = found
            about = {"X-Repo-Commit": commit}
            data = files.get(name)
            if data is None:
                return self._refuse(404, "EntryNotFound", headers=about)
            lfs = name.endswith(_LFS)
            etag = _sha256(data) if lfs else _oid(data)
            if lfs and hub.redirect:
                about |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
                about["Location"] = f"http://localhost:{hub.port}/cdn/{etag}?Signature=secret"
                return self._answer(302, b"", about)
            return self._body(data, etag, about)

        def _cdn(self, digest: str) -> None:
            commits = [files for repo in list(hub.repos.values()) for files in repo.commits.values()]
            data = next((d for files in commits for d in files.values() if _sha256(d) == digest), None)
            return self._refuse(404) if data is None else self._body(data, digest, {})

        def _body(self, data: bytes, etag: str, about: dict[str, str]) -> None:
            about = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"} | about
            if self._fault.etag:
                about["ETag"] = f'"{self._fault.etag}"'
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not wanted or self._fault.whole:
                return self._answer(200, data, about)
            start, end = (
                min(int(place or len(data) - 1) + self._fault.shift, len(data) - 1) for place in wanted.groups()
            )
            if start > end:
                return self._refuse(416, headers={"Content-Range": f"bytes */{len(data)}"})
            about["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self._answer(206, data[start : end + 1], about)

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _refuse(
            self, status: int, code: str = "", message: str = "", headers: Mapping[str, str] | None = None
        ) -> None:
            words = {"X-Error-Code": code, "X-Error-Message": message} if hub.error_codes else {}
            self._answer(status, b"", {key: word for key, word in words.items() if word} | dict(headers or {}))

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self._entry.status = status
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            step = max(1, len(body) // 10) if self._fault.drip else max(1, len(body))
            end = len(body) if self._fault.cut is None else min(self._fault.cut, len(body))
            while self._entry.sent < end:
                piece = body[self._entry.sent : min(self._entry.sent + step, end)]
                self.wfile.write(piece)
                self._entry.sent += len(piece)
                if self._fault.drip:
                    _sleep(self._fault.drip)
            if end < len(body):
                self.close_connection = True

    return Handler


def use_hub(monkeypatch: Any, hub: HubServer, cache: Path) -> None:
    """Point this process's huggingface_hub, whose settings are read once at its import, at a server and a cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def short_waits(monkeypatch: Any, longest: float = 0.01) -> list[float]:
    """Cut every `time.sleep` of this process short, the client's too, and let `time.monotonic` go on by what was cut.

    Returns the list of the waits that were asked for.
    """
    asked: list[float] = []
    cut = 0.0
    monotonic = time.monotonic

    def sleep(seconds: float) -> None:
        nonlocal cut
        asked.append(seconds)
        cut += max(0.0, seconds - longest)
        _sleep(min(seconds, longest))

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + cut)
    return asked


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        _sleep(0.005)
    return True
