"""A batch whose models come by ranges, leave the disk again, and have λ from before."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from batch_models import lora
from checkpoints import cli, one_file, random_weights, sharded
from hub_server import HubServer, use_hub

import shardesd
from shardesd.batch import runner
from shardesd.batch.ahead import Ahead
from shardesd.events import BatchEvent, MatrixStarted, ModelEvent, ModelFailed, RowDone
from shardesd.options import ScanOptions
from shardesd.results import rebuild_summary
from shardesd.source import open_source

MODELS = 4


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        for i in range(MODELS):
            server.add(f"org/m{i}", sharded(tmp_path / f"m{i}", random_weights(layers=6, size=64, seed=i), 2))
        use_hub(monkeypatch, server, tmp_path / "hub-cache")
        yield server


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> list[Ahead]:
    """Those that batches make, each download finished before the work goes on, so that nothing depends on speed."""
    made: list[Ahead] = []

    class Patient(Ahead):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def fetch(self, *arguments: Any) -> None:
            super().fetch(*arguments)
            if self._thread is not None:
                self._thread.join()

    monkeypatch.setattr(runner, "Ahead", Patient)
    return made


def wholes(hub: HubServer) -> list[str]:
    return [request.path for request in hub.requests("GET", "*.safetensors") if request.range is None]


def sent(hub: HubServer) -> int:
    return sum(request.sent for request in hub.requests("GET", "*.safetensors"))


def batch(out: Path, models: Any = tuple(f"org/m{i}" for i in range(MODELS)), **options: Any) -> list[BatchEvent]:
    events: list[BatchEvent] = []
    done = list(shardesd.scan_many(models, out=out, on_event=events.append, **options))
    assert len(done) == len(models), [event for event in events if isinstance(event, ModelFailed)]
    return events


def solved(events: list[BatchEvent]) -> int:
    return sum(isinstance(event, ModelEvent) and isinstance(event.event, MatrixStarted) for event in events)


def kept(events: list[BatchEvent]) -> int:
    inner = [event.event for event in events if isinstance(event, ModelEvent)]
    return sum(isinstance(event, RowDone) and event.kept for event in inner)


def table(out: Path, stem: str) -> pl.DataFrame:
    return pl.read_csv(out / "models" / f"{stem}.csv").drop("seconds")


def same_tables(out: Path, tmp_path: Path) -> None:
    for i in range(MODELS):
        expected = shardesd.scan(tmp_path / f"m{i}", out=tmp_path / "expected", cache=False)
        found = table(out, f"org--m{i}").drop("model_id")
        assert found.equals(table(tmp_path / "expected", f"m{i}").drop("model_id"))
        assert expected.layers.height == 18


def test_by_ranges_nothing_is_downloaded_ahead(hub: HubServer, tmp_path: Path, aheads: list[Ahead]) -> None:
    batch(tmp_path / "out", fetch="ranges")
    assert len(aheads) == 1
    assert wholes(hub) == []
    assert not list((tmp_path / "hub-cache").rglob("*.safetensors"))
    same_tables(tmp_path / "out", tmp_path)


def test_where_auto_takes_ranges_nothing_is_downloaded_ahead(
    hub: HubServer, tmp_path: Path, aheads: list[Ahead]
) -> None:
    # One matrix in three, of which there are few in the first shard: both shards come by ranges.
    batch(tmp_path / "out", include="*down_proj", exclude="*.layers.1.*")
    assert wholes(hub) == []
    assert any(request.range for request in hub.requests("GET", "*-00001-of-*"))
    assert not list((tmp_path / "hub-cache").rglob("*.safetensors"))


def test_where_auto_takes_whole_shards_the_first_one_comes_ahead(
    hub: HubServer, tmp_path: Path, aheads: list[Ahead]
) -> None:
    seen: list[str] = []

    def listen(event: BatchEvent) -> None:
        if isinstance(event, ModelEvent) and isinstance(event.event, RowDone) and event.model == "org/m0":
            seen.extend(path for path in wholes(hub) if "/m1/" in path and path not in seen)

    list(shardesd.scan_many(["org/m0", "org/m1"], out=tmp_path / "out", on_event=listen))
    assert [path.rpartition("/")[2] for path in seen] == ["model-00001-of-00002.safetensors"]
    assert sorted(wholes(hub)) == sorted(set(wholes(hub)))
    assert len(wholes(hub)) == 4


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_what_has_its_spectra_from_before_is_not_downloaded_ahead(
    hub: HubServer, tmp_path: Path, aheads: list[Ahead], fetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = batch(tmp_path / "out", fetch=fetch)
    assert solved(first) == 18 * MODELS
    use_hub(monkeypatch, hub, tmp_path / "empty-hub-cache")
    hub.log.clear()
    again = batch(tmp_path / "other", fetch=fetch, fix_fingers="DKS")
    assert (solved(again), kept(again)) == (0, 18 * MODELS)
    assert wholes(hub) == []
    assert not list((tmp_path / "empty-hub-cache").rglob("*.safetensors"))


class Watched:
    """The most shards that were in a Hub cache at any moment of the block."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.most, self._over = cache, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before: set[str] = set()
        while not self._over.is_set():
            found: set[str] = set()
            with suppress(OSError):  # a folder that goes while it is listed
                for path in self.cache.glob("*/blobs/*"):
                    with suppress(OSError):  # gone between listing and asking
                        large = path.stat().st_size > 8_000 or path.name.endswith(".incomplete")
                        if large and re.fullmatch("[0-9a-f]{64}", path.name[:64]):  # by sha256: weights
                            found.add(path.name[:64])
            # Listing takes its time: what is in two lists was there between them.
            self.most = max(self.most, len(found & before))
            before = found
            time.sleep(0.001)


def test_evicted_shards_are_never_more_than_two_on_the_disk(
    hub: HubServer, tmp_path: Path, aheads: list[Ahead]
) -> None:
    (theirs,) = [open_source("org/m2").path("model-00002-of-00002.safetensors")]
    with Watched(tmp_path / "hub-cache") as watched:
        batch(tmp_path / "out", evict=True)
    assert 2 <= watched.most <= 3  # one of them is the user's
    assert list((tmp_path / "hub-cache").rglob("*.safetensors")) == [theirs]
    assert len(wholes(hub)) == 2 * MODELS
    same_tables(tmp_path / "out", tmp_path)


def test_a_limit_of_the_disk_holds_before_a_model_begins(hub: HubServer, tmp_path: Path, aheads: list[Ahead]) -> None:
    batch(tmp_path / "out", max_disk=1)
    assert wholes(hub) == []
    same_tables(tmp_path / "out", tmp_path)


def test_adapters_of_one_base_side_by_side_with_evict(hub: HubServer, tmp_path: Path) -> None:
    """Two scans of one process that evict the same shards under each other's hands."""
    weights = random_weights(layers=8, size=16)
    hub.add("org/plain0", sharded(tmp_path / "base", weights, 4))
    rows = []
    for i in range(6):
        hub.add(f"org/adapter{i}", lora(i))
        rows.append({"model_id": f"org/adapter{i}", "source_model": "org/plain0", "base_model_relation": "lora"})
    batch(tmp_path / "out", rows, evict=True, fetch="shards", cache=False, workers=3)
    assert not list((tmp_path / "hub-cache" / "models--org--plain0").rglob("*.safetensors"))
    for i in range(6):
        (tmp_path / f"adapter{i}").mkdir()
        for name, data in lora(i).items():
            (tmp_path / f"adapter{i}" / name).write_bytes(data)
        expected = shardesd.scan(tmp_path / f"adapter{i}", base=tmp_path / "base", cache=False)
        found = pl.read_csv(tmp_path / "out" / "models" / f"org--adapter{i}.csv")
        assert found["alpha"].to_list() == expected.layers["alpha"].to_list()


LAZY: dict[str, tuple[list[str], Any]] = {
    "fetch": (["--fetch", "ranges"], "ranges"),
    "evict": (["--evict"], True),
    "max_disk": (["--max-disk", "3GB"], 3 * 10**9),
    "cache": (["--no-cache"], False),
    "cache_dir": (["--cache-dir", "kept"], "kept"),
    "max_cache": (["--max-cache", "5MB"], 5_000_000),
}


def test_every_option_of_how_bytes_come_is_tried_here() -> None:
    of_numbers = ScanOptions().numbers().keys()
    of_speed = {"device", "max_memory", "gpu_memory_fraction", "io", "allow_pickle"}
    assert {field.name for field in fields(ScanOptions)} - of_numbers - of_speed == LAZY.keys()


@pytest.mark.parametrize("name", LAZY)
def test_options_of_how_bytes_come_reach_the_scan_and_leave_results_done(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, value = LAZY[name]
    if name == "cache_dir":
        value = arguments[1] = str(tmp_path / "kept")
    folder = one_file(tmp_path / "model", random_weights())
    reached: list[ScanOptions] = []
    import shardesd.batch.attempt as attempt

    real = attempt.scan

    def scan(*given: Any, **named: Any) -> Any:
        reached.append(named["options"])
        return real(*given, **named)

    monkeypatch.setattr(attempt, "scan", scan)
    (tmp_path / "list.txt").write_text(f"{folder}\n")
    command = ("batch", str(tmp_path / "list.txt"), "--quiet", "--out")
    assert cli(*command, str(tmp_path / "plain")).exit_code == 0
    # What was made without is done with it, and the other way round; in Python and by `scan` too.
    result = cli(*command, str(tmp_path / "plain"), *arguments)
    assert result.exit_code == 0, result.stderr
    assert len(reached) == 1
    assert cli(*command, str(tmp_path / "lazy"), *arguments).exit_code == 0
    assert len(reached) == 2
    assert getattr(reached[1], name) == value
    assert getattr(reached[0], name) == getattr(ScanOptions(), name)
    assert cli(*command, str(tmp_path / "lazy")).exit_code == 0
    assert len(list(shardesd.scan_many([str(folder)], out=tmp_path / "lazy", **{name: value}))) == 1
    assert len(reached) == 2
    done = cli("scan", str(folder), "--out", str(tmp_path / "plain"), *arguments)
    assert done.exit_code == 0
    assert "already done" in done.stderr
    list(shardesd.scan_many([str(folder)], out=tmp_path / "python", **{name: value}))
    assert getattr(reached[2], name) == value


@pytest.mark.parametrize("fetch", ["ranges", "shards"])
def test_a_model_of_the_hub_is_done_however_its_bytes_came(hub: HubServer, tmp_path: Path, fetch: str) -> None:
    batch(tmp_path / "out", fetch=fetch)
    requests = len(hub.log)
    for other in ("ranges", "shards", "auto"):
        events = batch(tmp_path / "out", fetch=other, evict=other == "auto", cache=False)
        assert not any(isinstance(event, ModelEvent) for event in events)
    assert len(hub.log) == requests


def test_after_refit_summary_and_tables_agree(tmp_path: Path) -> None:
    rows = [
        {
            "model_id": str(one_file(tmp_path / f"m{i}", random_weights(seed=i))),
            "source_model": "org/base" if i else "",
            "base_model_relation": "finetune" if i else "base",
            "likes": str(i),
        }
        for i in range(3)
    ]
    list(shardesd.scan_many(rows, out=tmp_path / "out"))
    summary = tmp_path / "out" / "summary.csv"
    before = pl.read_csv(summary)
    assert cli("refit", str(tmp_path / "out"), "--fix-fingers", "DKS", "--quiet").exit_code == 0
    after = summary.read_bytes()
    told = ["model_id", "source_model", "base_model_relation", "likes", "num_layers", "total_params", "seconds"]
    assert pl.read_csv(summary).select(told).equals(before.select(told))
    assert pl.read_csv(summary)["alpha_mean"].to_list() != before["alpha_mean"].to_list()
    assert cli("summarize", str(tmp_path / "out"), "--quiet").exit_code == 0
    assert summary.read_bytes() == after
    assert rebuild_summary(tmp_path / "out").models == 3
    # The folder is one of a batch with these options by now.
    events: list[BatchEvent] = []
    done = list(shardesd.scan_many(rows, out=tmp_path / "out", fix_fingers="DKS", on_event=events.append))
    assert len(done) == 3
    assert not any(isinstance(event, ModelEvent) for event in events)
    assert summary.read_bytes() == after
