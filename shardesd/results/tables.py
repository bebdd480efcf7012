"""A model's rows as a polars table, and as CSV, Parquet or JSON lines and back.

The schema comes from `Row`, so a column without a value keeps its type. Floats are written with as many digits as it
takes to read the same float back. A number that is not finite is a null: tables hold numbers or nothing.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

import polars as pl

from shardesd.errors import ResultsError
from shardesd.records import ROW_COLUMNS, Row

_POLARS: dict[type, pl.DataType] = {bool: pl.Boolean(), int: pl.Int64(), float: pl.Float64(), str: pl.String()}


def _column_types() -> dict[str, type]:
    hints = get_type_hints(Row)
    types: dict[str, type] = {}
    for name in ROW_COLUMNS:
        kinds = [kind for kind in get_args(hints[name]) or (hints[name],) if kind is not type(None)]
        types[name] = kinds[0] if isinstance(kinds[0], type) else str  # the others are the words of a Literal
    return types


COLUMN_TYPES: Mapping[str, type] = MappingProxyType(_column_types())
SCHEMA: Mapping[str, pl.DataType] = MappingProxyType({name: _POLARS[kind] for name, kind in COLUMN_TYPES.items()})
_TEXT_DEFAULTS = {f.name: f.default for f in fields(Row) if isinstance(f.default, str)} | {"longname": ""}


_KINDS = tuple(COLUMN_TYPES[name] for name in ROW_COLUMNS)
_values = attrgetter(*ROW_COLUMNS)


def row_values(row: Row) -> dict[str, Any]:
    """A row's values by column, as plain Python: numpy's numbers too, a number that isn't finite as None."""
    return dict(zip(ROW_COLUMNS, map(plain_value, _values(row), _KINDS), strict=True))


def plain_value(value: Any, kind: type) -> Any:
    """A value as plain Python of this type; a number that isn't finite as None."""
    if value is None:
        return None
    if type(value) is not kind:
        value = kind(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is str and not value.isascii():
        # A name in a hostile header may hold half a surrogate pair, which no file can.
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def plain_values(values: Sequence[Any], kind: type) -> Sequence[Any]:
    """`plain_value` of each."""
    kinds = set(map(type, values))
    if kinds <= {kind, NoneType}:
        is_plain = _IS_PLAIN.get(kind)
        known = values if NoneType not in kinds else [value for value in values if value is not None]
        if is_plain is None or all(map(is_plain, known)):
            return values
    return [plain_value(value, kind) for value in values]


_IS_PLAIN: dict[type, Callable[[Any], bool]] = {float: math.isfinite, str: str.isascii}


def to_frame(rows: Iterable[Row]) -> pl.DataFrame:
    """A table with the columns and types of `SCHEMA`, in the order of `rows`."""
    columns = list(zip(*map(_values, rows), strict=True)) or [()] * len(ROW_COLUMNS)
    # Each with its type: to make a table of values and a schema takes polars twice as long.
    series = (
        pl.Series(name, plain_values(values, COLUMN_TYPES[name]), dtype=SCHEMA[name])
        for name, values in zip(ROW_COLUMNS, columns, strict=True)
    )
    return pl.DataFrame(series)


def to_rows(layers: pl.DataFrame) -> list[Row]:
    """The rows of a table; columns that `Row` doesn't have are left out."""
    rows = []
    for found in layers.select(name for name in ROW_COLUMNS if name in layers.columns).iter_rows(named=True):
        values: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
        rows.append(Row(**values))
    return rows


def table_bytes(layers: pl.DataFrame, format: str) -> bytes:
    """The content of a table's file; `format` is ``csv``, ``parquet`` or ``jsonl``."""
    buffer = io.BytesIO()
    if format == "parquet":
        layers.write_parquet(buffer)
    elif format == "jsonl":
        layers.write_ndjson(buffer)
    else:
        empty_as_null = pl.when(pl.col(pl.String) != "").then(pl.col(pl.String)).name.keep()
        layers.with_columns(empty_as_null).write_csv(buffer)
    return buffer.getvalue()


def read_table(path: str | Path) -> pl.DataFrame:
    """A model's table from a ``.csv``, ``.parquet`` or ``.jsonl`` file, with the columns and types of `SCHEMA`.

    A column that the file lacks is null; columns that `Row` doesn't have come last. Raises `ResultsError`.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if path.suffix == ".parquet":
            found = pl.read_parquet(io.BytesIO(data))
        elif path.suffix == ".jsonl":
            records = [json.loads(line) for line in data.splitlines() if line.strip()]
            columns = {name: None for record in records for name in dict(record)}
            known = {name: SCHEMA[name] for name in columns if name in SCHEMA}
            found = pl.DataFrame(records, schema_overrides=known, infer_schema_length=None)
        else:
            header = next(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")), [])
            known = {name: SCHEMA[name] for name in header if name in SCHEMA}
            found = pl.read_csv(io.BytesIO(data), schema_overrides=known, infer_schema_length=None)
        if not found.columns:  # JSON lines of no rows name no columns
            return to_frame([])
        if "longname" not in found.columns:
            raise ValueError("it has no column longname")
        missing = [pl.lit(None).alias(name) for name in ROW_COLUMNS if name not in found.columns]
        extra = [name for name in found.columns if name not in SCHEMA]
        found = (
            found.with_columns(missing)
            .select(*ROW_COLUMNS, *extra)
            .with_columns(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
        )
    except (OSError, ValueError, AttributeError, TypeError, pl.exceptions.PolarsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ResultsError(
            f"can't read the table {path}: {reason}; move it away, or scan again with --overwrite"
        ) from error
    return found.with_columns(pl.col(name).fill_null(text) for name, text in _TEXT_DEFAULTS.items())


def text_table(rows: Iterable[Sequence[str | None]], columns: Sequence[str]) -> bytes:
    """A Parquet file of texts."""
    buffer = io.BytesIO()
    schema = {name: pl.String() for name in columns}
    pl.DataFrame([list(row) for row in rows], schema=schema, orient="row").write_parquet(buffer)
    return buffer.getvalue()
