"""Ranges of a file on the Hub: right bytes or an error, whatever the server does."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable

import pytest
from hub_server import Fault, HubServer, wait_until

from shardesd.errors import AccessDenied, NoRanges, NotFound, ShardChanged, SourceError
from shardesd.source import Remote, open_source
from shardesd.source import remote as remote_module

DATA = random.Random(2).randbytes(100_000)
NAME = "model.safetensors"


@pytest.fixture
def remote(hub: HubServer) -> Remote:
    hub.add("org/name", {NAME: DATA})
    found = open_source("org/name").remote(NAME)
    assert found is not None
    return found


def got(hub: HubServer) -> int:
    return sum(request.sent for request in hub.requests("GET", "*.safetensors") + hub.requests("GET", "/cdn/*"))


def test_any_range(hub: HubServer, remote: Remote) -> None:
    for start, end in ((0, 8), (5, 77_777), (99_999, 100_000), (0, 100_000), (40, 40)):
        assert remote.bytes(start, end) == DATA[start:end]
    assert remote.bytes(99_000, 200_000) == DATA[99_000:]
    assert wait_until(lambda: got(hub) == 8 + 77_772 + 1 + 100_000 + 1000)


def test_a_size_that_is_not_known_is_learned(hub: HubServer) -> None:
    hub.add("org/name", {NAME: DATA})
    explain: Callable[..., SourceError] = lambda fault: SourceError(fault.detail)  # noqa: E731
    url = f"{hub.url}/org/name/resolve/main/{NAME}"
    found = Remote(url, what="it", size=None, sha256=None, explain=explain)
    assert found.bytes(99_000, 200_000) == DATA[99_000:]
    assert found.size == 100_000


def test_places_that_have_no_server(hub: HubServer, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    hub.add("org/name", {NAME: DATA})
    source = open_source("org/name")
    assert source.remote("other.safetensors") is None
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / NAME).write_bytes(DATA)
    assert open_source(tmp_path / "folder").remote(NAME) is None
    source.path(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_source("org/name").remote(NAME) is None


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(cut=0)],
        [Fault(cut=30_000), Fault(cut=1), Fault(cut=20_000)],
        [Fault(status=429, headers={"Retry-After": "7"})],
        [Fault(status=429, headers={"RateLimit": '"resolvers";r=0;t=6'})],
        [Fault(status=500), Fault(status=502), Fault(status=503)],
        [Fault(cut=50_000), Fault(status=500), Fault(cut=10)],
    ],
    ids=["cut", "cut thrice", "429", "429 by RateLimit", "5xx", "cut and 5xx"],
)
@pytest.mark.parametrize("redirect", [False, True])
def test_passing_faults(
    hub: HubServer, remote: Remote, waits: list[float], faults: list[Fault], redirect: bool
) -> None:
    hub.redirect = redirect
    hub.fail("/cdn/*" if redirect else f"*/{NAME}", *faults, method="GET")
    assert remote.bytes(1000, 90_000) == DATA[1000:90_000]
    # What had come is not asked for again.
    cut = sum(fault.cut or 0 for fault in faults)
    assert wait_until(lambda: got(hub) == 89_000)
    assert len([request for request in hub.log if request.range and request.status == 206]) >= 1 + bool(cut)
    if faults[0].status == 429:
        assert 7.0 in waits
    if faults[0].cut == 30_000:
        assert [request.range for request in hub.log if request.range and request.status == 206][-1] == (
            "bytes=51001-89999"
        )


def test_a_slow_drip_is_waited_for(hub: HubServer, remote: Remote) -> None:
    hub.fail(f"*/{NAME}", Fault(drip=0.05))
    assert remote.bytes(0, 50_000) == DATA[:50_000]
    assert len(hub.paths("GET", f"*/{NAME}")) == 1


def test_a_connection_that_stalls_is_begun_anew(
    hub: HubServer, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "_TIMEOUT", 0.2)
    hub.fail(f"*/{NAME}", Fault(hold=threading.Event()))
    assert remote.bytes(0, 50_000) == DATA[:50_000]


def test_faults_that_last(hub: HubServer, remote: Remote, waits: list[float]) -> None:
    for fault, kind, words in (
        (Fault(status=500), SourceError, "keeps failing with status 500"),
        (Fault(cut=0), SourceError, "kept breaking off"),
        (Fault(status=403), AccessDenied, "403"),
        (Fault(status=404, code="EntryNotFound"), NotFound, NAME),
    ):
        hub.mend()
        hub.fail(f"*/{NAME}", fault, forever=True)
        with pytest.raises(kind, match=words) as caught:
            remote.bytes(0, 10)
        assert f"'{NAME}' of 'org/name'" in str(caught.value)
    assert sum(waits) < 120


def test_a_server_that_ignores_ranges_is_noticed_at_once(hub: HubServer, remote: Remote) -> None:
    hub.fail(f"*/{NAME}", Fault(whole=True, drip=0.5))
    with pytest.raises(NoRanges, match=r"status 200 at 'model.safetensors' of 'org/name'.*--fetch shards"):
        remote.bytes(10, 20)


def test_another_file_under_the_same_address_is_never_read(hub: HubServer, remote: Remote) -> None:
    assert remote.bytes(0, 10) == DATA[:10]
    for fault, words in ((Fault(etag="0" * 64), "ETag"), (Fault(shift=5), "bytes 15 to 24"), (Fault(etag="x"), "ETag")):
        hub.fail(f"*/{NAME}", fault)
        with pytest.raises(ShardChanged, match=words):
            remote.bytes(10, 20)
    commit = hub.repos["org/name"].refs["main"]
    hub.repos["org/name"].commits[commit][NAME] = DATA + b"more"
    with pytest.raises(ShardChanged, match="has 100004 bytes where it had 100000"):
        remote.bytes(10, 20)
    hub.repos["org/name"].commits[commit][NAME] = bytes(100_000)
    with pytest.raises(ShardChanged, match="ETag"):
        remote.bytes(10, 20)


def test_the_first_answer_is_held_against_the_listing(hub: HubServer, remote: Remote) -> None:
    """A digest that the Hub's listing told, and another one from the file's own server: never read."""
    hub.fail(f"*/{NAME}", Fault(etag=hashlib.sha256(b"other").hexdigest()))
    with pytest.raises(ShardChanged, match="ETag"):
        remote.bytes(10, 20)


def test_a_change_in_the_middle_is_noticed(hub: HubServer, remote: Remote, waits: list[float]) -> None:
    hub.fail(f"*/{NAME}", Fault(cut=100), Fault(etag="other"))
    with pytest.raises(ShardChanged):
        remote.bytes(0, 1000)


def test_a_signed_address_is_used_until_it_expires_and_never_gets_the_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.redirect = True
    hub.add("org/name", {NAME: DATA}, gated=True, readers={"hf_reader"})
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    remote = open_source("org/name").remote(NAME)
    assert remote is not None
    for start in range(0, 50_000, 10_000):
        assert remote.bytes(start, start + 10_000) == DATA[start : start + 10_000]
    assert len(hub.paths("GET", f"*/{NAME}")) == 1
    for status in (403, 401, 400, 410, 404):
        hub.fail("/cdn/*", Fault(status=status))
        assert remote.bytes(7, 99) == DATA[7:99]
    assert len(hub.paths("GET", f"*/{NAME}")) == 6
    assert {request.token for request in hub.requests("GET", f"*/{NAME}")} == {"hf_reader"}
    assert {request.token for request in hub.requests("GET", "/cdn/*")} == {None}
    hub.fail("/cdn/*", Fault(status=403), forever=True)
    with pytest.raises(AccessDenied):
        remote.bytes(0, 10)


def test_an_address_that_expires_between_two_parts(hub: HubServer, remote: Remote, waits: list[float]) -> None:
    hub.redirect = True
    hub.fail("/cdn/*", Fault(cut=20_000), Fault(status=403))
    assert remote.bytes(0, 60_000) == DATA[:60_000]
    assert wait_until(lambda: got(hub) == 60_000)


def test_a_renamed_repo_is_followed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", {NAME: DATA}, private=True, readers={"hf_reader"})
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    source = open_source("org/name")
    hub.repos["new/name"] = hub.repos.pop("org/name")
    hub.renamed["org/name"] = "new/name"
    remote = source.remote(NAME)
    assert remote is not None
    assert remote.bytes(0, 10) == DATA[:10]


def test_what_the_sink_raises_ends_it(hub: HubServer, remote: Remote) -> None:
    def sink(at: int, data: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remote.read(0, 1000, sink)
    assert len(hub.paths("GET", f"*/{NAME}")) == 1
