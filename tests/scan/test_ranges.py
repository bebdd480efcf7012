"""Scans of a Hub repo by ranges: the bytes that are needed and no others, and the numbers of a local scan."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensors, command, one_file, random_weights, sharded
from hub_server import Fault, HubServer, short_waits, use_hub, wait_until
from quantised_files import random, store
from safetensors.numpy import save_file

import shardesd
from shardesd import spectra
from shardesd.errors import NoRanges, ShardChanged
from shardesd.events import Fetching, MatrixStarted, Notice, RowDone, ScanFinished

SHARDS = "*.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        use_hub(monkeypatch, server, tmp_path / "hub-cache")
        yield server


def half_embeddings(size: int = 256) -> Tensors:
    """A model of 3 layers whose embeddings are half of its bytes, with a head that is not tied to them."""
    tensors = random_weights(layers=3, size=size)
    rest = sum(t.nbytes for name, t in tensors.items() if "embed" not in name)
    vocab = rest // (4 * size)
    rng = np.random.default_rng(7)
    tensors["model.embed_tokens.weight"] = rng.standard_normal((vocab, size), np.float32)
    return tensors


def eligible(tensors: Tensors) -> int:
    return sum(t.nbytes for name, t in tensors.items() if "proj" in name)


def weights_sent(hub: HubServer) -> int:
    requests = [*hub.requests("GET", SHARDS), *hub.requests("GET", "/cdn/*")]
    return sum(request.sent for request in requests)


def header_bytes(hub: HubServer) -> int:
    requests = [*hub.requests("GET", SHARDS), *hub.requests("GET", "/cdn/*")]
    return sum(request.sent for request in requests if (request.range or "").startswith("bytes=0-"))


def same(result: shardesd.Result, folder: Path, **options: Any) -> bool:
    local = shardesd.scan(folder, cache=False, **options)
    drop = ("model_id", "revision", "seconds")
    return (
        result.layers.drop(drop).equals(local.layers.drop(drop))
        and result.spectra.keys() == local.spectra.keys()
        and all(np.array_equal(result.spectra[name], local.spectra[name]) for name in local.spectra)
        and result.skipped == local.skipped
    )


def names_that_meet(order: Sequence[int] = range(4)) -> Tensors:
    """In one of the orders of their files; the first two want the longnames of the last two."""
    rng = np.random.default_rng(0)
    names = ["h.0.fc.weight", "h.1.fc.weight", "h.0.fc", "h.1.fc"]
    return {names[at]: rng.standard_normal((9 + at, 30)).astype(np.float32) for at in order}


def stopped_after(count: int, out: Path, fetch: str) -> None:
    """A scan that is stopped once so many rows are done."""
    stop = threading.Event()
    seen: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, RowDone):
            seen.append(event.row.longname)
            if len(seen) == count:
                stop.set()

    shardesd.scan("org/name", out=out, fetch=fetch, cache=False, on_event=listen, stop=stop)


@pytest.mark.parametrize("fetch", ["ranges", "shards"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
@pytest.mark.parametrize("taken", range(5))
def test_names_that_meet_across_shards_without_an_index(
    hub: HubServer, tmp_path: Path, fetch: str, taken: int, order: tuple[int, ...]
) -> None:
    """Each matrix has one row, wherever the scan was interrupted: what it is called follows from what had come."""
    tensors = names_that_meet(order)
    folder = sharded(tmp_path / "model", tensors, 4, index=False)
    hub.add("org/name", folder)
    out = tmp_path / "results"
    if taken:
        stopped_after(taken, out, fetch)
    result = shardesd.scan("org/name", out=out, fetch=fetch, cache=False)
    check_each_once(result, tensors)


def test_rows_that_are_another_tensors_are_not_counted(hub: HubServer, tmp_path: Path) -> None:
    tensors = names_that_meet()
    hub.add("org/name", sharded(tmp_path / "model", tensors, 4, index=False))
    stopped_after(2, tmp_path / "out", "shards")
    shardesd.scan("org/name", fetch="shards", cache=False)  # all headers are here from now on
    events: list[Any] = []
    result = shardesd.scan("org/name", out=tmp_path / "out", fetch="shards", cache=False, on_event=events.append)
    check_each_once(result, tensors)
    assert [event.analysed for event in events if isinstance(event, ScanFinished)] == [4]
    assert json.loads((tmp_path / "out" / "runs" / "org--name.json").read_text())["rows_resumed"] == 0


def test_no_tensor_is_called_what_the_spectra_file_keeps_for_itself(hub: HubServer, tmp_path: Path) -> None:
    """Not even while only some names are known."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((9, 30)).astype(np.float32) for name in ("__metadata__.weight", "h.0.fc")}
    folder = sharded(tmp_path / "model", tensors, 2, index=False)
    hub.add("org/name", folder)
    result = shardesd.scan("org/name", out=tmp_path / "out", fetch="shards", cache=False)
    assert sorted(result.spectra) == ["__metadata__.weight", "h.0.fc"]
    assert same(result, folder)


def check_each_once(result: shardesd.Result, tensors: Tensors) -> None:
    """Their shapes tell which row is whose."""
    rows = result.layers.to_dicts()
    assert sorted(row["M"] for row in rows) == sorted(W.shape[0] for W in tensors.values())
    for row in rows:
        (W,) = (W for W in tensors.values() if W.shape[0] == row["M"])
        expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        np.testing.assert_allclose(result.spectra[row["longname"]], expected, rtol=1e-9)
        assert row["spectral_norm"] == pytest.approx(expected[-1], rel=1e-12)


@pytest.mark.parametrize("failing", [9, 12])
@pytest.mark.parametrize("known", [True, False])
def test_a_table_of_names_that_met_is_taken_up_again(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, failing: int
) -> None:
    """With a row whose failure may pass; headers that were `known` when names were given are so no more, or the other
    way round."""
    tensors = names_that_meet()
    folder = sharded(tmp_path / "model", tensors, 4, index=False)
    hub.add("org/name", folder)
    compute = spectra.compute
    with monkeypatch.context() as short:

        def fails(slices: Any, **how: Any) -> Any:
            if slices[0].shape[0] == failing:
                raise MemoryError
            return compute(slices, **how)

        if known:
            shardesd.scan("org/name", fetch="shards", cache=False)
        short.setattr(spectra, "compute", fails)
        first = shardesd.scan("org/name", out=tmp_path / "out", fetch="shards", cache=False)
        assert len(first.failed) == 1
    if known:
        shutil.rmtree(tmp_path / "hub-cache")
    result = shardesd.scan("org/name", out=tmp_path / "out", fetch="shards", cache=False)
    assert not len(result.failed)
    check_each_once(result, tensors)


@pytest.mark.parametrize("redirect", [False, True], ids=["direct", "redirected"])
@pytest.mark.parametrize("count", [1, 3])
def test_only_the_eligible_bytes_cross_the_line(hub: HubServer, tmp_path: Path, redirect: bool, count: int) -> None:
    tensors = half_embeddings()
    folder = sharded(tmp_path / "weights", tensors, count)
    hub.redirect = redirect
    hub.add("org/name", folder)
    result = shardesd.scan("org/name", fetch="ranges")
    assert same(result, folder)
    needed = eligible(tensors)
    assert 1.9 * needed < sum(t.nbytes for t in tensors.values()) < 2.2 * needed
    headers = header_bytes(hub)
    assert headers <= count * 33_000
    assert wait_until(lambda: needed <= weights_sent(hub) - headers <= 1.02 * needed)
    assert not list((tmp_path / "hub-cache").rglob(SHARDS))
    if redirect:
        assert len(hub.paths("GET", SHARDS)) <= 4 * count  # once a shard, or once a connection that began with it


FAULTS = {
    "cut": [Fault(cut=5000)],
    "cut at once": [Fault(cut=0)],
    "429": [Fault(status=429, headers={"Retry-After": "3"})],
    "500": [Fault(status=500), Fault(status=500)],
    "slow drip": [Fault(drip=0.02)],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_faults_change_no_number(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: list[Fault], after: int
) -> None:
    folder = sharded(tmp_path / "weights", random_weights(layers=3, size=64))
    hub.add("org/name", folder)
    short_waits(monkeypatch)
    hub.fail(SHARDS, *[Fault()] * after, *faults, method="GET")
    assert same(shardesd.scan("org/name", fetch="ranges"), folder)


def test_an_expired_redirect(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharded(tmp_path / "weights", random_weights(layers=3, size=64))
    hub.redirect = True
    hub.add("org/name", folder, private=True, readers={"hf_good"})
    hub.fail("/cdn/*", Fault(), Fault(status=403), Fault(), Fault(status=403))
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert same(shardesd.scan("org/name", fetch="ranges"), folder)
    assert {request.token for request in hub.requests("GET", "/cdn/*")} == {None}


def test_a_changed_file_ends_the_scan(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/name", sharded(tmp_path / "weights", random_weights(layers=3, size=64)))
    hub.fail("*-00002-of-*", Fault(), Fault(etag="0" * 64), method="GET")
    with pytest.raises(ShardChanged, match="model-00002-of-00003"):
        shardesd.scan("org/name", fetch="ranges")


def test_a_server_without_ranges(hub: HubServer, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "weights", random_weights(layers=3, size=64))
    hub.add("org/name", folder)
    hub.fail(SHARDS, Fault(whole=True), method="GET", forever=True)
    with pytest.raises(NoRanges, match="--fetch shards"):
        shardesd.scan("org/name", fetch="ranges")
    notes: list[str] = []
    result = shardesd.scan(
        "org/name", on_event=lambda event: notes.append(event.message) if isinstance(event, Notice) else None
    )
    assert same(result, folder)
    assert sum("whole shards are downloaded" in note for note in notes) == 1


def test_auto_takes_whole_shards_where_most_is_needed(hub: HubServer, tmp_path: Path) -> None:
    size = 256
    rng = np.random.default_rng(1)
    embedding = {"model.embed_tokens.weight": rng.standard_normal((8 * size, size), np.float32)}
    folder = sharded(tmp_path / "weights", embedding | random_weights(layers=1, size=size, seed=2), 2)
    # Shard 1 holds the embedding, shard 2 the layer.
    hub.add("org/name", folder)
    result = shardesd.scan("org/name", fetch="auto", cache=False)
    assert same(result, folder)
    here = {path.name for path in (tmp_path / "hub-cache").rglob(SHARDS)}
    shares = {}
    for path in folder.glob(SHARDS):
        from safetensors.numpy import load_file

        tensors = load_file(path)
        shares[path.name] = eligible(tensors) / path.stat().st_size
    assert here == {name for name, share in shares.items() if share > 0.5}
    assert 0 < len(here) < len(shares)


def test_auto_leaves_a_full_disk_alone(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharded(tmp_path / "weights", random_weights(layers=3, size=64))
    hub.add("org/name", folder)
    monkeypatch.setattr("shardesd.source.hub._free_bytes", lambda folder: 50_000)
    assert same(shardesd.scan("org/name"), folder)
    assert not list((tmp_path / "hub-cache").rglob(SHARDS))
    with pytest.raises(shardesd.ShardesdError, match="no space"):
        shardesd.scan("org/name", fetch="shards", cache=False)


def test_what_is_cached_is_read_from_there(hub: HubServer, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "weights", random_weights(layers=3, size=64))
    hub.add("org/name", folder)
    shardesd.scan("org/name", fetch="shards", cache=False)
    before = len(hub.paths("GET", SHARDS))
    assert same(shardesd.scan("org/name", fetch="ranges", cache=False), folder)
    assert len(hub.paths("GET", SHARDS)) == before


@pytest.mark.parametrize("fetch", ["auto", "shards", "ranges"])
def test_a_second_scan_fetches_no_weights_and_solves_nothing(hub: HubServer, tmp_path: Path, fetch: str) -> None:
    tensors = random_weights(layers=100, size=32)
    folder = one_file(tmp_path / "weights", tensors)
    hub.add("org/name", folder)
    assert same(shardesd.scan("org/name", fetch="ranges"), folder)
    hub.add("other/copy", folder)
    hub.log.clear()
    events: list[Any] = []
    started = time.perf_counter()
    for repo in ("org/name", "other/copy"):
        result = shardesd.scan(repo, fetch=fetch, fix_fingers="DKS", on_event=events.append)
        assert result.layers.height == 300
    assert (time.perf_counter() - started) / 2 < 2
    assert same(result, folder, fix_fingers="DKS")
    assert not [event for event in events if isinstance(event, MatrixStarted | Fetching)]
    assert all(event.kept for event in events if isinstance(event, RowDone) and event.row.status == "ok")
    with open(folder / "model.safetensors", "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    # The header in one piece or two, and nothing behind it but what the first piece brought along.
    assert all(int((r.range or "-0").rpartition("-")[2]) < max(header, 32 << 10) for r in hub.requests("GET", SHARDS))
    assert not list((tmp_path / "hub-cache").rglob(SHARDS))


def test_fused_tensors_are_fetched_once(hub: HubServer, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: Tensors = {
        f"h.{i}.attn.c_attn.weight": rng.standard_normal((128, 384)).astype(np.float32) for i in range(3)
    }
    folder = one_file(tmp_path / "weights", tensors)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    hub.add("org/name", folder)
    result = shardesd.scan("org/name", fetch="ranges")
    assert result.layers.height == 9
    assert same(result, folder)
    needed = sum(t.nbytes for t in tensors.values())
    assert wait_until(lambda: weights_sent(hub) - header_bytes(hub) == needed)


def test_an_interrupted_scan_fetches_only_the_rest(hub: HubServer, tmp_path: Path) -> None:
    import threading

    tensors = random_weights(layers=6, size=128)
    folder = sharded(tmp_path / "weights", tensors)
    hub.add("org/name", folder)
    stop = threading.Event()
    rows: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, RowDone) and event.row.status == "ok":
            rows.append(event.row.longname)
            if len(rows) == 7:
                stop.set()

    options = {"out": tmp_path / "results", "fetch": "ranges", "cache": False}
    shardesd.scan("org/name", on_event=listen, stop=stop, **options)  # type: ignore[arg-type]
    kept = len(rows)
    time.sleep(0.3)
    hub.log.clear()
    shardesd.scan("org/name", **options)  # type: ignore[arg-type]
    left = sum(t.nbytes for name, t in tensors.items() if "proj" in name and name.removesuffix(".weight") not in rows)
    assert kept < 18
    assert wait_until(lambda: left <= weights_sent(hub) - header_bytes(hub) <= 1.02 * left)


def test_memory_is_bounded_by_the_largest_tensor(hub: HubServer, tmp_path: Path) -> None:
    """A process that scans 80 MB by ranges needs no more than one that scans 20 MB."""
    peaks = []
    for layers in (5, 20):
        folder = sharded(tmp_path / f"m{layers}", random_weights(layers=layers, size=512), 2)
        hub.add(f"org/m{layers}", folder)
        code = (
            "import shardesd; from shardesd.show.memory import MemoryMeter; "
            f"shardesd.scan('org/m{layers}', fetch='ranges', cache=False, max_memory=64_000_000, device='cpu'); "
            "print(MemoryMeter().read().peak)"
        )
        done = subprocess.run(
            [command()[0], "-c", code], env=hub.env(tmp_path / "home"), capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout) / 1e6)
    assert peaks[1] - peaks[0] < 25, peaks


@pytest.mark.parametrize("fetch", ["auto", "ranges"])
def test_quantised_weights_and_adapters_come_too(hub: HubServer, tmp_path: Path, fetch: str) -> None:
    import torch

    codes = {f"model.layers.{i}.mlp.down_proj.weight": random(64, 64, seed=i).to(torch.float8_e4m3fn) for i in range(4)}
    scales = {f"{name}_scale_inv": random(4, 4, seed=9).abs() for name in codes}
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    folder = store(tmp_path / "fp8", codes | scales, quantization=config)
    hub.add("org/fp8", folder)
    assert same(shardesd.scan("org/fp8", fetch=fetch), folder)
    hub.log.clear()
    assert same(shardesd.scan("org/fp8", fetch=fetch, cache=False, fix_fingers="DKS"), folder, fix_fingers="DKS")


@pytest.mark.parametrize("fetch", ["auto", "ranges", "shards"])
def test_an_adapter_over_a_repo(hub: HubServer, tmp_path: Path, fetch: str) -> None:
    base = sharded(tmp_path / "base", random_weights(layers=3, size=32))
    hub.add("org/base", base)
    folder = tmp_path / "adapter"
    folder.mkdir()
    rng = np.random.default_rng(0)
    module = "base_model.model.model.layers.1.mlp.down_proj"
    save_file(
        {
            f"{module}.lora_A.weight": rng.standard_normal((2, 64)).astype(np.float32),
            f"{module}.lora_B.weight": rng.standard_normal((32, 2)).astype(np.float32),
        },
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["x"]}'
    )
    result = shardesd.scan(folder, base="org/base", fetch=fetch)
    local = shardesd.scan(folder, base=base, cache=False)
    assert all(np.array_equal(result.spectra[name], local.spectra[name]) for name in local.spectra)
    assert result.spectra.keys() == local.spectra.keys()
