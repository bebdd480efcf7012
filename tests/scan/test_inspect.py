"""`inspect`: what a scan does is what it said, and only headers cross the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cli, one_file, random_weights, sharded
from hub_server import Fault, HubServer, use_hub
from safetensors.numpy import save_file

import shardesd
from shardesd.errors import NoRanges, UnmatchedAdapter
from shardesd.inspector import Inspection, inspect
from shardesd.options import ScanOptions
from shardesd.spectra import work_bytes

SHARDS = "*.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        use_hub(monkeypatch, server, tmp_path / "hub-cache")
        yield server


def look(repo: object, **options: Any) -> Inspection:
    return inspect(str(repo), ScanOptions(**options))


def test_it_says_what_a_scan_then_does(tmp_path: Path) -> None:
    tensors = random_weights(layers=3, size=64)
    tensors["model.layers.0.mlp.codes.qweight"] = np.ones((8, 8), np.int32)
    folder = sharded(tmp_path / "model", tensors)
    said = look(folder)
    result = shardesd.scan(folder)
    ok = result.layers.filter(result.layers["status"] == "ok")
    assert sum(row["matrices"] for row in said.block_types.values()) == ok.height == 9
    assert {name: row["matrices"] for name, row in said.block_types.items()} == dict(
        zip(*(ok["block_type"].value_counts()[column].to_list() for column in ("block_type", "count")), strict=True)
    )
    assert sum(row["params"] for row in said.block_types.values()) == ok["params"].sum()
    assert said.skipped == result.skipped
    assert sum(said.failed.values()) == result.failed.height == 1
    files = list(folder.glob(SHARDS))
    assert said.shards == 3
    assert said.nbytes == said.cached == sum(path.stat().st_size for path in files)
    assert said.needed == sum(t.nbytes for name, t in tensors.items() if "proj" in name)
    assert said.fetch == 0
    assert said.dtypes == {
        "F32": {
            "tensors": len(tensors) - 1,
            "nbytes": sum(t.nbytes for name, t in tensors.items() if "qweight" not in name),
        },
        "I32": {"tensors": 1, "nbytes": 256},
    }
    assert [(row["n"], row["matrices"]) for row in said.solves] == [(64, 9)]
    flops = sum(64 * 64 * (max(t.shape) + 4 / 3 * 64) for name, t in tensors.items() if "proj" in name)
    assert said.solves[0]["gflop"] == pytest.approx(flops / 1e9, abs=6e-4)
    largest = tensors["model.layers.0.mlp.down_proj.weight"]
    assert sum(said.memory.values()) == largest.nbytes + work_bytes(*largest.shape)


def test_only_headers_cross_the_line(hub: HubServer, tmp_path: Path) -> None:
    tensors = random_weights(layers=24, size=256)
    hub.add("org/name", sharded(tmp_path / "model", tensors, 12))
    said = look("org/name", fetch="ranges")
    requests = hub.requests("GET", SHARDS)
    assert len(requests) == 12  # one for each shard
    assert all(request.range == "bytes=0-32767" for request in requests)
    needed = sum(t.nbytes for name, t in tensors.items() if "proj" in name)
    assert (said.needed, said.fetch, said.cached) == (needed, needed, 0)
    whole = look("org/name", fetch="shards")
    assert whole.fetch == whole.nbytes
    shardesd.scan("org/name", fetch="ranges")
    after = look("org/name")
    assert (after.needed, after.fetch) == (0, 0)
    assert sum(row["kept"] for row in after.block_types.values()) == 72
    assert after.solves == []
    assert not list((tmp_path / "hub-cache").rglob(SHARDS))


def test_shards_that_are_here_and_others_that_are_not(hub: HubServer, tmp_path: Path) -> None:
    from shardesd.source import open_source

    folder = sharded(tmp_path / "model", random_weights(layers=6, size=64))
    hub.add("org/name", folder)
    here = open_source("org/name").path("model-00002-of-00003.safetensors")
    said = look("org/name", fetch="shards")
    assert said.cached == here.stat().st_size
    assert said.fetch == said.nbytes - said.cached


def test_a_server_without_ranges(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", one_file(tmp_path / "model", random_weights()))
    hub.fail(SHARDS, Fault(whole=True), method="GET", forever=True)
    with pytest.raises(NoRanges, match="scan the model instead"):
        look("org/name")


def adapter(folder: Path, base: Path, targets: list[str], size: int = 24) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(3)
    tensors = {}
    for target in targets:
        tensors[f"base_model.model.{target}.lora_A.weight"] = rng.standard_normal((4, size)).astype(np.float32)
        tensors[f"base_model.model.{target}.lora_B.weight"] = rng.standard_normal((size, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_is_matched_onto_its_base(tmp_path: Path) -> None:
    base = one_file(tmp_path / "base", random_weights())
    targets = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    said = look(adapter(tmp_path / "adapter", base, targets))
    assert said.adapter is not None
    assert (said.adapter["tensors"], said.adapter["added"], said.adapter["base"]) == (2, 0, "base")
    assert sum(row["matrices"] for row in said.block_types.values()) == 6
    with pytest.raises(UnmatchedAdapter, match=r"layers\.7"):
        look(adapter(tmp_path / "other", base, ["model.layers.7.self_attn.q_proj"]))
    other = one_file(tmp_path / "third", random_weights(layers=8))
    result = cli("inspect", tmp_path / "other", "--base", other)
    assert result.exit_code == 0, result.stderr
    assert "changes 1 tensor of third" in result.stdout


def test_the_command_line(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    said = json.loads(cli("inspect", folder, "--json").stdout)
    assert said["needed"] == look(folder).needed
    text = cli("inspect", folder).stdout
    for words in ("1 shard", "F32", "q_proj", "skipped", "embedding", "to fetch   0 B", "shorter side"):
        assert words in text
    assert json.loads(cli("inspect", folder, "--json", "--exclude", "*mlp*").stdout)["skipped"]["excluded"] == 2
    missing = cli("inspect", tmp_path / "nothing")
    assert missing.exit_code == 1
