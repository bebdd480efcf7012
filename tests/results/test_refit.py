"""`refit`: what a scan with other fit options would have written, without weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import cli, one_file, random_weights

import shardesd
from shardesd.errors import ResultsError
from shardesd.options import ScanOptions
from shardesd.refitter import refit


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for k, format in enumerate(("csv", "parquet", "jsonl")):
        folder = one_file(tmp_path / f"m{k}", random_weights(seed=k), name=f"m{k}.safetensors")
        shardesd.scan(folder, out=tmp_path / "results", format=format, show_skipped=k == 1)
    return tmp_path / "results"


def without_seconds(layers: pl.DataFrame) -> pl.DataFrame:
    return layers.drop("seconds")


@pytest.mark.parametrize(
    "options", [{"fix_fingers": "DKS"}, {"evals_thresh": 0.5, "fix_fingers": "xmin_peak", "bins": 20}]
)
def test_tables_are_those_of_a_scan_with_these_options(
    results: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    assert not (results / "partial").exists()
    done = list(refit(results, ScanOptions(**options), processes=1))  # type: ignore[arg-type]
    assert [(model.name, model.problem) for model in done] == [("m0", ""), ("m1", ""), ("m2", "")]
    assert not (results / "partial").exists()
    for k, format in enumerate(("csv", "parquet", "jsonl")):
        events: list[object] = []
        found = shardesd.scan(
            tmp_path / f"m{k}", out=results, format=format, show_skipped=k == 1, on_event=events.append, **options
        )
        assert not [event for event in events if type(event).__name__ == "RowDone"], "it was not taken as done"
        expected = shardesd.scan(
            tmp_path / f"m{k}", out=tmp_path / "anew", format=format, show_skipped=k == 1, cache=False, **options
        )
        assert without_seconds(found.layers).equals(without_seconds(expected.layers))
    drop = ["seconds"]
    summary, anew = (
        pl.read_csv(out / "summary.csv").drop(drop).sort("model_id") for out in (results, tmp_path / "anew")
    )
    assert summary.equals(anew)
    assert not (results / "partial").exists()


def test_failed_rows_stay_and_a_broken_model_is_told(results: Path, tmp_path: Path) -> None:
    tensors = random_weights(seed=9)
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = 0
    shardesd.scan(one_file(tmp_path / "m9", tensors, name="m9.safetensors"), out=results)
    (results / "spectra" / "m0.safetensors").write_bytes(b"torn")
    run = results / "runs" / "m1.json"
    run.write_text("{}")
    before = (results / "models" / "m1.parquet").read_bytes()
    found = cli("refit", results, "--fix-fingers", "DKS")
    assert found.exit_code == 3
    lines = dict(line.split(": ", 1) for line in found.stderr.strip().splitlines())
    assert "m0.safetensors" in lines["m0"]
    assert "m1.json" in lines["m1"]
    assert lines["m2"] == lines["m9"] == "6 rows"
    assert (results / "models" / "m1.parquet").read_bytes() == before
    assert run.read_text() == "{}"
    layers = pl.read_csv(results / "models" / "m9.csv")
    assert layers["status"].to_list().count("failed") == 1
    assert json.loads((results / "runs" / "m9.json").read_text())["options"]["fix_fingers"] == "DKS"


@pytest.mark.parametrize("solver", ["auto", "gram", "svd"])
@pytest.mark.parametrize("thresh", [1e-9, 1e-13, 0.0])
def test_rounding_never_becomes_eigenvalues(tmp_path: Path, solver: str, thresh: float) -> None:
    """A Gram's small λ are rounding: a scan takes an SVD where they would count, and `refit` has no weights for one."""
    W = np.random.default_rng(0).standard_normal((60, 80), dtype=np.float32)
    W[30:] = W[:30]
    folder = one_file(tmp_path / "twice", {"twice.weight": W})
    before = shardesd.scan(folder, out=tmp_path / "results", solver=solver)
    (done,) = refit(tmp_path / "results", ScanOptions(evals_thresh=thresh), processes=1)
    expected = shardesd.scan(folder, evals_thresh=thresh, solver=solver, cache=False).layers
    table = pl.read_csv(tmp_path / "results" / "models" / "twice.csv", schema_overrides=expected.schema)
    if solver == "auto" and thresh < 1e-9:
        assert "twice: --evals-thresh" in done.problem
        assert "scan the model again" in done.problem
        assert before.layers["num_evals"].to_list() == [30]
        assert table.select("num_evals", "alpha").equals(before.layers.select("num_evals", "alpha"))
    else:
        assert not done.problem
        assert table.select("num_evals", "alpha").equals(expected.select("num_evals", "alpha"))


def test_kernel_positions_of_different_scale(tmp_path: Path) -> None:
    """Each was large beside its own rounding: what a scan took from Grams, `refit` takes with the same options."""
    W = 100 * np.random.default_rng(0).standard_normal((16, 16, 3), dtype=np.float32)
    W[..., 1] *= 1e-7
    out = tmp_path / "results"
    before = shardesd.scan(one_file(tmp_path / "conv", {"a.conv.weight": W}), out=out, evals_thresh=1e-11, cache=False)
    assert before.layers["solver"].to_list() == ["gram"]
    for options in ({"evals_thresh": 1e-11}, {"evals_thresh": 1e-11, "bins": 50}, {"evals_thresh": 1e-6}):
        (done,) = refit(out, ScanOptions(**options), processes=1)  # type: ignore[arg-type]
        assert not done.problem


def test_a_folder_without_models(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="holds no models"):
        list(refit(tmp_path, ScanOptions()))
    assert cli("refit", tmp_path / "nowhere").exit_code == 1
