"""Real trained weights, against the tables that other tools made of them (tests/golden)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import cli, minilm_weights, one_file, sharded

import shardesd
from shardesd.demo import minilm

GOLDEN = Path(__file__).parent.parent / "golden"
METHODS = ("xmin_mid", "xmin_peak", "DKS")


@pytest.fixture(scope="module")
def tables() -> dict[str, pl.DataFrame]:
    return {method: shardesd.scan(minilm(), fix_fingers=method).layers for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_the_model_zoo_pipelines_numbers(tables: dict[str, pl.DataFrame], method: str) -> None:
    golden = pl.read_csv(GOLDEN / f"modelzoo_minilm_{method}.csv")
    both = golden.join(tables[method], on="longname", how="left", suffix="_ours", coalesce=True)
    assert tables[method].height == golden.height == both.drop_nulls("alpha_ours").height == 37
    for column in ("M", "N", "num_evals", "params"):
        assert both[column].cast(int).to_list() == both[f"{column}_ours"].to_list()
    assert (both["matrix_rank"] - both["matrix_rank_ours"]).abs().max() <= 1
    np.testing.assert_allclose(both["D_ours"], both["D"], atol=6e-6)
    for column in (
        *("alpha", "norm", "log_norm", "spectral_norm", "log_spectral_norm", "stable_rank", "entropy", "xmax"),
        *("alpha_weighted", "log_alpha_norm"),
    ):
        np.testing.assert_allclose(both[f"{column}_ours"], both[column], rtol=1e-4, atol=1e-4, err_msg=column)
    np.testing.assert_allclose(both["alpha_ours"], both["alpha"], rtol=2e-5)


def test_weightwatchers_fit(tables: dict[str, pl.DataFrame]) -> None:
    golden = pl.read_csv(GOLDEN / "weightwatcher_minilm.csv")
    both = golden.join(tables["DKS"], on="longname", suffix="_ours")
    assert both.height == 37
    np.testing.assert_allclose(both["alpha_ours"], both["alpha"], rtol=1e-9)
    np.testing.assert_allclose(both["D_ours"], both["D"], rtol=1e-9)
    np.testing.assert_allclose(both["fit_xmin"], both["xmin"], rtol=1e-9)
    np.testing.assert_allclose(both["fit_xmax"], both["xmax"], rtol=1e-9)
    np.testing.assert_allclose(both["sigma_ours"], both["sigma"], rtol=1e-9)
    assert both["n_tail"].to_list() == both["num_pl_spikes"].to_list()


def test_embeddings_are_weightwatchers_too() -> None:
    ours = shardesd.scan(minilm(), fix_fingers="DKS", embeddings=True, max_aspect=0, include="*embeddings*").layers
    golden = pl.read_csv(GOLDEN / "weightwatcher_minilm.csv")
    both = golden.join(ours, on="longname", suffix="_ours")
    assert both["longname"].to_list() == ["embeddings.word_embeddings", "embeddings.position_embeddings"]
    np.testing.assert_allclose(both["alpha_ours"], both["alpha"], rtol=1e-9)
    assert set(ours["block_type"]) <= {"embedding", "position"}


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_the_layout_of_shards_changes_no_number(tmp_path: Path, io: str, tables: dict[str, pl.DataFrame]) -> None:
    tensors = minilm_weights()
    whole = tables["xmin_mid"].drop("model_id", "seconds")
    for folder in (
        one_file(tmp_path / "one", tensors),
        sharded(tmp_path / "indexed", tensors),
        sharded(tmp_path / "unindexed", tensors, index=False),
    ):
        layers = shardesd.scan(folder, io=io).layers
        assert layers["model_id"].unique().to_list() == [folder.name]
        for column in whole.columns:
            ours, theirs = layers[column].to_list(), whole[column].to_list()
            if whole.schema[column] == pl.Float64:
                np.testing.assert_allclose(ours, theirs, rtol=1e-9, err_msg=column)
            else:
                assert ours == theirs, column


def test_the_demo(tmp_path: Path) -> None:
    result = cli("demo", "--out", tmp_path / "results")
    assert result.exit_code == 0, result.output
    assert "37 matrices" in result.stdout
    layers = pl.read_csv(next((tmp_path / "results" / "models").glob("*.csv")))
    assert layers.height == 37
    assert set(layers["status"]) == {"ok"}
