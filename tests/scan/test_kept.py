"""A scan with kept λ: nothing is solved twice, and nothing comes out otherwise than it would have."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from checkpoints import Tensors, cli, command, one_file, process, random_weights, sharded
from hub_server import HubServer, use_hub
from safetensors.numpy import load_file, save_file

import shardesd
from shardesd.cachefolder import CacheFolder
from shardesd.events import MatrixStarted, Notice, RowDone
from shardesd.keep import Keep


def scanned(place: Any, **options: Any) -> tuple[shardesd.Result, int, int]:
    """The result, how many matrices were solved, and how many were taken from what is kept."""
    rows: list[RowDone] = []
    result = shardesd.scan(
        place, on_event=lambda event: rows.append(event) if isinstance(event, RowDone) else None, **options
    )
    ok = [event for event in rows if event.row.status == "ok"]
    return result, sum(not event.kept for event in ok), sum(event.kept for event in ok)


def same(a: shardesd.Result, b: shardesd.Result, *, but: tuple[str, ...] = ("seconds", "model_id")) -> bool:
    return a.layers.drop(but).equals(b.layers.drop(but)) and all(
        np.array_equal(a.spectra[name], b.spectra[name]) for name in b.spectra
    )


def test_other_fit_options_solve_nothing(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    first, solved, kept = scanned(folder)
    assert (solved, kept) == (6, 0)
    again, solved, kept = scanned(folder)
    assert (solved, kept) == (0, 6)
    assert same(again, first)
    for options in ({"fix_fingers": "DKS"}, {"evals_thresh": 1e-3}, {"bins": 10, "fix_fingers": "xmin_peak"}):
        result, solved, kept = scanned(folder, **options)
        assert (solved, kept) == (0, 6)
        assert same(result, shardesd.scan(folder, cache=False, **options))
    assert scanned(folder, solver="svd")[1:] == (6, 0)
    assert scanned(folder, precision="float32")[1:] == (6, 0)
    assert scanned(folder, cache=False)[1:] == (6, 0)


@pytest.mark.parametrize("thresh", [1e-30, 0.0])
def test_what_is_kept_and_which_side_is_longer_change_no_number(tmp_path: Path, thresh: float) -> None:
    """However small λ may be that count: those of a Gram, which are rounding, are never among them."""
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.standard_normal((40, 40)))[0] for _ in range(2))
    full = U * np.logspace(0, -14, 40) @ V
    folder = one_file(tmp_path / "model", {"full.weight": full, "turned.weight": full.T.copy()})
    alone = shardesd.scan(folder, evals_thresh=thresh, cache=False)
    assert alone.layers["solver"].to_list() == ["svd", "svd"]
    assert alone.layers["num_evals"].to_list() == [40, 40]
    np.testing.assert_allclose(*alone.layers["alpha"], rtol=1e-6)
    shardesd.scan(folder)
    result, solved, _ = scanned(folder, evals_thresh=thresh)
    assert solved == 2
    assert same(result, alone)


def test_a_copy_and_a_half_changed_model(tmp_path: Path) -> None:
    tensors = random_weights(layers=4)
    original = shardesd.scan(one_file(tmp_path / "model", tensors))
    copy, solved, _ = scanned(sharded(tmp_path / "renamed", tensors))
    assert solved == 0
    assert same(copy, original)
    tuned = dict(tensors)
    for name in list(tuned):
        if ".layers.2." in name and "proj" in name:
            tuned[name] = tuned[name] + np.float32(0.5)
    result, solved, kept = scanned(one_file(tmp_path / "tuned", tuned))
    assert (solved, kept) == (3, 9)
    assert same(result, shardesd.scan(tmp_path / "tuned", cache=False))


def test_parts_of_one_tensor_have_spectra_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: Tensors = {
        "h.0.attn.c_attn.weight": rng.standard_normal((16, 48)).astype(np.float32),
        "h.0.conv.weight": rng.standard_normal((12, 10, 3, 3)).astype(np.float32),
    }
    folder = one_file(tmp_path / "model", tensors)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    first, solved, _ = scanned(folder)
    assert solved == 4
    again, solved, kept = scanned(folder)
    assert (solved, kept) == (0, 4)
    assert same(again, first)
    assert len({eigs.tobytes() for eigs in again.spectra.values()}) == 4


def test_a_damaged_entry_is_computed_again(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    first = shardesd.scan(folder, cache_dir=str(tmp_path / "kept"))
    entries = sorted((tmp_path / "kept").rglob("*.kept"))
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[-1] ^= 0x40
        entry.write_bytes(content)
    again, solved, _ = scanned(folder, cache_dir=str(tmp_path / "kept"))
    assert solved == 6
    assert same(again, first)
    assert scanned(folder, cache_dir=str(tmp_path / "kept"))[1] == 0


def test_a_failed_matrix_is_looked_at_again(tmp_path: Path) -> None:
    tensors = random_weights()
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = np.nan
    folder = one_file(tmp_path / "model", tensors)
    for _ in range(2):
        assert shardesd.scan(folder).failed.height == 1


def test_the_command_line(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    kept = tmp_path / "kept"

    def run(*arguments: object) -> str:
        result = cli(*arguments, "--cache-dir", kept)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert "0 entries" in run("cache", "info")
    assert cli("scan", folder, "--out", tmp_path / "a", "--no-cache", "--cache-dir", kept).exit_code == 0
    assert not kept.exists()
    run("scan", folder, "--out", tmp_path / "a", "--overwrite")
    assert f"{kept}: 6 entries" in run("cache", "info")
    assert "removed 4 entries, 2 (" in run("cache", "prune", "--max-cache", "800")
    assert "removed 2 entries, 0 (" in run("cache", "clear")
    run("scan", folder, "--out", tmp_path / "b", "--max-cache", "800")
    assert sum(path.stat().st_size for path in kept.rglob("*.kept")) <= 800
    bad = cli("cache", "prune", "--cache-dir", kept, "--max-cache", "auto")
    assert bad.exit_code == 1
    assert "auto" in bad.stderr
    bad = cli("cache", "info", "--cache-dir", next(folder.iterdir()))
    assert bad.exit_code == 1
    assert "expected the path of a folder" in bad.stderr


def test_four_scans_share_one_folder_under_kill_9(tmp_path: Path) -> None:
    """Overlapping models, scanned again and again by processes that are killed: never a wrong λ, never too much."""
    common = random_weights(layers=6, size=64, seed=1)
    limit = 60_000
    expected: list[dict[str, np.ndarray]] = []
    for k in range(4):
        tensors = common | {n: t for n, t in random_weights(layers=6, size=64, seed=10 + k).items() if ".5." in n}
        folder = one_file(tmp_path / f"model-{k}", tensors, name=f"m{k}.safetensors")
        expected.append(dict(shardesd.scan(folder, cache=False).spectra))
    kept = tmp_path / "kept"
    size = str(limit)
    seed = random.Random(5)

    def begin(k: int, number: int) -> subprocess.Popen[bytes]:
        out = tmp_path / f"out-{k}-{number}"
        arguments = ("--out", out, "--quiet", "--cache-dir", kept, "--max-cache", size)
        return subprocess.Popen(command("scan", tmp_path / f"model-{k}", *arguments))

    running = {k: begin(k, 0) for k in range(4)}
    for number in range(1, 3):
        time.sleep(2 + seed.random())
        for k in range(4):
            running[k].send_signal(signal.SIGKILL)
            running[k].wait()
            running[k] = begin(k, number)
    for k in range(4):
        assert running[k].wait(100) == 0
    for k in range(4):
        (spectra,) = (tmp_path / f"out-{k}-2" / "spectra").glob("*.safetensors")
        found = load_file(spectra)
        assert found.keys() == expected[k].keys()
        assert all(np.array_equal(found[name], expected[k][name]) for name in found)
    held = Keep(kept, limit).contents()
    assert 0 < held.nbytes <= limit
    assert process("cache", "info", "--cache-dir", kept).returncode == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    kept = tmp_path / "kept"
    shardesd.scan(folder, cache_dir=str(kept))
    for place in [kept, *kept.rglob("*")]:
        place.chmod(0o500 if place.is_dir() else 0o400)
    assert scanned(folder, cache_dir=str(kept))[1] == 0


def adapter(folder: Path, base: str, modules: list[str], size: int, seed: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in modules:
        tensors[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((4, size)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((size, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return folder


@pytest.mark.parametrize("place", ["hub", "folder"])
def test_a_second_adapter_on_the_same_base_solves_only_what_it_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    layers, size = 4, 32
    folder = sharded(tmp_path / "base", random_weights(layers=layers, size=size), 2)
    with HubServer() as hub:
        use_hub(monkeypatch, hub, tmp_path / "hub-cache")
        hub.add("org/base", folder)
        base = "org/base" if place == "hub" else str(folder)
        assert scanned(base)[1:] == (12, 0)
        touched = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]  # of 12: a quarter
        ones = [adapter(tmp_path / f"a{seed}", base, touched, size, seed) for seed in (1, 2)]
        for one in ones:
            events: list[Any] = []
            result = shardesd.scan(one, on_event=events.append)
            done = [event for event in events if isinstance(event, RowDone) and event.row.status == "ok"]
            assert sorted(event.row.longname for event in done if not event.kept) == touched
            assert len(done) == 12
            if place == "hub":
                assert sorted(event.longname for event in events if isinstance(event, MatrixStarted)) == touched
            assert same(result, shardesd.scan(one, cache=False))
        hub.log.clear()
        for one in ones:
            result, solved, kept = scanned(one, fix_fingers="DKS")
            assert (solved, kept) == (0, 12)
            assert same(result, shardesd.scan(one, cache=False, fix_fingers="DKS"))
        alone, solved, _ = scanned(ones[0], delta=True)
        assert solved == 3
        again, solved, kept = scanned(ones[0], delta=True)
        assert (solved, kept) == (0, 3)
        assert same(again, alone)


def test_a_difference_is_kept_by_what_it_is(tmp_path: Path) -> None:
    one = one_file(tmp_path / "one", random_weights(seed=1))
    two = one_file(tmp_path / "two", random_weights(seed=2))
    three = one_file(tmp_path / "three", random_weights(seed=3))
    first, solved, _ = scanned(one, minus=two)
    assert solved == 6
    again, solved, _ = scanned(one, minus=two)
    assert solved == 0
    assert same(again, first)
    assert scanned(one, minus=three)[1] == 6


def test_statistics_read_what_kept_spectra_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharded(tmp_path / "model", random_weights(layers=4, size=32), 2)
    with HubServer() as hub:
        use_hub(monkeypatch, hub, tmp_path / "hub-cache")
        hub.add("org/name", folder)
        shardesd.scan("org/name", fetch="ranges")
        for place in (folder, "org/name"):
            shardesd.scan(place, out=tmp_path / "kept", stats=True)
        shardesd.scan(folder, out=tmp_path / "anew", stats=True, cache=False)
    (expected,) = (tmp_path / "anew" / "stats").iterdir()
    found = sorted((tmp_path / "kept" / "stats").iterdir())
    assert len(found) == 2
    drop = [name for name in ("model_id", "revision") if name in pl.read_csv(expected).columns]
    for one in found:
        assert pl.read_csv(one).drop(drop).equals(pl.read_csv(expected).drop(drop))


def test_what_cannot_be_kept_for_any_reason_ends_no_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes may have no memory; and nobody waits for it when it has gone."""

    def no_memory(self: CacheFolder, entries: object) -> None:
        raise MemoryError

    monkeypatch.setattr(CacheFolder, "put_all", no_memory)
    said: list[str] = []
    result = shardesd.scan(
        one_file(tmp_path / "model", random_weights()),
        cache_dir=tmp_path / "kept",
        on_event=lambda event: said.append(event.message) if isinstance(event, Notice) else None,
    )
    assert result.layers["status"].to_list() == ["ok"] * result.layers.height
    assert [words for words in said if "not kept" in words and "MemoryError" in words]
