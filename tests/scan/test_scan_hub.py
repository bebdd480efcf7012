"""The whole scan against a hub, by the real huggingface_hub client, in processes of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from checkpoints import command, random_weights, sharded
from hub_server import Fault, HubServer, short_waits, use_hub

import shardesd
from shardesd.events import RowDone, ShardOpened
from shardesd.records import Row


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sharded(tmp_path / "weights", random_weights(layers=6, size=256))


def scan(hub: HubServer, tmp_path: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("scan", *arguments, "--out", tmp_path / "results", "--quiet"),
        env={**hub.env(cache_home=tmp_path / "home"), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fails(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for part in says:
        assert part in done.stderr


def test_a_repo_gives_the_rows_of_the_folder(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    commit = hub.add("org/name", folder)
    done = scan(hub, tmp_path, "org/name")
    assert done.returncode == 0, done.stderr
    layers = pl.read_csv(tmp_path / "results" / "models" / "org--name.csv")
    expected = shardesd.scan(folder).layers
    assert layers["model_id"].unique().to_list() == ["org/name"]
    assert layers["alpha"].to_list() == expected["alpha"].to_list()
    run = json.loads((tmp_path / "results" / "runs" / "org--name.json").read_text())
    assert run["commit"] == commit
    assert run["shards"]["model-00001-of-00003.safetensors"]["sha256"]


def test_shards_are_fetched_lazily(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 2 is asked for before shard 1 is fully analysed; shard 3 not before shard 1 is."""
    hub.add("org/name", folder)
    use_hub(monkeypatch, hub, tmp_path / "home")
    rows = {f"model-0000{k}-of-00003.safetensors": 0 for k in (1, 2, 3)}
    opened: list[str] = []

    def asked() -> set[str]:
        return {path.rpartition("/")[2] for path in hub.paths("GET", "*.safetensors")}

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    left = dict.fromkeys(rows, 0)
    for name, shard in index.items():
        left[shard] += "proj" in name

    def listen(event: object) -> None:
        if isinstance(event, ShardOpened):
            opened.append(event.shard)
        if isinstance(event, RowDone) and event.row.status == "ok":
            shard = index[event.row.longname + ".weight"]
            first, second, third = sorted(left)
            if left[first] > 1 and shard == first:
                assert third not in asked(), "shard 3 was asked for while shard 1 was not done"
            left[shard] -= 1
            if left[first] == 0 and shard == first:
                assert second in asked()

    result = shardesd.scan("org/name", on_event=listen, fetch="shards", cache=False)
    assert result.layers.height == 18
    assert opened == sorted(rows)
    assert len(hub.paths("GET", "*.safetensors")) == 3


def test_a_paused_reader_holds_the_third_shard_back(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", folder)
    use_hub(monkeypatch, hub, tmp_path / "home")
    rows = shardesd.stream("org/name", fetch="shards", cache=False)
    first = next(rows)
    assert isinstance(first, Row)
    # Rows of shard 1 wait here to be taken: it isn't done, so shard 3 must not be asked for, however long it takes.
    import time

    deadline = time.monotonic() + 10
    while len(hub.paths("GET", "*.safetensors")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    assert [path.rpartition("/")[2][:11] for path in hub.paths("GET", "*.safetensors")] == [
        "model-00001",
        "model-00002",
    ]
    assert len(list(rows)) == 17


def test_revisions(hub: HubServer, tmp_path: Path) -> None:
    commits = [
        hub.add("org/name", sharded(tmp_path / str(seed), random_weights(seed=seed)), branch=branch, tag=tag)
        for seed, branch, tag in ((1, "main", "v1"), (2, "dev", None))
    ]
    for asked, seed in (("org/name@v1", 1), ("hf://org/name@dev", 2), (f"org/name@{commits[1]}", 2)):
        done = scan(hub, tmp_path, asked)
        assert done.returncode == 0, done.stderr
        revision = asked.partition("@")[2]
        layers = pl.read_csv(tmp_path / "results" / "models" / f"org--name@{revision}.csv")
        assert layers["alpha"].to_list() == shardesd.scan(tmp_path / str(seed)).layers["alpha"].to_list()
        assert layers["revision"].unique().to_list() == [revision]
    fails(scan(hub, tmp_path, "org/name@nowhere"), "nowhere", "org/name")
    fails(scan(hub, tmp_path, "org/name@dev", "--revision", "v1"), "dev", "v1")


def test_what_is_cached_is_not_fetched_again_and_works_offline(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add("org/name", folder)
    fails(scan(hub, tmp_path, "org/name", HF_HUB_OFFLINE="1"), "org/name", "HF_HUB_OFFLINE")
    assert not hub.log
    assert scan(hub, tmp_path, "org/name").returncode == 0
    before = len(hub.paths("GET", "*.safetensors"))
    assert scan(hub, tmp_path, "org/name", "--overwrite").returncode == 0
    assert len(hub.paths("GET", "*.safetensors")) == before
    requests = len(hub.log)
    assert scan(hub, tmp_path, "org/name", "--overwrite", HF_HUB_OFFLINE="1").returncode == 0
    assert len(hub.log) == requests
    snapshot = next((tmp_path / "home").rglob("snapshots/*"))
    done = scan(hub, tmp_path, snapshot, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "models" / "org--name.csv").exists()


def test_refusals(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add("org/gated", folder, gated=True, readers={"hf_good"})
    hub.add("org/private", folder, private=True, readers={"hf_good"})
    fails(scan(hub, tmp_path, "org/gated"), "gated", "org/gated", "HF_TOKEN")
    fails(scan(hub, tmp_path, "org/gated", HF_TOKEN="hf_bad"), "org/gated")
    fails(scan(hub, tmp_path, "org/private"), "org/private")
    fails(scan(hub, tmp_path, "org/nothing"), "org/nothing")
    assert scan(hub, tmp_path, "org/gated", HF_TOKEN="hf_good").returncode == 0
    hub.add("org/pickled", {"pytorch_model.bin": b"x", "config.json": b"{}"})
    fails(scan(hub, tmp_path, "org/pickled"), "org/pickled", "no safetensors", ".bin")


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(status=429, headers={"Retry-After": "1"})],
        [Fault(status=500), Fault(status=503)],
        [Fault(cut=5000)],
        [Fault(cut=0), Fault(cut=60_000)],
    ],
    ids=["429", "5xx", "cut", "cut twice"],
)
def test_passing_faults_are_waited_out(
    hub: HubServer, folder: Path, tmp_path: Path, faults: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", folder)
    use_hub(monkeypatch, hub, tmp_path / "home")
    short_waits(monkeypatch)
    hub.fail("*/model-00002-of-00003.safetensors", *faults, method="GET")
    result = shardesd.scan("org/name")
    assert result.layers["alpha"].to_list() == shardesd.scan(folder).layers["alpha"].to_list()


def test_a_lasting_fault_keeps_the_rows_before_it(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", folder)
    use_hub(monkeypatch, hub, tmp_path / "home")
    short_waits(monkeypatch)
    hub.fail("*/model-00003-of-00003.safetensors", Fault(status=500), forever=True)
    with pytest.raises(shardesd.ShardesdError, match=r"model-00003-of-00003\.safetensors"):
        shardesd.scan("org/name", out=tmp_path / "results")
    hub.mend()
    rows: list[str] = []
    shardesd.scan(
        "org/name",
        out=tmp_path / "results",
        on_event=lambda event: (
            rows.append(event.row.longname) if isinstance(event, RowDone) and event.row.status == "ok" else None
        ),
    )
    assert 0 < len(rows) < 18
    assert pl.read_csv(tmp_path / "results" / "models" / "org--name.csv").height == 18


def test_a_malformed_shard_of_a_repo(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    hub.add("org/name", folder)
    fails(scan(hub, tmp_path, "org/name"), "model-00002-of-00003.safetensors", "truncated")
