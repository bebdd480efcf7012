"""The summary rebuilt from tables, and what is said across models, against numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import cli, one_file, random_weights

import shardesd
from shardesd.errors import ResultsError
from shardesd.results import rebuild_summary


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digest")
    rows = []
    for i in range(8):
        tensors = random_weights(size=16, seed=i)
        if i == 7:
            tensors = {name: np.sign(W) * np.abs(W) ** 9 for name, W in tensors.items()}
        folder = one_file(place / f"m{i}", tensors)
        rows.append({"model_id": str(folder), "base_model_relation": "base" if i < 3 else "finetune", "likes": i})
    rows.append({"model_id": str(place / "missing"), "base_model_relation": "", "likes": 99})
    list(shardesd.scan_many(rows, out=place / "out"))
    return place / "out"


def test_it_is_the_summary_that_the_batch_kept(results: Path) -> None:
    before = (results / "summary.csv").read_bytes()
    (results / "summary.csv").unlink()
    bare = pl.read_csv(rebuild_summary(results).files[0])
    assert bare.columns[-1] == "seconds"
    (results / "summary.csv").write_bytes(before)
    digest = rebuild_summary(results)
    assert (results / "summary.csv").read_bytes() == before
    kept = pl.read_csv(results / "summary.csv")
    assert kept.select(bare.columns).equals(bare)
    assert (digest.models, digest.matrices, digest.failures) == (8, 48, {"not_found": 1})


def test_quantiles_and_outliers_are_numpys(results: Path) -> None:
    digest = rebuild_summary(results)
    kept = pl.read_csv(results / "summary.csv")
    for spread in digest.measures:
        values = kept[spread.name].to_numpy()
        expected = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
        assert np.allclose([spread.min, spread.q25, spread.median, spread.q75, spread.max], expected)
        assert spread.count == 8
    assert [(s.name, s.count) for s in digest.relations] == [("base", 3), ("finetune", 5)]
    tables = pl.concat([pl.read_csv(path, infer_schema_length=None) for path in sorted((results / "models").glob("*"))])
    for spread in digest.block_types:
        alphas = tables.filter(pl.col("block_type") == spread.name)["alpha"].to_numpy()
        assert spread.median == pytest.approx(np.median(alphas))
    for outlier in digest.outliers:
        values = kept[outlier.measure].to_numpy()
        mad = np.median(np.abs(values - np.median(values)))
        assert outlier.score == pytest.approx(abs(outlier.value - np.median(values)) / (1.4826 * mad))
        assert outlier.score > 3.5
    assert "m7" in {outlier.model for outlier in digest.outliers}


def test_formats_and_the_command(results: Path) -> None:
    assert cli("summarize", results, "--format", "parquet", "--quiet").exit_code == 0
    assert cli("summarize", results, "--format", "jsonl", "--quiet").exit_code == 0
    expected = pl.read_csv(results / "summary.csv")
    assert pl.read_parquet(results / "summary.parquet").equals(expected)
    assert len((results / "summary.jsonl").read_text().splitlines()) == 8
    said = cli("summarize", results)
    lines = said.stdout.splitlines()
    assert lines[0] == "8 models, 48 matrices"
    for words in ("across models", "α median of models by relation", "α of matrices by block type", "outliers"):
        assert any(line.startswith(words) for line in lines)
    assert "      1  not_found: no such folder, repo, revision or file" in lines
    assert json.loads(cli("summarize", results, "--json").stdout)["models"] == 8
    wrong = cli("summarize", results, "--format", "xml")
    assert wrong.exit_code == 1
    assert "expected one of: csv, parquet, jsonl" in wrong.stderr


def test_a_folder_without_tables(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="holds no tables"):
        rebuild_summary(tmp_path)


def test_a_model_that_has_gone_is_no_longer_summed_up(tmp_path: Path) -> None:
    for i in range(2):
        shardesd.scan(one_file(tmp_path / f"m{i}", random_weights(size=16, seed=i)), out=tmp_path / "out")
    (tmp_path / "out" / "models" / "m0.csv").unlink()
    assert rebuild_summary(tmp_path / "out").models == 1
    assert pl.read_csv(tmp_path / "out" / "summary.csv")["model_id"].to_list() == ["m1"]
