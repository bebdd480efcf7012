"""`--evict` and `--max-disk`: the disk is never filled, and nothing of the user's is ever removed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from checkpoints import command, random_weights, sharded
from hub_server import Fault, HubServer, use_hub

import shardesd
from shardesd import pipeline
from shardesd.errors import NoSpace, NotFound
from shardesd.records import ShardRef
from shardesd.source import Fetcher, open_source

hub_cache = pytest.importorskip("huggingface_hub.utils._cache_manager")
pytestmark = pytest.mark.skipif(
    not hasattr(hub_cache.HFCacheInfo, "delete_files"), reason="huggingface_hub before 1.33 deletes no single files"
)
SHARDS = "*.safetensors"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten shards, the embedding in the first and an untied head in the last; in all of them most bytes are needed."""
    tensors = random_weights(layers=20, size=64)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:64]
    tensors["lm_head.weight"] = np.random.default_rng(8).standard_normal((64, 64)).astype(np.float32)
    return sharded(tmp_path / "weights", tensors, 10)


@pytest.fixture
def snapshot(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub cache's, of `folder` as org/name, all of which has been downloaded."""
    use_hub(monkeypatch, hub, tmp_path / "hub-cache")
    hub.add("org/name", folder)
    shardesd.scan("org/name")
    (found,) = next((tmp_path / "hub-cache").rglob("snapshots")).iterdir()
    return found


def on_disk(cache: Path) -> set[str]:
    """Contents of weights in a Hub cache, finished or not."""
    found = set()
    for blobs in cache.rglob("blobs"):
        for path in blobs.iterdir():
            try:
                large = path.stat().st_size > 8_000
            except OSError:
                continue  # gone between listing and asking
            if large or path.name.endswith(".incomplete"):
                found.add(path.name[:64])
    return found


@contextmanager
def watched(cache: Path, but: set[str] = frozenset()) -> Iterator[list[int]]:  # type: ignore[assignment]
    """How many shards besides `but` were on the disk, at every moment of the block."""
    counts: list[int] = [0]
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            with suppress(OSError):  # a folder that goes while it is listed
                counts.append(len(on_disk(cache) - but))
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("fetch", ["auto", "shards"])
@pytest.mark.parametrize("cached", [True, False])
def test_never_more_than_two_and_what_was_there_stays(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: str, cached: bool
) -> None:
    cache = tmp_path / "hub-cache"
    use_hub(monkeypatch, hub, cache)
    hub.add("org/name", folder)
    before = [open_source("org/name").path(f"model-{k:05}-of-00010.safetensors") for k in (1, 4, 10)]
    theirs = on_disk(cache)
    assert len(theirs) == 3
    with watched(cache, theirs) as counts:
        result = shardesd.scan("org/name", evict=True, fetch=fetch, cache=cached)
    assert 1 <= max(counts) <= 2
    assert on_disk(cache) == theirs
    assert all(path.exists() for path in before)
    local = shardesd.scan(folder, cache=False)
    assert result.layers.height == 61
    assert result.layers["alpha"].to_list() == local.layers["alpha"].to_list()
    # Each of the seven was downloaded once.
    wholes = [r.path for r in hub.requests("GET", SHARDS) if r.range is None]
    assert len(wholes) == len(set(wholes)) == 10


def test_without_evict_all_stay(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, hub, tmp_path / "hub-cache")
    hub.add("org/name", folder)
    shardesd.scan("org/name")
    assert len(on_disk(tmp_path / "hub-cache")) == 10


def test_the_first_scan_of_a_machine_can_evict(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing has been downloaded there is no cache yet."""
    use_hub(monkeypatch, hub, tmp_path / "home" / "hub-cache")
    hub.add("org/name", folder)
    assert shardesd.scan("org/name", evict=True).layers.height == 61
    assert not on_disk(tmp_path / "home" / "hub-cache")


@pytest.mark.parametrize("how", ["through a link", "relative", "through a link within"])
def test_the_cache_may_lie_anywhere(
    how: str, hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home, or the cache in it, that is elsewhere is common where disks are shared."""
    real, cache = tmp_path / "large disk" / "hub", tmp_path / "home" / "hub"
    real.mkdir(parents=True)
    if how == "through a link":
        cache.parent.symlink_to(real.parent, target_is_directory=True)
    elif how == "relative":
        monkeypatch.chdir(tmp_path)
        cache = Path("large disk/hub")
    else:
        cache.mkdir(parents=True)
        (real / "models--org--name").mkdir()
        (cache / "models--org--name").symlink_to(real / "models--org--name", target_is_directory=True)
    use_hub(monkeypatch, hub, cache)
    hub.add("org/name", folder)
    said: list[str] = []
    result = shardesd.scan(
        "org/name", evict=True, fetch="shards", on_event=lambda event: said.append(getattr(event, "message", ""))
    )
    assert result.layers.height == 61
    assert not [words for words in said if "removed" in words]
    assert not on_disk(real)


def test_links_to_content_that_is_gone_are_in_nobody_s_way(snapshot: Path, tmp_path: Path) -> None:
    """Two scans that evict each other's shards leave some, and huggingface_hub then passes over the model."""
    source = open_source("org/name")
    blobs = snapshot.parents[1] / "blobs"
    (snapshot / "gone.safetensors").symlink_to(blobs / ("0" * 64))
    source.evict("")
    assert not (snapshot / "gone.safetensors").is_symlink()
    assert len(list(snapshot.glob(SHARDS))) == 10
    for name in sorted(path.name for path in snapshot.glob(SHARDS)):
        (snapshot / "gone.safetensors").symlink_to(blobs / ("0" * 64))
        source.evict(name)
    assert not list(snapshot.glob(SHARDS))
    # The user's own stay: their disk may be away.
    (tmp_path / "mounted").mkdir()
    for number, own in enumerate((tmp_path / "a disk" / "that is away", tmp_path / "mounted" / "mine")):
        (snapshot / f"own{number}.safetensors").symlink_to(own)
    (snapshot / "linked.safetensors").symlink_to(blobs / "to a store")
    (blobs / "to a store").symlink_to(tmp_path / "mounted" / "store")
    source.evict("")
    assert len([path for path in snapshot.iterdir() if path.is_symlink() and not path.exists()]) == 3
    blobs.rename(tmp_path / "mounted" / "blobs")
    blobs.symlink_to(tmp_path / "mounted" / "away")
    before = sorted(snapshot.iterdir())
    source.evict("")
    assert sorted(snapshot.iterdir()) == before
    assert any(path.name.endswith(".index.json") for path in before), "one of the cache's own"


def test_a_link_to_content_that_comes_again_stays(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the content and the link's removal."""
    looks: dict[Path, int] = {}

    def is_gone(path: Path) -> bool:
        looks[path] = looks.get(path, 0) + 1
        return looks[path] == 1

    monkeypatch.setattr("shardesd.source.hub._is_gone", is_gone)
    open_source("org/name").evict("")
    assert set(looks.values()) == {2}
    assert len(list(snapshot.rglob(SHARDS))) == 10
    assert all(path.exists() for path in snapshot.rglob(SHARDS))


def test_content_that_another_commit_uses_stays(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path / "hub-cache")
    hub.add("org/name", folder)
    old = open_source("org/name").path("model-00003-of-00010.safetensors")
    (folder / "README.md").write_text("another commit")
    hub.add("org/name", folder)
    shardesd.scan("org/name", evict=True)
    assert old.read_bytes() == (folder / "model-00003-of-00010.safetensors").read_bytes()
    assert len(on_disk(tmp_path / "hub-cache")) == 1


def test_content_that_two_commits_share_goes_though_both_are_evicted_at_once(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path / "hub-cache")
    sources = []
    for branch in ("one", "two"):
        (folder / "README.md").write_text(branch)
        hub.add("org/name", folder, branch=branch)
        sources.append(open_source(f"hf://org/name@{branch}"))
    name = "model-00003-of-00010.safetensors"
    for source in sources:
        source.path(name)
    from shardesd.source import hub as module

    real, both = module.scan_cache, threading.Barrier(2)

    def listed(repo_id: str) -> Any:
        found = real(repo_id)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # so that each would see the other's entry, if it could
        return found

    monkeypatch.setattr(module, "scan_cache", listed)
    threads = [threading.Thread(target=source.evict, args=(name,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk(tmp_path / "hub-cache") == set()


def test_downloads_leave_no_threads(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path / "hub-cache")
    hub.add("org/name", folder)

    def monitors() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if type(thread).__name__ == "TMonitor"}

    before = monitors()  # another's, of bars that are drawn
    shardesd.scan("org/name", evict=True, fetch="shards", cache=False)
    assert monitors() <= before


@pytest.mark.parametrize("results", ["kept", "lost"])
def test_killed_in_the_middle_and_run_again(hub: HubServer, folder: Path, tmp_path: Path, results: str) -> None:
    home, out = tmp_path / "home", tmp_path / "results"
    hub.add("org/name", folder)
    env = hub.env(cache_home=home, HF_HUB_DISABLE_XET="1")
    first = [
        "from shardesd.source import open_source",
        "open_source('org/name').path('model-00009-of-00010.safetensors')",
    ]
    subprocess.run([command()[0], "-c", "; ".join(first)], env=env, check=True)
    theirs = on_disk(home)
    assert len(theirs) == 1
    arguments = command("scan", "org/name", "--out", out, "--evict", "--quiet", "--no-cache")
    seed = random.Random(11)
    with watched(home, theirs) as counts:
        for number in (3, 5, 7):
            hub.fail(f"*-{number:05}-of-*", Fault(), Fault(drip=0.05), method="GET")
            scan = subprocess.Popen(arguments, env=env)
            deadline = time.monotonic() + 40
            while scan.poll() is None and time.monotonic() < deadline:
                if any(r.range is None for r in hub.requests("GET", f"*-{number:05}-of-*")):
                    break
                time.sleep(0.005)
            time.sleep(seed.random() * 0.3)
            scan.send_signal(signal.SIGKILL)
            scan.wait()
            hub.mend()
            hub.log.clear()
            if results == "lost":
                shutil.rmtree(out, ignore_errors=True)
        done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert max(counts) <= 2
    assert on_disk(home) == theirs
    downloads = Path(os.environ["XDG_CACHE_HOME"], "shardesd", "downloads")
    assert downloads.is_dir()
    assert not list(downloads.rglob("*.json"))


@pytest.mark.parametrize("fetch", ["shards", "ranges"])
@pytest.mark.parametrize("known", [False, True], ids=["", "known before"])
def test_a_shard_that_another_scan_evicts_before_it_is_opened(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: str, known: bool
) -> None:
    cache = tmp_path / "hub-cache"
    use_hub(monkeypatch, hub, cache)
    hub.add("org/name", folder)
    source = open_source("org/name")
    gone = [f"model-{k:05}-of-00010.safetensors" for k in (1, 5, 10)]
    for name in gone if known else gone[1:]:
        source.path(name)

    class Late(Fetcher):
        def __iter__(self) -> Iterator[tuple[ShardRef, Path | None]]:
            for shard, path in super().__iter__():
                if path is not None and shard.name in gone:
                    source.evict(shard.name)
                    time.sleep(0.01)  # so that the next copy has another time
                yield shard, path

    local = shardesd.scan(folder, cache=False)
    monkeypatch.setattr(pipeline, "Fetcher", Late)
    result = shardesd.scan("org/name", fetch=fetch, cache=False)
    assert result.layers["alpha"].to_list() == local.layers["alpha"].to_list()
    assert {name: source.local(name) is None for name in gone} == dict.fromkeys(gone, fetch == "ranges")


def test_a_shard_that_is_evicted_as_soon_as_it_is_here(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path / "hub-cache")
    hub.add("org/name", folder)
    download = huggingface_hub.hf_hub_download
    left = [2]

    def evicted(*arguments: Any, revision: str, **options: Any) -> str:
        path = download(*arguments, revision=revision)  # another scan's: no progress is told
        if left[0] and path.endswith("model-00005-of-00010.safetensors"):
            left[0] -= 1
            Path(path).unlink()
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", evicted)
    result = shardesd.scan("org/name", fetch="shards", cache=False)
    local = shardesd.scan(folder, cache=False)
    assert left == [0]
    assert result.layers["alpha"].to_list() == local.layers["alpha"].to_list()


def test_a_file_that_is_gone_for_good_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Fetcher):
        def __iter__(self) -> Iterator[tuple[ShardRef, Path | None]]:
            for shard, path in super().__iter__():
                (folder / "model-00005-of-00010.safetensors").unlink(missing_ok=True)
                yield shard, path

    monkeypatch.setattr(pipeline, "Fetcher", Late)
    with pytest.raises(NotFound, match=r"model-00005-of-00010\.safetensors"):
        shardesd.scan(folder)


def test_a_limit_of_the_disk(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub-cache"
    use_hub(monkeypatch, hub, cache)
    hub.add("org/name", folder)
    largest = max(path.stat().st_size for path in folder.glob(SHARDS))

    def size() -> int:
        return sum(path.stat().st_size for blobs in cache.rglob("blobs") for path in blobs.iterdir())

    options: dict[str, Any] = {"cache": False, "max_disk": 3 * largest}
    result = shardesd.scan("org/name", **options)
    assert result.layers.height == 61
    assert largest < size() <= 3.2 * largest
    with pytest.raises(NoSpace, match="--max-disk"):
        shardesd.scan("org/name", **options | {"fetch": "shards", "max_disk": largest // 2})
    before = on_disk(cache)
    assert shardesd.scan("org/name", evict=True, fetch="shards", **options).layers.height == 61
    assert on_disk(cache) == before
