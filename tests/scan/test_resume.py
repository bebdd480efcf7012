"""An interrupted scan keeps its finished rows, and the next one goes on from there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import cli, command, one_file, process, random_weights
from safetensors.numpy import load_file

import shardesd
import shardesd.scanner
from shardesd.errors import NoSpace
from shardesd.events import MatrixStarted, RowDone
from shardesd.opening import What
from shardesd.options import OutputOptions, ScanOptions
from shardesd.results.store import ModelStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_file(tmp_path_factory.mktemp("weights") / "model", random_weights(layers=20, size=160))


def started(folder: Path, out: Path, **options: object) -> list[str]:
    """Longnames that a scan computes, in a run that goes to its end."""
    events: list[object] = []
    shardesd.scan(folder, out=out, on_event=events.append, **options)
    return [event.longname for event in events if isinstance(event, MatrixStarted)]


def test_a_second_run_computes_nothing(folder: Path, tmp_path: Path) -> None:
    assert len(started(folder, tmp_path / "results")) == 60
    assert started(folder, tmp_path / "results") == []
    assert len(started(folder, tmp_path / "results", overwrite=True)) == 60
    result = cli("scan", folder, "--out", tmp_path / "results")
    assert result.exit_code == 0
    assert "already done" in result.stderr


@pytest.mark.parametrize("lines", [1, 30])
def test_a_table_that_was_cut_short_is_not_taken_for_done(folder: Path, tmp_path: Path, lines: int) -> None:
    """By a copy that was not finished, say."""
    assert cli("scan", folder, "--out", tmp_path / "results").exit_code == 0
    table = tmp_path / "results" / "models" / "model.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:lines]))
    result = cli("scan", folder, "--out", tmp_path / "results")
    assert result.exit_code == 1
    assert f"has {lines - 1} analysed rows" in result.stderr
    assert "λ of 60 matrices" in result.stderr
    assert len(table.read_text().splitlines()) == lines
    for code, words in ((1, ["summarize"]), (3, ["refit", "--fix-fingers", "DKS"])):
        result = cli(*words, tmp_path / "results")
        assert result.exit_code == code, words
        assert "cut short" in result.stderr
    assert cli("scan", folder, "--out", tmp_path / "results", "--overwrite").exit_code == 0
    assert cli("summarize", tmp_path / "results").exit_code == 0
    assert len(table.read_text().splitlines()) == 61


def test_a_tensor_without_a_name_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = one_file(tmp_path / "model", {"": rng.standard_normal((12, 12)), "b.weight": rng.standard_normal((9, 12))})
    out = tmp_path / "results"
    assert cli("scan", folder, "--out", out).exit_code == 0
    assert "already done" in cli("scan", folder, "--out", out).stderr
    assert cli("refit", out, "--fix-fingers", "DKS").exit_code == 0
    table = pl.read_csv(out / "models" / "model.csv")
    assert table["longname"].fill_null("").to_list() == ["", "b"]
    assert table["status"].to_list() == ["ok", "ok"]


def test_a_failed_row_of_a_finished_scan_is_still_a_failure(tmp_path: Path) -> None:
    tensors = random_weights()
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = np.nan
    folder = one_file(tmp_path / "model", tensors)
    for _ in range(2):
        assert cli("scan", folder, "--out", tmp_path / "results").exit_code == 3


def test_closing_the_stream_early_and_scanning_again(folder: Path, tmp_path: Path) -> None:
    import threading

    stop = threading.Event()
    done: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, RowDone) and event.row.status == "ok":
            done.append(event.row.longname)
            if len(done) == 10:
                stop.set()

    result = shardesd.scan(folder, out=tmp_path / "results", on_event=listen, stop=stop)
    assert result.layers.height == len(done) >= 10
    assert not (tmp_path / "results" / "models" / "model.csv").exists()
    rest = started(folder, tmp_path / "results")
    assert len(rest) + len(done) == 60
    assert not set(rest) & set(done)


def final(out: Path) -> tuple[pl.DataFrame, dict[str, np.ndarray]]:
    layers = pl.read_csv(out / "models" / "model.csv").drop("seconds")
    return layers, load_file(out / "spectra" / "model.safetensors")


def test_kill_9_at_any_moment_loses_nothing(folder: Path, tmp_path: Path) -> None:
    process("scan", folder, "--out", tmp_path / "whole", "--quiet")
    expected, expected_spectra = final(tmp_path / "whole")
    out = tmp_path / "killed"
    seed = random.Random(7)
    kept = 0
    for _ in range(6):
        scan = subprocess.Popen(command("scan", folder, "--out", out, "--quiet"))
        partial = out / "partial"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and scan.poll() is None:
            if sum(file.stat().st_size for file in partial.glob("*.jsonl")) > kept:
                break
            time.sleep(0.01)
        time.sleep(seed.random() * 0.2)
        scan.send_signal(signal.SIGKILL)
        scan.wait()
        kept = sum(file.stat().st_size for file in partial.glob("*.jsonl"))
        if (out / "models" / "model.csv").exists():
            break
    assert process("scan", folder, "--out", out, "--quiet").returncode == 0
    layers, spectra = final(out)
    assert layers.equals(expected)
    assert spectra.keys() == expected_spectra.keys()
    assert all(np.array_equal(spectra[name], expected_spectra[name]) for name in spectra)
    left = {path.name for path in out.rglob("*") if path.is_file()}
    assert left == {"model.csv", "model.safetensors", "model.json", "summary.csv"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_finished_rows_and_says_so(tmp_path: Path, number: int) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=40, size=300))
    out = tmp_path / "results"
    scan = subprocess.Popen(
        command("scan", folder, "--out", out), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not any(file.stat().st_size > 3000 for file in (out / "partial").glob("*.jsonl")):
        assert scan.poll() is None
        time.sleep(0.01)
    scan.send_signal(number)
    stdout, stderr = scan.communicate(timeout=30)
    assert scan.returncode == 3
    assert "Traceback" not in stderr
    assert "again to continue" in stdout + stderr
    rest = started(folder, out)
    assert 0 < len(rest) < 120
    assert pl.read_csv(out / "models" / "model.csv").height == 120


def test_two_scans_of_one_model_at_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    rows = iter(
        shardesd.scanner._Scan(What(model=folder), ScanOptions(), OutputOptions(out=str(out)), None, None).rows()
    )
    next(rows)  # this process is in the middle of its scan
    second = process("scan", folder, "--out", out, "--quiet")
    assert second.returncode == 1
    assert str(os.getpid()) in second.stderr
    assert len(list(rows)) == 59
    assert process("scan", folder, "--out", out, "--quiet").returncode == 0


def test_the_reader_of_stdout_may_leave(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=40))
    read, write = os.pipe()
    os.close(read)
    scan = subprocess.Popen(
        command("scan", folder, "--out", tmp_path / "results", "--json"), stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    _, stderr = scan.communicate(timeout=60)
    assert b"Traceback" not in stderr
    assert b"BrokenPipe" not in stderr
    assert (tmp_path / "results" / "models" / "model.csv").exists()


def test_json_lines_are_the_rows(folder: Path, tmp_path: Path) -> None:
    result = process("scan", folder, "--out", tmp_path / "results", "--json", "--include", "*layers.3.*")
    assert result.returncode == 0
    rows = pl.read_ndjson(result.stdout.encode())
    assert (
        rows["longname"].to_list() == pl.read_csv(tmp_path / "results" / "models" / "model.csv")["longname"].to_list()
    )


def test_rows_that_lacked_memory_are_computed_when_there_is_more(tmp_path: Path) -> None:
    tensors = random_weights(size=300)
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 8), np.float32)
    folder = one_file(tmp_path / "model", tensors | {"small.weight": tensors["model.norm.weight"].reshape(20, 15)})
    out = tmp_path / "results"
    assert cli("scan", folder, "--out", out, "--max-memory", "1MB").exit_code == 3
    before = {row["longname"]: row for row in pl.read_csv(out / "models" / "model.csv").to_dicts()}
    assert before["small"]["status"] == "ok"
    assert sum("needs " in (row["reason"] or "") for row in before.values()) == 5
    computed = started(folder, out, max_memory="1GB")
    assert sorted(computed) == sorted(name for name, row in before.items() if "needs " in (row["reason"] or ""))
    after = {row["longname"]: row for row in pl.read_csv(out / "models" / "model.csv").to_dicts()}
    assert after["small"] == before["small"]
    assert [name for name, row in after.items() if row["status"] == "failed"] == ["model.layers.0.self_attn.q_proj"]
    assert len(load_file(out / "spectra" / "model.safetensors")) == 6
    assert started(folder, out) == []


def test_reasons_of_the_machine_may_pass_and_others_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardesd import spectra

    errors = iter([MemoryError("x"), TimeoutError("y"), ValueError("z"), RuntimeError("CUDA error: an illegal memory")])
    real = spectra.compute

    def compute(*arguments: object, **options: object) -> object:
        if (error := next(errors, None)) is not None:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(spectra, "compute", compute)
    folder = one_file(tmp_path / "model", random_weights())
    shardesd.scan(folder, out=tmp_path / "results", device="cpu")
    layers = pl.read_csv(tmp_path / "results" / "models" / "model.csv")
    reasons = sorted(reason for reason in layers["reason"] if reason)
    assert len(reasons) == 4
    assert len(started(folder, tmp_path / "results")) == 3


def test_a_folder_and_its_only_file_are_the_same_weights(folder: Path, tmp_path: Path) -> None:
    assert len(started(folder, tmp_path / "results", include="*layers.3.*")) == 3
    assert started(folder / "model.safetensors", tmp_path / "results", include="*layers.3.*") == []
    (tmp_path / "link").symlink_to(folder)
    assert started(tmp_path / "link", tmp_path / "results", include="*layers.3.*") == []


def test_a_table_in_another_format_says_what_it_is_made_from(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert len(started(folder, out, include="*layers.3.*")) == 3
    result = cli("scan", folder, "--out", out, "--include", "*layers.3.*", "--format", "parquet")
    models = out / "models"
    assert f"already done: {models / 'model.parquet'} is made from {models / 'model.csv'}" in result.stderr


def test_the_folder_of_unfinished_scans_goes_with_the_last_of_them(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    started(folder, out, include="*layers.3.*")
    assert sorted(path.name for path in out.iterdir()) == ["models", "runs", "spectra", "summary.csv"]
    started(folder, out, include="*layers.3.*")
    assert not (out / "partial").exists()


def test_locks_of_the_dead_are_removed_and_those_of_the_living_stay(folder: Path, tmp_path: Path) -> None:
    import platform

    dead = subprocess.Popen(["true"])
    dead.wait()
    partial = tmp_path / "results" / "partial"
    partial.mkdir(parents=True)
    for name, text in (
        ("dead", f"process {dead.pid} on {platform.node()}"),
        ("alive", f"process {os.getpid()} on {platform.node()}"),
        ("elsewhere", f"process {dead.pid} on another-{platform.node()}"),
    ):
        (partial / f"{name}.pid").write_text(text)
        (partial / f"{name}.lock").touch()
    started(folder, tmp_path / "results", include="*layers.3.*")
    left = {path.name for path in partial.iterdir()}
    assert left == {"alive.pid", "alive.lock", "elsewhere.pid", "elsewhere.lock"}


def test_the_demo_may_be_told_not_to_overwrite(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardesd.demo.minilm", lambda: folder)
    for arguments, again in (([], False), ([], False), (["--no-overwrite"], True), (["--overwrite"], False)):
        result = cli("demo", "--out", tmp_path / "results", *arguments)
        assert result.exit_code == 0
        assert ("already done" in result.stderr) is again


def half_failed(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and an output folder with its finished scan, of which a row failed for want of memory."""
    rng = np.random.default_rng(0)
    tensors = {"a.weight": rng.standard_normal((600, 600)), "b.weight": rng.standard_normal((24, 24))}
    folder = one_file(tmp_path / "model", {name: W.astype(np.float32) for name, W in tensors.items()})
    out = tmp_path / "out"
    assert shardesd.scan(folder, out=out, max_memory="1MB").layers["status"].to_list() == ["failed", "ok"]
    return folder, out


def test_a_finish_that_failed_between_its_files_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """λ of more matrices than the table has rows: it was not cut short, but is not yet written."""
    folder, out = half_failed(tmp_path)

    def full(self: object, layers: object) -> None:
        raise NoSpace("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ModelStore, "_write_table", full)
        with pytest.raises(NoSpace):
            shardesd.scan(folder, out=out)
    assert cli("summarize", out).exit_code == 0
    result = shardesd.scan(folder, out=out)
    assert result.layers["status"].to_list() == ["ok", "ok"]
    assert sorted(result.spectra) == ["a", "b"]


def test_rows_whose_spectra_were_taken_away_are_computed_again_beside_those_that_failed(tmp_path: Path) -> None:
    folder, out = half_failed(tmp_path)
    for path in (out / "spectra").iterdir():
        path.unlink()
    result = shardesd.scan(folder, out=out)
    assert result.layers["status"].to_list() == ["ok", "ok"]
    assert sorted(result.spectra) == ["a", "b"]
