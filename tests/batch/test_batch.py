"""A batch of thirty models from a hub, in processes of their own: what is left in the end, and after a second run."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from batch_models import ADAPTERS, fill
from checkpoints import cli, command, one_file, random_weights
from hub_server import Fault, HubServer, short_waits, use_hub

import shardesd
from shardesd.batch import log_file, tables
from shardesd.events import (
    BatchEvent,
    BatchStarted,
    ModelDone,
    ModelEvent,
    ModelFailed,
    ModelStarted,
    Notice,
    RowDone,
    ScanStarted,
)
from shardesd.results import edit_table

FAILED = {
    "org/gated": ("source", "access_denied"),
    "org/missing": ("source", "not_found"),
    "org/pickled": ("checkpoint", "no_safetensors"),
    "org/truncated": ("checkpoint", "malformed"),
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def run(hub: HubServer, tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("batch", tmp_path / "models.csv", "--out", tmp_path / "results", *arguments),
        env=hub.env(cache_home=tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_thirty_models_of_every_kind(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "models.csv").write_text(fill(hub))
    plan = run(hub, tmp_path, "--dry-run")
    assert plan.returncode == 3, plan.stderr
    assert "30 models: 27 new, 3 impossible" in plan.stdout
    assert "org/gated" in plan.stdout
    assert not (tmp_path / "results").exists()
    assert not hub.paths("GET", "*/model*.safetensors")

    done = run(hub, tmp_path)
    assert done.returncode == 3, done.stderr
    out = tmp_path / "results"
    summary = pl.read_csv(out / "summary.csv")
    names = [f"org/plain{i}" for i in range(12)] + [f"org/sharded{i}" for i in range(6)]
    names += [f"org/adapter{i}" for i in range(ADAPTERS)] + [f"org/plain{i}" for i in range(3)] + ["org/nan"]
    assert summary["model_id"].to_list() == names
    assert summary["likes"].to_list()[:12] == list(range(12))
    assert summary.filter(pl.col("revision") == "v1")["likes"].to_list() == [300, 301, 302]
    assert summary.filter(pl.col("num_failed") > 0)["model_id"].to_list() == ["org/nan"]
    adapters = summary.filter(pl.col("is_adapter"))
    assert adapters["source_model"].to_list() == ["org/plain0"] * ADAPTERS
    assert adapters["base_model_relation"].to_list() == ["lora"] * ADAPTERS
    for number, name in ((3, "org/plain3"), (0, "org/plain0")):
        expected = shardesd.scan(one_file(tmp_path / f"check{number}", random_weights(size=16, seed=number)))
        row = summary.filter((pl.col("model_id") == name) & pl.col("revision").is_null())
        assert row["alpha_mean"].item() == expected.summary["alpha_mean"]
    failed = pl.read_csv(out / "failed_models.csv")
    assert {r["model_id"]: (r["stage"], r["reason"]) for r in failed.iter_rows(named=True)} == FAILED
    assert set(failed["attempts"].to_list()) == {1}
    assert not list(out.glob("partial/*"))
    assert not (out / "claims").exists()

    requests = len(hub.log)
    again = run(hub, tmp_path, "--json")
    assert again.returncode == 3
    assert sorted(json.loads(line)["model_id"] for line in again.stdout.splitlines()) == sorted(names)
    assert len(hub.log) == requests, "done models, and those that failed for good, are not asked for again"
    assert pl.read_csv(out / "summary.csv").equals(summary)
    assert pl.read_csv(out / "failed_models.csv").equals(failed)
    assert f"30 models: {len(names)} done, {len(FAILED)} failed, 0 left" in again.stderr

    hub.repos["org/gated"].gated = False
    third = run(hub, tmp_path, "--retry-failed", "--only", "org/gated", "--quiet")
    assert third.returncode == 0, third.stderr
    assert "org/gated" not in (out / "failed_models.csv").read_text()
    assert "org/gated" in (out / "summary.csv").read_text()


def batch(models: object, out: Path, **options: object) -> list[BatchEvent]:
    events: list[BatchEvent] = []
    for _ in shardesd.scan_many(models, out=out, on_event=events.append, **options):  # type: ignore[arg-type]
        pass
    return events


def started(events: list[BatchEvent]) -> list[str]:
    return [event.model for event in events if isinstance(event, ModelStarted)]


def _is(event: BatchEvent, kind: type) -> bool:
    return isinstance(event, ModelEvent) and isinstance(event.event, kind)


def test_what_may_pass_is_tried_again_after_the_others(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        hub.add(f"org/m{i}", one_file(tmp_path / f"m{i}", random_weights(size=16, seed=i)))
    use_hub(monkeypatch, hub, tmp_path / "home")
    short_waits(monkeypatch)
    hub.fail("/org/m0/resolve/*", *[Fault(status=500)] * 40, method="GET")
    hub.fail("/org/m1/resolve/*", Fault(status=429, headers={"Retry-After": "9999"}), method="GET", forever=True)
    events = batch(["org/m0", "org/m1", "org/m2"], tmp_path / "out", retries=1, backoff=0.5)
    failures = [event for event in events if isinstance(event, ModelFailed)]
    assert {(f.model, f.reason) for f in failures} >= {("org/m0", "server_error"), ("org/m1", "rate_limited")}
    assert started(events)[:3] == ["org/m0", "org/m1", "org/m2"]
    assert [f.again_in for f in failures if f.model == "org/m1"] == [0.5, None]
    noted = pl.read_csv(tmp_path / "out" / "failed_models.csv")
    assert noted.filter(pl.col("model_id") == "org/m1")["attempts"].item() == 2
    hub.mend()
    events = batch(["org/m0", "org/m1", "org/m2"], tmp_path / "out")
    assert {e.model for e in events if isinstance(e, ModelDone)} >= {"org/m1"}
    assert "org/m2" not in started(events)
    assert pl.read_csv(tmp_path / "out" / "failed_models.csv").is_empty()


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_a_finished_table_that_cannot_be_read_or_was_cut_short_costs_its_own_model(tmp_path: Path, lines: int) -> None:
    places = [str(one_file(tmp_path / name, random_weights())) for name in ("one", "two")]
    batch(places[:1], tmp_path / "out")
    table = tmp_path / "out" / "models" / "one.csv"
    table.write_bytes(b"".join(table.read_bytes().splitlines(keepends=True)[:lines]))
    events = batch(places, tmp_path / "out")
    (failure,) = [event for event in events if isinstance(event, ModelFailed)]
    assert (failure.model, failure.reason) == ("one", "results")
    assert "--overwrite" in failure.message
    assert started(events) == ["two"]
    assert (tmp_path / "out" / "models" / "two.csv").exists()
    assert started(batch(places[:1], tmp_path / "out", overwrite=True)) == ["one"]


def test_results_of_other_options_are_not_done(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    batch([str(folder)], tmp_path / "out")
    (failure,) = [e for e in batch([str(folder)], tmp_path / "out", bins=50) if isinstance(e, ModelFailed)]
    assert failure.reason == "other_options"
    assert "bins=100, now 50" in failure.message
    assert "--overwrite" in failure.message
    events = batch([str(folder)], tmp_path / "out", bins=50, overwrite=True)
    assert started(events) == ["model"]
    assert pl.read_csv(tmp_path / "out" / "failed_models.csv").is_empty()
    run_file = json.loads((tmp_path / "out" / "runs" / "model.json").read_text())
    assert run_file["options"]["bins"] == 50
    one_file(folder, random_weights(seed=5))
    (failure,) = [e for e in batch([str(folder)], tmp_path / "out", bins=50) if isinstance(e, ModelFailed)]
    assert "other weights" in failure.message


def wholes(hub: HubServer) -> list[str]:
    """Paths of the shards that were asked for as a whole."""
    return [request.path for request in hub.requests("GET", "*.safetensors") if request.range is None]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_half_done_scan_of_other_options_is_kept_for_its_own_or_replaced(tmp_path: Path, overwrite: bool) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=40, size=200))
    out, stop = tmp_path / "out", threading.Event()
    rows: list[BatchEvent] = []

    def stop_soon(event: BatchEvent) -> None:
        if _is(event, RowDone):
            rows.append(event)
            if len(rows) == 5:
                stop.set()
                time.sleep(0.5)  # until the batch has seen it

    list(shardesd.scan_many([str(folder)], out=out, on_event=stop_soon, stop=stop))
    assert (out / "partial" / "model.jsonl").exists()
    (failure,) = [e for e in batch([str(folder)], out, bins=50) if isinstance(e, ModelFailed)]
    assert (failure.reason, failure.again_in) == ("other_options", None)
    if overwrite:
        assert started(batch([str(folder)], out, bins=50, overwrite=True)) == ["model"]
        assert json.loads((out / "runs" / "model.json").read_text())["options"]["bins"] == 50
    else:
        (begun,) = [e.event for e in batch([str(folder)], out) if isinstance(e, ModelEvent) and _is(e, ScanStarted)]
        assert isinstance(begun, ScanStarted)
        assert begun.resumed > 0, "with its own options it goes on where it was"
    assert pl.read_csv(out / "failed_models.csv").is_empty()


def test_a_list_s_columns_never_replace_what_a_scan_has_found(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    (tmp_path / "models.csv").write_text(f"full_name,seconds,num_layers,likes\n{folder},-1,999,5\n")
    batch(tmp_path / "models.csv", tmp_path / "out")
    row = pl.read_csv(tmp_path / "out" / "summary.csv").row(0, named=True)
    assert (row["num_layers"], row["list_num_layers"], row["list_seconds"], row["likes"]) == (6, 999, -1, 5)
    assert row["seconds"] > 0


def test_bad_lines_are_noted_once_and_only_while_the_list_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    edits: list[Path] = []
    monkeypatch.setattr(tables, "edit_table", lambda path, *a, **k: edits.append(path) or edit_table(path, *a, **k))
    listed, out = tmp_path / "models.csv", tmp_path / "out"
    bad = "".join(f"org/b {i},\n" for i in [*range(40), 0, 0])
    gone = "".join(f"{tmp_path}/gone/m{i},\n" for i in range(40))
    listed.write_text(f"model_id,x\n{bad}{gone}{folder},\n")
    events = batch(listed, out)
    assert len(edits) < 10, "the table is written for all of them together: there may be thousands"
    (begun,) = [event for event in events if isinstance(event, BatchStarted)]
    assert (begun.models, begun.failed, begun.left) == (83, 82, 1)
    noted = (out / "failed_models.csv").read_bytes()
    assert pl.read_csv(out / "failed_models.csv")["attempts"].to_list() == [1] * 80
    batch(listed, out)
    assert (out / "failed_models.csv").read_bytes() == noted
    listed.write_text(f"model_id,x\n{gone}{folder},\n")
    batch(listed, out)
    assert pl.read_csv(out / "failed_models.csv")["reason"].to_list() == ["not_found"] * 40


def test_what_is_done_is_written_in_the_format_that_is_asked_for(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/m", one_file(tmp_path / "m", random_weights(size=16)))
    (tmp_path / "models.csv").write_text("model_id\norg/m\n")
    run(hub, tmp_path)
    requests = len(hub.log)
    assert run(hub, tmp_path, "--format", "parquet", "--show-skipped").returncode == 0
    models = tmp_path / "results" / "models"
    table, before = pl.read_parquet(models / "org--m.parquet"), pl.read_csv(models / "org--m.csv")
    assert table.filter(pl.col("status") != "skipped")["alpha"].to_list() == before["alpha"].to_list()
    assert table.height > before.height
    assert len(hub.log) == requests
    assert run(hub, tmp_path, "--format", "parquet").returncode == 0


def test_a_reader_that_leaves_ends_the_batch_with_its_code(tmp_path: Path) -> None:
    folders = [str(one_file(tmp_path / f"m{i}", random_weights(seed=i))) for i in range(30)]
    (tmp_path / "models.txt").write_text("\n".join(folders))
    arguments = command("batch", tmp_path / "models.txt", "--out", tmp_path / "out", "--json")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["model_id"] == "m0"
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(60) == 3, said
    assert "interrupted:" in said
    assert "Broken" not in said


@pytest.mark.parametrize(
    "words", ["batch LIST --dry-run", "models check LIST --reach", "models create --from LIST --to NEW"]
)
def test_ctrl_c_does_not_wait_for_a_server(tmp_path: Path, words: str) -> None:
    (tmp_path / "models.txt").write_text("org/a\norg/b\n")
    words = words.replace("LIST", str(tmp_path / "models.txt")).replace("NEW", str(tmp_path / "new.csv"))
    with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
        server.settimeout(60)
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            command(*words.split()),
            env={**os.environ, "HF_ENDPOINT": place, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = server.accept()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=5)
        connection.close()
    assert (process.returncode, stderr) == (130, "error: interrupted\n")


def test_a_glob_that_meets_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "models.txt").write_text("org/a\n")
    found = cli(
        "batch", tmp_path / "models.txt", "--only", "org/b*", "--only", "zzz", "--dry-run", "--out", tmp_path / "o"
    )
    assert found.stderr.splitlines() == [
        "note: --only 'org/b*' matches no model of the list",
        "note: --only 'zzz' matches no model of the list",
    ]


def test_a_log_that_cannot_be_written_says_nothing_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_file(tmp_path, "info") as note:
        (handler,) = [h for h in logging.getLogger("shardesd").handlers if isinstance(h, logging.FileHandler)]
        handler.stream = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
        note(Notice(message="hello"))
    assert capsys.readouterr().err == ""


def test_the_next_model_downloads_while_this_one_is_computed(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        hub.add(f"org/m{i}", one_file(tmp_path / f"m{i}", random_weights(layers=6, size=100, seed=i)))
    use_hub(monkeypatch, hub, tmp_path / "home")
    seen: dict[str, int] = {}

    def listen(event: BatchEvent) -> None:
        if isinstance(event, ModelDone):
            seen[event.model] = len(wholes(hub))

    list(shardesd.scan_many([f"org/m{i}" for i in range(3)], out=tmp_path / "out", on_event=listen))
    assert seen == {"org/m0": 2, "org/m1": 3, "org/m2": 3}


def test_models_of_one_base_come_together_and_limits_hold(tmp_path: Path) -> None:
    from shardesd.batch import as_list
    from shardesd.batch.plan import chosen
    from shardesd.options import BatchOptions

    rows = [
        {"model_id": "org/a"},
        {"model_id": "org/x", "source_model": "org/b", "base_model_relation": "lora"},
        {"model_id": "org/c"},
        {"model_id": "org/b"},
        {"model_id": "org/y", "source_model": "org/b", "base_model_relation": "adapter"},
    ]
    order = [row.model_id for row in chosen(as_list(rows), BatchOptions())]
    assert order == ["org/a", "org/x", "org/b", "org/y", "org/c"]
    assert [r.model_id for r in chosen(as_list(rows), BatchOptions(only=("org/[xy]",)))] == ["org/x", "org/y"]
    assert len(chosen(as_list(rows), BatchOptions(limit=2))) == 2
    shuffled = [[r.model_id for r in chosen(as_list(rows), BatchOptions(shuffle=s))] for s in (1, 1, 2)]
    assert shuffled[0] == shuffled[1]
    assert sorted(shuffled[2]) == sorted(order)
    assert len({tuple(s) for s in shuffled} | {tuple(order)}) == 3


def test_side_by_side_gives_the_same_tables(tmp_path: Path) -> None:
    folders = [str(one_file(tmp_path / f"m{i}", random_weights(seed=i))) for i in range(6)]
    for workers in (1, 3):
        batch(folders, tmp_path / f"out{workers}", workers=workers)
    one, three = (pl.read_csv(tmp_path / f"out{w}" / "summary.csv").drop("seconds") for w in (1, 3))
    assert one.equals(three)


def test_scan_many_gives_results_and_takes_up_what_is_done(tmp_path: Path) -> None:
    folders = [str(one_file(tmp_path / f"m{i}", random_weights(seed=i))) for i in range(3)]
    first = next(results := shardesd.scan_many(folders, out=tmp_path / "out"))
    assert first.layers.height == 6
    assert len(first.spectra) == 6
    results.close()
    found = list(shardesd.scan_many(folders, out=tmp_path / "out"))
    assert sorted(r.model_id for r in found) == ["m0", "m1", "m2"]
    assert first.summary["alpha_mean"] == found[0].summary["alpha_mean"]
    with pytest.raises(shardesd.ShardesdError, match="option 'nonsense' is unknown"):
        shardesd.scan_many(folders, out=tmp_path / "out", nonsense=1)
