from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Fault, HubServer, wait_until
from huggingface_hub import constants

from shardesd.errors import SourceError
from shardesd.events import Fetching
from shardesd.records import ShardRef
from shardesd.source import Fetcher, Source, open_source

COUNT = 4
TELLS_PROGRESS = tuple(map(int, huggingface_hub.__version__.split(".")[:2])) >= (1, 1)


def fetch_in_order(
    source: Source, shards: Sequence[ShardRef], on_fetch: Callable[[Fetching], None]
) -> Iterator[tuple[ShardRef, Path]]:
    """A consumer that works one shard off before it asks for the next."""
    with Fetcher(source, shards, on_fetch) as fetcher:
        for shard, path in fetcher:
            yield shard, path
            fetcher.done(shard.name)


@pytest.fixture
def source(hub: HubServer) -> Source:
    hub.add("org/name", {f"{k}.safetensors": bytes([k]) * 50_000 for k in range(COUNT)})
    return open_source("org/name")


def fetched(hub: HubServer) -> list[str]:
    return [path.rpartition("/")[2] for path in hub.paths("GET", "*.safetensors")]


def downloads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch ")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert wait_until(lambda: not downloads())


def test_one_shard_ahead_and_never_two(hub: HubServer, source: Source) -> None:
    events: list[Fetching] = []
    shards = source.files()
    got = fetch_in_order(source, shards, events.append)
    assert fetched(hub) == []
    for k in range(COUNT):
        shard, path = next(got)
        assert shard is shards[k]
        assert path.read_bytes() == bytes([k]) * 50_000
        ahead = [f"{n}.safetensors" for n in range(min(k + 2, COUNT))]
        assert wait_until(lambda ahead=ahead: fetched(hub) == ahead)
        assert wait_until(lambda: not downloads())
        time.sleep(0.02)
        assert fetched(hub) == ahead
    assert list(got) == []
    assert [event for event in events if event.done == 0] == [
        Fetching(shard=f"{k}.safetensors", done=0, total=50_000) for k in range(COUNT)
    ]


def test_the_next_download_runs_while_a_shard_is_worked_on(hub: HubServer, source: Source) -> None:
    free = threading.Event()
    hub.fail("*/1.safetensors", Fault(hold=free), method="GET")
    got = fetch_in_order(source, source.files(), lambda event: None)
    next(got)
    assert wait_until(lambda: "1.safetensors" in fetched(hub))  # asked for, and held
    free.set()
    assert next(got)[1].read_bytes() == bytes([1]) * 50_000
    got.close()


def test_what_is_cached_starts_no_download(hub: HubServer, source: Source) -> None:
    for shard in source.files():
        source.path(shard.name)
    before = len(hub.log)
    events: list[Fetching] = []
    assert len(list(fetch_in_order(source, source.files(), events.append))) == COUNT
    assert len(hub.log) == before
    assert events == []


def test_an_error_is_raised_when_its_shard_is_due(hub: HubServer, source: Source) -> None:
    hub.fail("*/1.safetensors", Fault(status=403), forever=True)
    got = fetch_in_order(source, source.files(), lambda event: None)
    next(got)
    assert wait_until(lambda: not downloads())
    with pytest.raises(SourceError, match=r"1\.safetensors"):
        next(got)
    assert "2.safetensors" not in fetched(hub)


def test_closing_ends_a_download(hub: HubServer, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 5_000)
    hub.fail("*/1.safetensors", Fault(drip=0.2), method="GET")
    begun = threading.Event()

    def on_fetch(event: Fetching) -> None:
        if event.shard == "1.safetensors":
            begun.set()

    got = fetch_in_order(source, source.files(), on_fetch)
    next(got)
    assert begun.wait(5)
    started = time.monotonic()
    got.close()
    assert time.monotonic() - started < 1.5
    if TELLS_PROGRESS:
        assert wait_until(lambda: not downloads())
        assert source.local("1.safetensors") is None
        assert len(fetched(hub)) == 2


def test_a_shard_still_in_work_holds_back_the_one_after_the_next(hub: HubServer, source: Source) -> None:
    with Fetcher(source, source.files(), lambda event: None) as fetcher:
        got = iter(fetcher)
        next(got)
        next(got)
        assert wait_until(lambda: not downloads())
        assert fetched(hub) == ["0.safetensors", "1.safetensors"]  # 0 and 1 are being worked on
        assert fetcher.done("0.safetensors")
        assert wait_until(lambda: fetched(hub)[2:] == ["2.safetensors"])
        assert not fetcher.done("0.safetensors")
        next(got)
        threading.Timer(0.2, fetcher.done, ["1.safetensors"]).start()
        started = time.monotonic()
        next(got)  # waits until no more than one other shard is being worked on
        assert time.monotonic() - started > 0.1
        assert fetched(hub)[3:] == ["3.safetensors"]


def test_closing_ends_a_wait_for_done(source: Source) -> None:
    with Fetcher(source, source.files(), lambda event: None) as fetcher:
        names: list[str] = []
        thread = threading.Thread(target=lambda: names.extend(shard.name for shard, _ in fetcher), daemon=True)
        thread.start()
        assert wait_until(lambda: len(names) == 2)
    thread.join(5)
    assert not thread.is_alive()
    assert names == ["0.safetensors", "1.safetensors"]


class _Slow:
    """A source whose downloads never end, and don't ask whether they are wanted."""

    def local(self, name: str) -> Path | None:
        return None

    def path(self, name: str, progress: object = None) -> Path:
        time.sleep(1.2)
        return Path(name)


def test_closing_does_not_wait_for_a_download_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardesd.source.fetch._GRACE_SECONDS", 0.05)
    with Fetcher(_Slow(), [ShardRef(name="a")], lambda event: None) as fetcher:  # type: ignore[arg-type]
        threading.Thread(target=lambda: list(fetcher), daemon=True).start()
        assert wait_until(lambda: bool(downloads()))
        started = time.monotonic()
    assert time.monotonic() - started < 1
    assert all(thread.daemon for thread in downloads())


class _Meanwhile:
    """A source whose one file is brought by somebody else between two looks."""

    looks = 0

    def local(self, name: str) -> Path | None:
        self.looks += 1
        return None if self.looks == 1 else Path(name)

    def path(self, name: str, progress: object = None) -> Path:
        return Path(name)


def test_a_shard_that_another_process_brings_meanwhile() -> None:
    ref = ShardRef(name="a")
    assert list(fetch_in_order(_Meanwhile(), [ref], lambda event: None)) == [(ref, Path("a"))]  # type: ignore[arg-type]


class _Brought:
    """A source whose second file is brought by somebody else while its download here is under way."""

    def __init__(self) -> None:
        self.brought, self.free = threading.Event(), threading.Event()
        self.done: list[str] = []

    def local(self, name: str) -> Path | None:
        return Path(name) if name == "b" and self.brought.is_set() else None

    def path(self, name: str, progress: object = None) -> Path:
        assert name == "a" or self.free.wait(5)
        self.done.append(f"{name} downloaded")
        return Path(name)


def test_a_shard_is_not_handed_out_before_its_own_download_has_ended() -> None:
    """Removed before that ends, it would be brought once more and stay."""
    source = _Brought()
    for shard, _ in fetch_in_order(source, [ShardRef(name="a"), ShardRef(name="b")], lambda event: None):  # type: ignore[arg-type]
        source.done.append(f"{shard.name} handed out")
        source.brought.set()
        threading.Timer(0.2, source.free.set).start()
    assert source.done == ["a downloaded", "a handed out", "b downloaded", "b handed out"]
