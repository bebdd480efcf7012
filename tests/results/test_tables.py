"""Rows to files and back, in all formats."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardesd.errors import ResultsError
from shardesd.options import FORMATS
from shardesd.records import ROW_COLUMNS, Row
from shardesd.results.tables import SCHEMA, read_table, table_bytes, to_frame, to_rows

DESIGN = """model_id, revision, is_adapter, source_model, longname, layer_index, block_type, dtype, M, N, num_evals,
alpha, D, fit_xmin, fit_xmax, n_tail, sigma, fit_status, alpha_weighted, log_alpha_norm, norm, log_norm, spectral_norm,
log_spectral_norm, stable_rank, matrix_rank, entropy, xmin, xmax, params, solver, precision, device, seconds, status,
reason, quantised""".replace("\n", " ").split(", ")

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8) | st.sampled_from(
    ["null", "NaN", "1", "true", '"', "a,b", "a\nb", "a\r\nb", " x ", "λ"]
)
floats = st.floats(allow_nan=False, allow_infinity=False)
rows = st.builds(
    Row,
    model_id=words,
    revision=st.none() | words,
    is_adapter=st.booleans(),
    longname=words,
    layer_index=st.none() | st.integers(0, 2**62),
    M=st.integers(0, 2**62),
    n_tail=st.none() | st.integers(-1, 9),
    **{name: st.none() | floats for name, kind in SCHEMA.items() if kind == pl.Float64},
    status=st.sampled_from(["ok", "failed", "skipped"]),
    reason=st.just("") | words,
)


def bits(values: list[Row]) -> list[tuple[Any, ...]]:
    """Equality that tells 0.0 from -0.0, and 1 from 1.0 and True."""
    return [
        tuple(
            struct.pack("<d", value) if isinstance(value, float) else (type(value), value)
            for value in (getattr(row, name) for name in ROW_COLUMNS)
        )
        for row in values
    ]


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rows, max_size=4))
def test_round_trip_is_exact(tmp_path: Path, format: str, values: list[Row]) -> None:
    path = tmp_path / f"t.{format}"
    path.write_bytes(table_bytes(to_frame(values), format))
    layers = read_table(path)
    assert dict(layers.schema) == dict(SCHEMA)
    assert bits(to_rows(layers)) == bits(values)


def test_columns_are_the_designs() -> None:
    assert list(to_frame([]).columns) == DESIGN
    assert {str(kind) for kind in SCHEMA.values()} == {"String", "Int64", "Float64", "Boolean"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [0, 1])
def test_empty_columns_keep_their_types(tmp_path: Path, format: str, count: int) -> None:
    path = tmp_path / f"t.{format}"
    path.write_bytes(table_bytes(to_frame([Row(model_id="m", longname="x")] * count), format))
    assert read_table(path).schema == pl.Schema(SCHEMA)
    assert read_table(path).height == count


def test_no_file_says_nan(row: Callable[..., Row]) -> None:
    strange = row("x", alpha=math.nan, D=math.inf, norm=-math.inf, sigma=np.float64("nan"))
    for format in ("csv", "jsonl"):
        text = table_bytes(to_frame([strange]), format).decode().lower()
        assert "nan" not in text
        assert "inf" not in text
    assert to_frame([strange]).select("alpha", "D", "norm", "sigma").row(0) == (None,) * 4


def test_csv_as_others_read_it(row: Callable[..., Row]) -> None:
    """Empty cells, lower-case booleans, floats that Python's own reader takes for the same."""
    one = row("x", alpha=0.1 + 0.2, D=1e-300, revision=None, layer_index=None)
    (cells,) = csv.DictReader(table_bytes(to_frame([one]), "csv").decode().splitlines())
    assert (cells["revision"], cells["layer_index"], cells["reason"], cells["is_adapter"]) == ("", "", "", "false")
    assert (float(cells["alpha"]), float(cells["D"]), cells["M"]) == (0.1 + 0.2, 1e-300, "8")
    assert '""' not in table_bytes(to_frame([one]), "csv").decode()


def test_jsonl_as_others_read_it(row: Callable[..., Row]) -> None:
    one = row("x", alpha=0.1 + 0.2)
    (line,) = table_bytes(to_frame([one]), "jsonl").decode().splitlines()
    assert json.loads(line) == {name: getattr(one, name) for name in ROW_COLUMNS}


def test_numpy_numbers_become_plain(row: Callable[..., Row]) -> None:
    one = row("x", M=np.int64(3), alpha=np.float32(0.5), is_adapter=np.bool_(True))
    assert bits(to_rows(to_frame([one]))) == bits([row("x", M=3, alpha=0.5, is_adapter=True)])


def test_half_a_surrogate_pair_harms_nobody(row: Callable[..., Row]) -> None:
    assert to_frame([replace(row("x"), longname="x\ud800y")])["longname"][0] == "x\\ud800y"


@pytest.mark.parametrize("format", FORMATS)
def test_tables_of_other_hands(tmp_path: Path, format: str, row: Callable[..., Row]) -> None:
    """Columns in another order, one missing, one more: by name, and the stranger comes last."""
    frame = to_frame([row("x"), row("y")]).with_columns(mine=pl.Series(["a", "b"])).drop("sigma", "reason")
    path = tmp_path / f"t.{format}"
    path.write_bytes(table_bytes(frame.select(reversed(frame.columns)), format))
    found = read_table(path)
    assert found.columns == [*ROW_COLUMNS, "mine"]
    assert found["mine"].to_list() == ["a", "b"]
    assert bits(to_rows(found)) == bits([replace(row(name), sigma=None) for name in "xy"])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.csv", b"model_id,M\nx,notanumber\n"),
        ("t.csv", b"\xff\xfe\x00"),
        ("t.parquet", b"PAR1 is not all"),
        ("t.jsonl", b'{"model_id": '),
        ("t.jsonl", b"[1]\n"),
        ("t.csv", b"some,other\n1,2\n"),
        ("gone.csv", None),
    ],
)
def test_what_is_no_table(tmp_path: Path, name: str, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ResultsError, match=rf"can't read the table .*{name}") as raised:
        read_table(tmp_path / name)
    assert "\n" not in str(raised.value)
