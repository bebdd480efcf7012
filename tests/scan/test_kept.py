"""A scan with kept λ: nothing is solved twice, and nothing comes out otherwise than it would have."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensors, cli, command, one_file, process, random_weights, sharded
from safetensors.numpy import load_file

import shardesd
from shardesd.keep import Keep
from shardesd.records import RowDone


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
