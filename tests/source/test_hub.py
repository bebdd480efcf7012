from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Fault, HubServer, use_hub
from huggingface_hub import constants

from shardesd.errors import AccessDenied, NoSpace, NotFound, Offline, SourceError
from shardesd.source import open_source

SHARD = random.Random(1).randbytes(200_000)
FILES = {"config.json": b'{"a": 1}', "model.safetensors": SHARD, "unet/model.safetensors": b"unet"}
TELLS_PROGRESS = tuple(map(int, huggingface_hub.__version__.split(".")[:2])) >= (1, 1)


def refusal(repo: str, name: str | None = "model.safetensors", kind: type[SourceError] = SourceError) -> str:
    """The one line with which a place, or a file of it, is refused."""

    def ask() -> None:
        source = open_source(repo)
        if name:
            source.path(name)

    with pytest.raises(kind) as caught:
        ask()
    assert type(caught.value) is kind
    line = str(caught.value)
    assert "\n" not in line
    assert "hf_secret" not in line
    return line


def test_files_come_with_sizes_and_digests_and_bytes_are_fetched_by_commit(hub: HubServer) -> None:
    commit = hub.add("org/name", FILES)
    source = open_source("org/name")
    assert (source.model_id, source.revision, source.commit) == ("org/name", None, commit)
    assert source.location == f"hf://org/name@{commit}"
    assert not source.partial
    refs = {ref.name: (ref.size, ref.sha256) for ref in source.files()}
    assert refs == {
        "config.json": (8, None),
        "model.safetensors": (200_000, hashlib.sha256(SHARD).hexdigest()),
        "unet/model.safetensors": (4, hashlib.sha256(b"unet").hexdigest()),
    }
    assert [(r.method, r.path) for r in hub.requests(pattern="/api/models/*")] == [
        ("GET", "/api/models/org/name/revision/main")
    ]
    assert source.local("model.safetensors") is None
    assert source.path("model.safetensors").read_bytes() == SHARD
    assert set(hub.paths("*", "*resolve*")) == {f"/org/name/resolve/{commit}/model.safetensors"}


def test_a_legacy_id_has_no_organisation(hub: HubServer) -> None:
    hub.add("gpt2", FILES)
    source = open_source("gpt2")
    assert source.model_id == "gpt2"
    assert source.path("config.json").read_bytes() == b'{"a": 1}'


@pytest.mark.parametrize("named", ["dev", "v1", "commit", "short", "refs/pr/1"])
def test_revisions(hub: HubServer, named: str) -> None:
    old = hub.add("org/name", {"model.safetensors": b"old"}, branch="dev", tag="v1")
    hub.add("org/name", {"model.safetensors": b"old"}, branch="refs/pr/1")
    new = hub.add("org/name", {"model.safetensors": b"new"})
    revision = {"commit": old, "short": old[:8]}.get(named, named)
    expected = hub.repos["org/name"].refs.get(revision, old)
    assert expected != new
    for source in (
        open_source(f"org/name@{revision}"),
        open_source("org/name", revision=revision),
        open_source(f"hf://org/name@{revision}"),
    ):
        assert (source.commit, source.revision) == (expected, revision)
        assert source.path("model.safetensors").read_bytes() == b"old"


def test_a_branch_that_moves_on_does_not_change_an_open_source(hub: HubServer) -> None:
    hub.add("org/name", {"model.safetensors": b"old"})
    source = open_source("org/name")
    hub.add("org/name", {"model.safetensors": b"new"})
    assert source.path("model.safetensors").read_bytes() == b"old"
    assert open_source("org/name").path("model.safetensors").read_bytes() == b"new"


def test_a_subfolder_is_a_place_of_its_own(hub: HubServer) -> None:
    commit = hub.add("org/name", FILES)
    source = open_source("hf://models/org/name/unet")
    assert [ref.name for ref in source.files()] == ["model.safetensors"]
    assert source.model_id == "org/name/unet"
    assert source.location == f"hf://org/name@{commit}/unet"
    assert source.path("model.safetensors").read_bytes() == b"unet"
    assert source.local("model.safetensors") is not None
    assert "no file or folder 'vae'" in refusal("hf://org/name/vae", kind=NotFound)


def test_one_file_of_a_repo(hub: HubServer) -> None:
    hub.add("org/name", {"a.safetensors": b"a", "b.safetensors": b"b", "config.json": b"{}"})
    source = open_source("hf://org/name/a.safetensors")
    assert source.file == "a.safetensors"
    assert source.model_id == "a"
    assert [ref.name for ref in source.files()] == ["a.safetensors", "config.json"]


def test_a_cached_file_is_not_fetched_again(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    open_source("org/name").path("model.safetensors")
    asked = len(hub.paths("*", "*resolve*"))
    source = open_source("org/name")
    assert source.local("model.safetensors") is not None
    source.path("model.safetensors")
    assert len(hub.paths("*", "*resolve*")) == asked


def test_the_same_blob_at_another_commit_is_not_fetched_again(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    open_source("org/name").path("model.safetensors")
    hub.add("org/name", FILES | {"README.md": b"new"})
    open_source("org/name").path("model.safetensors")
    assert len(hub.paths("GET", "*model.safetensors")) == 1


def test_a_file_is_redirected_to_another_host_which_never_sees_the_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.redirect = True
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add("org/name", FILES, private=True, readers={"hf_secret"})
    assert open_source("org/name").path("model.safetensors").read_bytes() == SHARD
    (request,) = hub.requests("GET", "/cdn/*")
    assert request.token is None


def test_a_renamed_repo(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    hub.renamed["gpt2"] = "org/name"
    source = open_source("gpt2")
    assert source.model_id == "gpt2"
    assert source.path("model.safetensors").read_bytes() == SHARD


def test_progress_is_reported_and_nothing_is_drawn(hub: HubServer, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add("org/name", FILES)
    seen: list[tuple[int, int | None]] = []
    open_source("org/name").path("model.safetensors", lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 200_000)
    assert seen[-1] == (200_000, 200_000)
    assert seen == sorted(seen)
    assert capfd.readouterr() == ("", "")


def test_progress_comes_piece_by_piece(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if not TELLS_PROGRESS:
        pytest.skip("huggingface_hub 1.0 reports nothing in between")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 20_000)
    hub.add("org/name", FILES)
    hub.fail("*model.safetensors", Fault(drip=0.03), method="GET")
    seen: list[int] = []
    open_source("org/name").path("model.safetensors", lambda done, total: seen.append(done))
    assert len([done for done in seen if 0 < done < 200_000]) >= 2


# Offline


def test_offline_with_a_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("org/name", FILES, tag="v1")
    for revision in (None, "v1"):
        open_source("org/name", revision=revision).path("model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.log)
    for repo in ("org/name", "org/name@v1", f"org/name@{commit}"):
        source = open_source(repo)
        assert source.partial
        assert source.commit == commit
        assert [(ref.name, ref.size, ref.sha256) for ref in source.files()] == [
            ("model.safetensors", 200_000, hashlib.sha256(SHARD).hexdigest())
        ]
        assert source.path("model.safetensors").read_bytes() == SHARD
    line = refusal("org/name", "config.json", Offline)
    assert "'config.json' of 'org/name' is not in the Hub cache" in line
    assert "revision 'v2'" in refusal("org/name@v2", None, Offline)
    assert "'unet' of 'org/name' is not in the Hub cache" in refusal("hf://org/name/unet", None, Offline)
    assert len(hub.log) == asked


def test_offline_without_a_cache(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = refusal("org/name", None, Offline)
    assert "HF_HUB_OFFLINE is set" in line
    assert str(cache) in line


def test_no_network_is_as_good_as_offline(
    cache: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with HubServer() as hub:
        use_hub(monkeypatch, hub, cache)
        commit = hub.add("org/name", FILES)
        open_source("org/name").path("model.safetensors")
        held = open_source("org/name")
    source = open_source("org/name")  # the server is gone
    assert source.commit == commit
    assert source.partial
    assert source.path("model.safetensors").read_bytes() == SHARD
    assert "can't be reached; using commit" in caplog.text
    assert sum(waits) < 5
    assert hub.url in refusal("org/other", None, Offline)
    with pytest.raises(Offline, match=r"unet/model.safetensors.*is not in the Hub cache"):
        source.path("unet/model.safetensors")
    with pytest.raises(Offline, match="can't be reached"):
        held.path("config.json")
    assert sum(waits) < 60


# Refusals


def test_no_such_repo(hub: HubServer) -> None:
    line = refusal("org/nmae", None, NotFound)
    assert "no model 'org/nmae'" in line
    assert hub.url in line


def test_no_such_revision(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    assert "'org/name' has no revision 'v9'" in refusal("org/name@v9", None, NotFound)


def test_no_such_file(hub: HubServer) -> None:
    hub.add("org/name", FILES)
    assert "there is no file 'x.safetensors' in 'org/name'" in refusal("org/name", "x.safetensors", NotFound)
    hub.fail("*/model.safetensors", Fault(status=404, code="EntryNotFound"), forever=True)
    assert "'model.safetensors' of 'org/name'" in refusal("org/name", kind=NotFound)


def test_a_gated_repo(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES, gated=True, readers={"hf_reader"})
    hub.tokens.add("hf_secret")
    for token in (None, "hf_secret"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        line = refusal("org/name", kind=AccessDenied)
        assert f"is gated: open {hub.url}/org/name and accept its conditions" in line
        assert "hf auth login" in line
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert open_source("org/name").path("model.safetensors").read_bytes() == SHARD


def test_a_private_repo(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES, private=True, readers={"hf_reader"})
    line = refusal("org/name", None, NotFound)
    assert "no model 'org/name'" in line
    assert "if it is private set HF_TOKEN or run `hf auth login`" in line
    monkeypatch.setenv("HF_TOKEN", "hf_secret_unknown")
    assert "the token was refused" in refusal("org/name", None, AccessDenied)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert open_source("org/name").path("model.safetensors").read_bytes() == SHARD


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [(401, AccessDenied, "set HF_TOKEN"), (403, AccessDenied, "accept its conditions"), (404, NotFound, "no ")],
)
def test_bare_statuses(hub: HubServer, status: int, kind: type[SourceError], words: str) -> None:
    hub.add("org/name", FILES)
    hub.fail("*/model.safetensors", Fault(status=status), forever=True)
    line = refusal("org/name", kind=kind)
    assert words in line
    assert "'model.safetensors' of 'org/name'" in line
    hub.fail("/api/models/*", Fault(status=status), forever=True)
    assert words in refusal("org/name", None, kind)


def test_an_endpoint_that_is_no_hub(hub: HubServer) -> None:
    hub.fail("/api/models/*", Fault(status=200))
    line = refusal("org/name", None)
    assert hub.url in line


def test_a_password_in_the_endpoint_is_not_shown(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("://", "://user:hf_secret@"))
    assert hub.url in refusal("org/name", None, NotFound)


# Trouble that passes, and trouble that doesn't


def test_rate_limits_are_waited_for(hub: HubServer, waits: list[float]) -> None:
    hub.add("org/name", FILES)
    hub.fail("/api/models/*", Fault(status=429, headers={"RateLimit": '"api";r=0;t=7'}))
    hub.fail("*/model.safetensors", Fault(status=429, headers={"Retry-After": "11"}), method="GET")
    assert open_source("org/name").path("model.safetensors").read_bytes() == SHARD
    assert 8.0 in waits  # the Hub rounds down
    if TELLS_PROGRESS:
        assert {11.0, 12.0} & set(waits)


def test_a_rate_limit_before_a_download(hub: HubServer, waits: list[float]) -> None:
    hub.add("org/name", FILES)
    hub.fail("*/model.safetensors", Fault(status=429, headers={"Retry-After": "11"}), method="HEAD")
    assert open_source("org/name").path("model.safetensors").read_bytes() == SHARD
    assert sum(waits) < 15


def test_trouble_after_a_rate_limit_has_patience_of_its_own(hub: HubServer, waits: list[float]) -> None:
    hub.add("org/name", FILES)
    limit = Fault(status=429, headers={"Retry-After": "100"})
    hub.fail("/api/models/*", limit, Fault(status=500), Fault(status=500))
    assert open_source("org/name").commit
    assert waits[0] == 100.0


def test_a_rate_limit_that_does_not_end(hub: HubServer, waits: list[float]) -> None:
    hub.fail("/api/models/*", Fault(status=429, headers={"Retry-After": "20"}), forever=True)
    line = refusal("org/name", None)
    assert "limits the rate of requests" in line
    assert waits == [20.0] * 5


def test_a_rate_limit_of_an_hour_is_not_waited_for(hub: HubServer, waits: list[float]) -> None:
    hub.fail("/api/models/*", Fault(status=429, headers={"Retry-After": "3600"}), forever=True)
    assert "asks to wait 3600 s" in refusal("org/name", None)
    assert waits == []


@pytest.mark.parametrize("status", [500, 503])
def test_server_errors_pass(hub: HubServer, waits: list[float], status: int) -> None:
    hub.add("org/name", FILES)
    hub.fail("/api/models/*", Fault(status=status), Fault(status=status))
    hub.fail("*/model.safetensors", Fault(status=status), Fault(status=status), Fault(status=status))
    assert open_source("org/name").path("model.safetensors").read_bytes() == SHARD


def test_persistent_server_errors_end_soon(
    hub: HubServer, waits: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/name", FILES)
    source = open_source("org/name")
    hub.fail("*/model.safetensors", Fault(status=500), method="GET", forever=True)
    with pytest.raises(SourceError, match=r"keeps failing with status 500 at 'model.safetensors' of 'org/name'"):
        source.path("model.safetensors")
    assert 5 < sum(waits) < 60
    hub.mend()
    waits.clear()
    hub.fail("/api/models/*", Fault(status=502), forever=True)
    assert "status 502" in refusal("org/name", None)
    assert 5 < sum(waits) < 60
    assert capfd.readouterr().err == ""


def test_a_connection_cut_in_mid_file(hub: HubServer, waits: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    hub.add("org/name", FILES)
    hub.fail("*/model.safetensors", Fault(cut=70_000), Fault(cut=60_000), method="GET")
    seen: list[int] = []
    path = open_source("org/name").path("model.safetensors", lambda done, total: seen.append(done))
    assert path.read_bytes() == SHARD
    assert seen[-1] == 200_000
    assert len(hub.paths("GET", "*/model.safetensors")) == 3
    assert capfd.readouterr().err == ""


def test_a_connection_that_is_always_cut(hub: HubServer, waits: list[float]) -> None:
    hub.add("org/name", FILES)
    source = open_source("org/name")
    hub.fail("*/model.safetensors", Fault(cut=0), method="GET", forever=True)
    with pytest.raises(SourceError, match=r"kept breaking off at 'model.safetensors' of 'org/name'"):
        source.path("model.safetensors")
    assert sum(waits) < 60
    assert not list(Path(constants.HF_HUB_CACHE).rglob("snapshots/*/model.safetensors"))


# Disks


def test_no_space_is_seen_before_a_download(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES)
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 100_000, 100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line = refusal("org/name", kind=NoSpace)
    assert f"'{cache}': it needs 0.2 MB and 0.1 MB is free" in line
    assert hub.paths("*", "*resolve*") == []


def test_a_blob_that_is_here_already_needs_no_space(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES)
    open_source("org/name").path("model.safetensors")
    hub.add("org/name", FILES | {"README.md": b"new"})
    source = open_source("org/name")
    assert source.local("model.safetensors") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(1, 1, 0))
    assert source.path("model.safetensors").read_bytes() == SHARD


def test_a_disk_that_fills_up_during_a_download(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", FILES)
    source = open_source("org/name")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(NoSpace) as caught:
        source.path("model.safetensors")
    assert str(cache) in str(caught.value)
    assert "it needs 0.2 MB and " in str(caught.value)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written(hub: HubServer, cache: Path) -> None:
    hub.add("org/name", FILES)
    cache.chmod(0o500)
    assert "can't be written" in refusal("org/name")


def test_names_that_lead_outside(hub: HubServer) -> None:
    hub.add("org/name", FILES | {"../../evil.safetensors": b"x"})
    source = open_source("org/name")
    for name in ("../../evil.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:x", ""):
        assert source.local(name) is None
        with pytest.raises(SourceError, match="leads outside"):
            source.path(name)
