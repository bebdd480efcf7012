"""One model's files from begin to finish: new, resumed, done, refused, replaced."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shardesd.errors import NoSpace, ResultsError
from shardesd.options import FORMATS, ScanOptions
from shardesd.records import NO_MEMORY, Row
from shardesd.results import MemoryStore, ModelStore, read_table, to_rows
from shardesd.results import store as store_module
from shardesd.results.store import Begun

ROOT = Path(__file__).parents[2]
Rows = Callable[..., Row]
Eigs = Callable[..., np.ndarray]
NAMES = ["layers.10.q", "layers.2.q", "layers.1.q"]
PROVENANCE = {"commit": "c" * 40, "versions": {"shardesd": "0.1.0"}, "peak_memory": 5}


def fingerprint(digest: str = "d1", version: str = "0.1", **options: Any) -> dict[str, Any]:
    return {"options": ScanOptions(**options).numbers(), "shardesd": version, "shards": [["model.safetensors", digest]]}


def natural(name: str) -> int:
    return int(name.split(".")[1])


@pytest.fixture
def scan(tmp_path: Path, row: Rows, eigs: Eigs) -> Callable[..., ModelStore]:
    """A whole scan of three matrices, one failed one and two skipped tensors."""

    def run(out: str = "out", *, format: str = "csv", overwrite: bool = False, **options: Any) -> ModelStore:
        store = ModelStore(tmp_path / out, "org/name", None, format)
        assert store.begin(fingerprint(**options), overwrite=overwrite).state == "new"
        for name in NAMES:
            store.append(row(name), eigs(name))
        store.append(row("layers.3.q", alpha=None, status="failed", reason="2 elements are NaN"), None)
        for name in ("layers.0.norm", "layers.11.norm"):
            store.append(Row(model_id="org/name", longname=name, status="skipped", reason="norm"), None)
        store.finish(natural, PROVENANCE)
        return store

    return run


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


THE_FILES = [
    "models/org--name.csv",
    "runs/org--name.json",
    "spectra/org--name.safetensors",
    "summary.csv",
]


def test_a_whole_scan(tmp_path: Path, scan: Callable[..., ModelStore], row: Rows, eigs: Eigs) -> None:
    store = scan()
    out = tmp_path / "out"
    assert files(out) == THE_FILES
    expected = [
        row("layers.1.q"),
        row("layers.2.q"),
        row("layers.3.q", alpha=None, status="failed", reason="2 elements are NaN"),
        row("layers.10.q"),
    ]
    assert to_rows(read_table(store.table_path)) == expected

    result = store.result()
    assert to_rows(result.layers) == expected
    assert result.skipped == {"norm": 2}
    assert result.failed["longname"].to_list() == ["layers.3.q"]
    assert (result.summary["num_layers"], result.summary["num_failed"]) == (3, 1)
    assert list(result.spectra) == ["layers.1.q", "layers.2.q", "layers.10.q"]
    assert all(np.array_equal(result.spectra[name], eigs(name)) for name in NAMES)
    assert [path.relative_to(out).as_posix() for path in result.files] == [
        THE_FILES[0],
        THE_FILES[2],
        THE_FILES[1],
        THE_FILES[3],
    ]
    with safe_open(store.spectra_path, framework="numpy") as file:
        assert file.metadata() == {"model_id": "org/name", "commit": "c" * 40, "shardesd": "0.1.0"}
    run = json.loads(store.run_path.read_text())
    assert run["fingerprint"] == json.loads(json.dumps(fingerprint()))
    assert run["peak_memory"] == 5
    assert run["files"] == [THE_FILES[0], THE_FILES[2]]
    assert [entry["position"] for entry in run["skipped"]] == [0, 5]
    assert run["finished_at"].endswith("+00:00")


def test_amend_may_change_and_skip(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    """A duplicate that is found out at the end leaves the table and the spectra."""

    def amend(one: Row) -> Row:
        if one.longname == "layers.2.q":
            return replace(one, status="skipped", reason="tied")
        return replace(one, source_model="org/base")

    with ModelStore(tmp_path, "org/name", "v1") as store:
        store.begin(fingerprint(), overwrite=False)
        for name in NAMES:
            store.append(row(name), eigs(name))
        store.finish(natural, {}, amend)
        result = store.result()
    assert result.layers["longname"].to_list() == ["layers.1.q", "layers.10.q"]
    assert set(result.layers["source_model"]) == {"org/base"}
    assert set(result.spectra) == {"layers.1.q", "layers.10.q"}
    assert result.skipped == {"tied": 1}
    assert store.table_path == tmp_path / "models" / "org--name@v1.csv"
    assert result.revision == "v1"


def test_done_is_not_done_again(scan: Callable[..., ModelStore], tmp_path: Path) -> None:
    first = scan().result()
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in THE_FILES}
    store = ModelStore(tmp_path / "out", "org/name", None)
    begun = store.begin(fingerprint(), overwrite=False)
    assert begun.state == "done"
    assert [row.longname for row in begun.rows if row.status == "skipped"] == ["layers.0.norm", "layers.11.norm"]
    assert store.result().layers.equals(first.layers)
    assert store.result().skipped == first.skipped
    assert store.result().summary == first.summary
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in THE_FILES} == before
    with pytest.raises(RuntimeError):
        store.append(begun.rows[0], None)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_done_in_another_format_is_converted(scan: Callable[..., ModelStore], tmp_path: Path, format: str) -> None:
    first = scan().result()
    store = ModelStore(tmp_path / "out", "org/name", None, format)
    assert store.begin(fingerprint(), overwrite=False).state == "done"
    assert read_table(tmp_path / "out" / "models" / f"org--name.{format}").equals(first.layers)
    assert json.loads(store.run_path.read_text())["files"][:2] == [f"models/org--name.{format}", "models/org--name.csv"]
    assert store.result().files[0] == store.table_path
    # A new scan replaces the table in every format, so that none of them tells another story.
    scan(format="parquet", overwrite=True, bins=7)
    assert files(tmp_path / "out" / "models") == ["org--name.parquet"]


def test_skipped_rows_come_and_go_without_a_new_scan(scan: Callable[..., ModelStore], tmp_path: Path) -> None:
    plain = scan().table_path.read_bytes()
    store = ModelStore(tmp_path / "out", "org/name", None, show_skipped=True)
    assert store.begin(fingerprint(), overwrite=False).state == "done"
    assert store.result().layers["longname"].to_list() == [
        "layers.0.norm",
        "layers.1.q",
        "layers.2.q",
        "layers.3.q",
        "layers.10.q",
        "layers.11.norm",
    ]
    assert read_table(store.table_path).equals(store.result().layers)
    assert store.result().summary["num_layers"] == 3
    store = ModelStore(tmp_path / "out", "org/name", None)
    assert store.begin(fingerprint(), overwrite=False).state == "done"
    assert store.table_path.read_bytes() == plain


def test_resume(tmp_path: Path, row: Rows, eigs: Eigs, scan: Callable[..., ModelStore]) -> None:
    whole = scan("whole")
    with ModelStore(tmp_path, "org/name", None) as store:
        store.begin(fingerprint(), overwrite=False)
        store.append(row(NAMES[0]), eigs(NAMES[0]))
    assert files(tmp_path / "partial") == ["org--name.jsonl"]
    store = ModelStore(tmp_path, "org/name", None)
    begun = store.begin(fingerprint(), overwrite=False)
    assert (begun.state, begun.rows) == ("resumed", (row(NAMES[0]),))
    for name in NAMES[1:]:
        store.append(row(name), eigs(name))
    store.append(row("layers.3.q", alpha=None, status="failed", reason="2 elements are NaN"), None)
    store.finish(natural, PROVENANCE)
    assert files(tmp_path / "partial") == []
    for ours, theirs in ((store.table_path, whole.table_path), (store.spectra_path, whole.spectra_path)):
        assert ours.read_bytes() == theirs.read_bytes()


def test_rows_that_no_tensor_has_are_left_out(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    """What an interrupted run called them was another tensor's name, or nobody's, once all names were known."""
    told = {"a": "a.weight", "b": "b", "c": "c.weight", "c#2": "c", "d": None, "gone": None}
    with ModelStore(tmp_path, "org/name", None) as store:
        store.begin(fingerprint(), overwrite=False)
        for name, tensor in told.items():
            store.append(row(name), eigs(name, 3), tensor)
    with ModelStore(tmp_path, "org/name", None) as store:
        begun = store.begin(fingerprint(), overwrite=False)
        assert begun.tensors == {name: tensor for name, tensor in told.items() if tensor}
        store.append(row("c"), eigs("c", 5), "c")
        owners = {"a": "a.weight", "b": "b.weight", "c": "c", "d": "d.weight"}
        store.finish(order=str, provenance={}, owners=owners)
        result = store.result()
    assert result.layers["longname"].to_list() == ["a", "c", "d"]
    assert {name: len(found) for name, found in result.spectra.items()} == {"a": 3, "c": 5, "d": 3}


def test_nothing_done_leaves_nothing(tmp_path: Path) -> None:
    with ModelStore(tmp_path, "org/name", None) as store:
        store.begin(fingerprint(), overwrite=False)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fix_fingers": "DKS"}, "with fix_fingers=xmin_mid, now DKS"),
        ({"bins": 7, "include": ("a*", "b*")}, "with bins=100, now 7 and with include=none, now a*,b*"),
        ({"bins": 7, "max_aspect": 2.0, "exclude": "x", "embeddings": True}, "and with 2 other options changed"),
        ({"digest": "d2"}, "of other weights"),
        ({"version": "0.2"}, "by shardesd 0.1, now 0.2"),
        ({"digest": "d2", "bins": 7}, "with bins=100, now 7 and of other weights"),
    ],
)
def test_made_otherwise(
    scan: Callable[..., ModelStore], tmp_path: Path, row: Rows, changes: dict[str, Any], words: str
) -> None:
    store = scan()
    before = store.table_path.read_bytes()
    again = ModelStore(tmp_path / "out", "org/name", None)
    with pytest.raises(ResultsError) as raised:
        again.begin(fingerprint(**changes), overwrite=False)
    assert str(raised.value).startswith(f"{store.table_path} was made ")
    assert words in str(raised.value)
    assert str(raised.value).endswith("; add --overwrite to replace it, or choose another --out")
    # The same for work that is half done.
    with ModelStore(tmp_path / "half", "org/name", None) as half:
        half.begin(fingerprint(), overwrite=False)
        half.append(row("x"), None)
    with pytest.raises(ResultsError, match=r"partial/org--name\.jsonl holds an unfinished scan made .*--overwrite"):
        half.begin(fingerprint(**changes), overwrite=False)
    assert half.begin(fingerprint(), overwrite=False).state == "resumed"
    half.close()
    # With overwrite: from nothing, and the old table stays until the new one is there.
    assert again.begin(fingerprint(**changes), overwrite=True).state == "new"
    again.append(row("layers.7.q"), None)
    assert store.table_path.read_bytes() == before
    again.finish(natural, {})
    assert again.result().layers["longname"].to_list() == ["layers.7.q"]
    assert ModelStore(tmp_path / "out", "org/name", None).begin(fingerprint(**changes), overwrite=False).state == "done"


def test_an_unfinished_overwrite_goes_on(scan: Callable[..., ModelStore], tmp_path: Path, row: Rows) -> None:
    """And the result it was to replace is still whole for whoever asks for it."""
    scan()
    with ModelStore(tmp_path / "out", "org/name", None) as store:
        store.begin(fingerprint(bins=7), overwrite=True)
        store.append(row("layers.7.q"), None)
    assert ModelStore(tmp_path / "out", "org/name", None).begin(fingerprint(), overwrite=False).state == "done"
    with ModelStore(tmp_path / "out", "org/name", None) as store:
        assert store.begin(fingerprint(bins=7), overwrite=False).state == "resumed"


def test_a_table_without_provenance_is_not_replaced(tmp_path: Path, scan: Callable[..., ModelStore]) -> None:
    store = scan()
    for text in (None, "{", "[]"):
        store.run_path.unlink() if text is None else store.run_path.write_text(text)
        with pytest.raises(ResultsError, match="was made without a record of how; add --overwrite"):
            store.begin(fingerprint(), overwrite=False)


@pytest.mark.parametrize("step", ["write_spectra", "_write_table", "_write_run", "update_summary"])
@pytest.mark.parametrize("before", [None, {"bins": 7}], ids=["fresh", "over an older table"])
def test_death_between_the_steps_of_finish(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scan: Callable[..., ModelStore],
    row: Rows,
    eigs: Eigs,
    step: str,
    before: dict[str, Any] | None,
) -> None:
    """Whatever was written and whatever not: the next run ends with the files of an undisturbed one."""
    whole = scan("whole")
    if before:
        scan(**before, format="jsonl")

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        owner = ModelStore if step.startswith("_") else store_module
        patch.setattr(owner, step, die)
        with pytest.raises(Killed):
            scan(overwrite=True)
    out = tmp_path / "out"
    if before and step != "update_summary":  # the older run is not taken for what it no longer is
        with pytest.raises(ResultsError):
            ModelStore(out, "org/name", None).begin(fingerprint(**before), overwrite=False)
    store = ModelStore(out, "org/name", None)
    begun = store.begin(fingerprint(), overwrite=False)
    assert len(begun.rows) == 6
    if step == "update_summary":
        assert begun.state == "done"
    else:
        assert begun.state == "resumed"
        store.finish(natural, PROVENANCE)
    assert files(out) == THE_FILES
    for name in (THE_FILES[0], *THE_FILES[2:]):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert whole.result().summary == store.result().summary


@pytest.mark.parametrize("step", ["write_spectra", "_write_table", "write_stats", "_write_run"])
def test_death_of_one_that_tries_failed_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Rows, eigs: Eigs, step: str
) -> None:
    """In another format: what the first one wrote is not taken for what it no longer is."""

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    names = ["layers.0.q", "layers.1.q"]
    failed = row(names[1], status="failed", reason=f"{NO_MEMORY}3 GB", alpha=None)
    with ModelStore(tmp_path, "org/name", None) as store:
        store.begin(fingerprint(), overwrite=False)
        store.append(row(names[0]), eigs(names[0]))
        store.append(failed, None)
        store.finish(natural, {**PROVENANCE, "tensors": {"layers.0.q": "another"}})
    with ModelStore(tmp_path, "org/name", None, "parquet") as store, monkeypatch.context() as patch:
        assert len(store.begin(fingerprint(), overwrite=False).rows) == 1
        store.append(row(names[1]), eigs(names[1]))
        patch.setattr(ModelStore if step.startswith("_") else store_module, step, die)
        with pytest.raises(Killed):
            store.finish(natural, PROVENANCE)
    for format in ("parquet", "csv"):
        with ModelStore(tmp_path, "org/name", None, format) as store:
            begun = store.begin(fingerprint(), overwrite=False)
            assert [one.status for one in begun.rows] == ["ok", "ok"]
            if begun.state == "resumed":
                store.finish(natural, PROVENANCE)
            assert sorted(store.result().spectra) == names
            assert "tensors" not in json.loads(store.run_path.read_text())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_finish_that_can_not_write_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Rows, eigs: Eigs, code: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    store = ModelStore(tmp_path, "org/name", None)
    store.begin(fingerprint(), overwrite=False)
    store.append(row("layers.1.q"), eigs("layers.1.q"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(NoSpace if code == errno.ENOSPC else ResultsError):
            store.finish(natural, {})
    store.close()
    assert files(tmp_path) == ["partial/org--name.jsonl"]
    store = ModelStore(tmp_path, "org/name", None)
    assert store.begin(fingerprint(), overwrite=False).state == "resumed"
    assert store.finish(natural, {})


@pytest.mark.parametrize("where", ["out", "out/models", "out/spectra", "out/runs", "out/partial"])
def test_a_file_in_the_way_is_found_at_begin(tmp_path: Path, where: str) -> None:
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    with pytest.raises(ResultsError, match=rf"can't write into {path}.*: {path} is not a folder; choose another --out"):
        ModelStore(tmp_path / "out", "org/name", None).begin(fingerprint(), overwrite=False)


def test_a_read_only_folder_is_found_at_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write anywhere: let the system call say what it says to others

        def refuse(self: Path, _: bytes) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

        monkeypatch.setattr(Path, "write_bytes", refuse)
    else:
        tmp_path.chmod(0o555)
    with pytest.raises(ResultsError) as raised:
        ModelStore(tmp_path, "org/name", None).begin(fingerprint(), overwrite=False)
    assert str(raised.value) == f"can't write into {tmp_path}: permission denied; choose another --out"


def test_another_summary_is_found_at_begin(tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text("something,else\n1,2\n")
    with pytest.raises(ResultsError, match=r"summary\.csv is not a table of models"):
        ModelStore(tmp_path, "org/name", None).begin(fingerprint(), overwrite=False)
    assert files(tmp_path) == ["summary.csv"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / ".org--name.csv.4242.tmp").write_text("half")
    (tmp_path / "models" / ".org--other.csv.4242.tmp").write_text("of a process that may be alive")
    with ModelStore(tmp_path, "org/name", None) as store:
        store.begin(fingerprint(), overwrite=False)
    assert files(tmp_path) == ["models/.org--other.csv.4242.tmp"]


CHILD = """
import sys, time
import numpy as np
from shardesd.records import Row
from shardesd.results import ModelStore
store = ModelStore(sys.argv[1], "org/name", None)
print(store.begin({"options": {}}, overwrite=False).state, flush=True)
store.append(Row(model_id="org/name", longname="x"), np.ones(3))
print("appended", flush=True)
time.sleep(60)
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    """The second is told who holds the model; when the first is killed with -9 the way is free at once."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    try:
        assert [child.stdout.readline().strip() for _ in range(2)] == ["new", "appended"]
        store = ModelStore(tmp_path, "org/name", None)
        for overwrite in (False, True):
            with pytest.raises(ResultsError, match=rf"process {child.pid} on \S+ is scanning org/name into {tmp_path}"):
                store.begin({"options": {}}, overwrite=overwrite)
        with ModelStore(tmp_path, "org/name", "v2") as other:  # another revision is another model
            assert other.begin({"options": {}}, overwrite=False).state == "new"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    begun = store.begin({"options": {}}, overwrite=False)
    assert begun.state == "resumed"
    assert [row.longname for row in begun.rows] == ["x"]
    store.finish(str, {})
    assert files(tmp_path) == THE_FILES


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_without_rows(tmp_path: Path, format: str) -> None:
    store = ModelStore(tmp_path, "org/name", None, format)
    store.begin(fingerprint(), overwrite=False)
    store.finish(natural, {})
    assert store.result().layers.height == 0
    assert store.result().summary["model_id"] == "org/name"
    assert dict(store.result().spectra) == {}
    assert ModelStore(tmp_path, "org/name", None, format).begin(fingerprint(), overwrite=False).state == "done"


def test_memory_store_gives_the_same(tmp_path: Path, scan: Callable[..., ModelStore], row: Rows, eigs: Eigs) -> None:
    on_disk = scan().result()
    with MemoryStore("org/name") as store:
        assert store.begin(fingerprint(), overwrite=False).state == "new"
        for name in NAMES:
            store.append(row(name), eigs(name))
        store.append(row("layers.3.q", alpha=None, status="failed", reason="2 elements are NaN"), None)
        for name in ("layers.0.norm", "layers.11.norm"):
            store.append(Row(model_id="org/name", longname=name, status="skipped", reason="norm"), None)
        assert store.result().layers.sort("longname").equals(on_disk.layers.sort("longname"))
        assert store.finish(natural, {}) == ()
    result = store.result()
    assert result.layers.equals(on_disk.layers)
    assert (result.summary, result.skipped, result.files) == (on_disk.summary, on_disk.skipped, ())
    assert list(result.spectra) == list(on_disk.spectra)
    assert all(np.array_equal(result.spectra[name], on_disk.spectra[name]) for name in NAMES)


def test_rows_that_failed_for_a_passing_reason_are_computed_again(tmp_path: Path, row: Rows, eigs: Eigs) -> None:
    def fill(store: ModelStore, rows: list[Row]) -> Begun:
        begun = store.begin(fingerprint(), overwrite=False)
        for one in rows:
            store.append(one, eigs(one.longname) if one.status == "ok" else None)
        return begun

    first = [
        row("a"),
        row("b", status="failed", reason="NaN or Inf among its 3×3 elements"),
        row("c", status="failed", reason="needs 3 GB, and --max-memory is 1 GB"),
        row("d", status="failed", reason="no memory: MemoryError: "),
        row("e", status="failed", reason="no answer in time: TimeoutError: no answer from the CPU after 9 s"),
        row("s", status="skipped", reason="bias"),
    ]
    with ModelStore(tmp_path, "org/name", None, show_skipped=True) as store:
        fill(store, first)
        store.finish(str, {})
    before = store.table_path.read_bytes()
    # Interrupted: the finished table stays, and what was computed is not lost.
    with ModelStore(tmp_path, "org/name", None) as store:
        begun = fill(store, [row("c")])
        assert (begun.state, [one.longname for one in begun.rows]) == ("resumed", ["a", "b"])
    assert store.table_path.read_bytes() == before
    with ModelStore(tmp_path, "org/name", None) as store:
        begun = fill(store, [row("d"), row("e", status="failed", reason="needs 3 GB, and …"), first[-1]])
        assert (begun.state, sorted(one.longname for one in begun.rows)) == ("resumed", ["a", "b", "c"])
        store.finish(str, {})
    result = store.result()
    assert result.layers["status"].to_list() == ["ok", "failed", "ok", "ok", "failed"]
    assert to_rows(result.layers)[0] == row("a")
    assert sorted(result.spectra) == ["a", "c", "d"]
    assert all(np.array_equal(result.spectra[name], eigs(name)) for name in "acd")
    with ModelStore(tmp_path, "org/name", None) as store:
        assert fill(store, [row("e")]).state == "resumed"
        store.finish(str, {})
    with ModelStore(tmp_path, "org/name", None) as store:
        assert store.begin(fingerprint(), overwrite=False).state == "done"


def test_an_unfinished_scan_tries_such_rows_again_too(tmp_path: Path, row: Rows) -> None:
    with ModelStore(tmp_path, "org/name", None) as store:
        store.begin(fingerprint(), overwrite=False)
        store.append(row("a", status="failed", reason="all zeros: every λ is 0"), None)
        store.append(row("b", status="failed", reason="no memory: MemoryError: "), None)
    with ModelStore(tmp_path, "org/name", None) as store:
        assert [one.longname for one in store.begin(fingerprint(), overwrite=False).rows] == ["a"]
