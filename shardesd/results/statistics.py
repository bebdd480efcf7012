"""The table of ``--stats``: a row per tensor, in ``stats/`` beside the models' tables."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import polars as pl

from shardesd.errors import ResultsError
from shardesd.options import FORMATS
from shardesd.records import StatsRow
from shardesd.results.files import atomic, make_folders, named_errors
from shardesd.results.tables import plain_values, table_bytes

_POLARS: dict[type, pl.DataType] = {int: pl.Int64(), float: pl.Float64(), str: pl.String()}


def _types() -> dict[str, type]:
    hints = get_type_hints(StatsRow)
    return {f.name: next(iter(get_args(hints[f.name])), hints[f.name]) for f in fields(StatsRow)}


_TYPES = _types()
STATS_SCHEMA: dict[str, pl.DataType] = {name: _POLARS[kind] for name, kind in _TYPES.items()}


def stats_frame(rows: Iterable[StatsRow]) -> pl.DataFrame:
    """A table with the columns and types of `STATS_SCHEMA`; a number that isn't finite is a null."""
    each = list(rows)
    return pl.DataFrame(
        {name: plain_values([getattr(row, name) for row in each], kind) for name, kind in _TYPES.items()},
        schema=STATS_SCHEMA,
    )


def stats_path(out: Path, stem: str, format: str) -> Path:
    """Where a model's statistics lie."""
    return out / "stats" / f"{stem}.{format}"


def write_stats(out: Path, stem: str, format: str, stats: pl.DataFrame | None) -> None:
    """Writes a model's statistics, and removes earlier ones in other formats; None: removes all there are."""
    path = stats_path(out, stem, format)
    if stats is not None:
        make_folders([path.parent])
        with atomic(path) as file:
            file.write(table_bytes(stats, format))
    for other in FORMATS:
        if other != format or stats is None:
            with named_errors(path):
                stats_path(out, stem, other).unlink(missing_ok=True)


def read_stats(out: Path, stem: str) -> pl.DataFrame | None:
    """A model's statistics, from whichever format they are in; None where there are none. Raises `ResultsError`."""
    path = next((path for format in FORMATS if (path := stats_path(out, stem, format)).exists()), None)
    if path is None:
        return None
    try:
        data = io.BytesIO(path.read_bytes())
        if path.suffix == ".parquet":
            found = pl.read_parquet(data)
        elif path.suffix == ".jsonl":
            found = pl.read_ndjson(data, schema=STATS_SCHEMA)
        else:
            found = pl.read_csv(data, schema_overrides=STATS_SCHEMA)
        return found.select(pl.col(name).cast(kind) for name, kind in STATS_SCHEMA.items())
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ResultsError(f"can't read the statistics {path}: {reason}; move it away, or scan again") from error
