"""The summary rebuilt from the tables of a folder, and what can be said across its models."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from shardesd.errors import ResultsError
from shardesd.results.files import atomic
from shardesd.results.load import stored_models, tables_of
from shardesd.results.stored import read_whole
from shardesd.results.summary import SUMMARY_COLUMNS, Cells, cell, edit_table, read_models, summarise

MEASURES = ("alpha_mean", "alpha_median", "D_mean", "log_alpha_norm_mean", "stable_rank_mean", "entropy_mean")
"""The columns of the summary whose distributions across models are shown."""
OUTLYING = 3.5
"""A value this many robust standard deviations from the median is an outlier (Iglewicz and Hoaglin's rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution: quantiles by linear interpolation."""

    name: str
    count: int
    min: float
    q25: float
    median: float
    q75: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A model whose value lies apart from the others'."""

    model: str
    measure: str
    value: float
    score: float
    """Its distance from the median, in units of 1.4826 · MAD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What a folder of results says across its models."""

    models: int
    matrices: int
    failed_matrices: int
    measures: tuple[Spread, ...]
    """Of the summary's columns `MEASURES`, across models."""
    relations: tuple[Spread, ...]
    """α medians of models, by what the list says of their relation to a base."""
    block_types: tuple[Spread, ...]
    """α of all matrices, by block type."""
    outliers: tuple[Outlier, ...]
    failures: dict[str, int]
    """Reason → models, the most frequent first."""
    files: tuple[str, ...]


def rebuild_summary(out: Path, format: str = "csv") -> Digest:
    """Makes ``out/summary.csv`` anew from ``out/models``, one table at a time, and gives what it says.

    Columns of the old summary that shardesd doesn't make stay with their models. With ``parquet`` or ``jsonl`` the
    summary is written in that format too. Raises `ResultsError` where there are no tables or one can't be read.
    """
    tables = [table for stem in stored_models(out) for table in tables_of(out, stem)[:1]]
    if not tables:
        raise ResultsError(f"{out / 'models'} holds no tables; scan something into {out} first")
    rows: list[dict[str, Any]] = []
    alphas: dict[str, list[float]] = defaultdict(list)
    counts = Counter[str]()
    for table in tables:
        layers = read_whole(table)
        if not layers.height:
            continue
        rows.append(summarise(layers))
        counts.update(layers["status"].to_list())
        for kind, alpha in layers.filter(pl.col("alpha") > 0).select("block_type", "alpha").iter_rows():
            alphas[kind].append(alpha)
    texts = [{name: cell(value) for name, value in row.items()} for row in rows]

    def change(before: list[Cells]) -> list[Cells]:
        extra = {_key(old): {k: v for k, v in old.items() if k not in SUMMARY_COLUMNS} for old in before}
        places = {_key(old): number for number, old in enumerate(before)}
        told = {_key(old): old.get("source_model", "") for old in before}
        joined = [{**new, **extra.get(_key(new), {})} for new in texts]
        for new in joined:
            new["source_model"] = new["source_model"] or told.get(_key(new), "")
        return sorted(joined, key=lambda new: (places.get(_key(new), len(places)), _key(new)))

    files = [edit_table(out / "summary.csv", SUMMARY_COLUMNS, change)]
    cells = read_models(files[0])
    if format != "csv":
        files.append(out / f"summary.{format}")
        _write(files[-1], files[0], format)
    failed = Counter(row.get("reason", "") for row in read_models(out / "failed_models.csv"))
    relations: dict[str, list[float]] = defaultdict(list)
    for row in cells:
        relation = row.get("base_model_relation") or ("adapter" if row["is_adapter"] == "true" else "none given")
        if row["alpha_median"]:
            relations[relation].append(float(row["alpha_median"]))
    return Digest(
        models=len(rows),
        matrices=counts["ok"],
        failed_matrices=counts["failed"],
        measures=_spreads((name, [row[name] for row in rows if row[name] is not None]) for name in MEASURES),
        relations=_spreads(sorted(relations.items())),
        block_types=_spreads(sorted(alphas.items())),
        outliers=_outliers(rows),
        failures=dict(failed.most_common()),
        files=tuple(str(path) for path in files),
    )


def _spreads(groups: Iterable[tuple[str, list[float]]]) -> tuple[Spread, ...]:
    spreads = []
    for name, values in groups:
        if values:
            low, q25, median, q75, high = (float(q) for q in np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
            spreads.append(Spread(name=name, count=len(values), min=low, q25=q25, median=median, q75=q75, max=high))
    return tuple(spreads)


def _outliers(rows: list[dict[str, Any]]) -> tuple[Outlier, ...]:
    found = []
    for name in MEASURES:
        known = [(row, row[name]) for row in rows if row[name] is not None]
        values = np.array([value for _, value in known], dtype=float)
        if len(values) < 5:
            continue  # of so few, none lies apart
        median = float(np.median(values))
        scale = 1.4826 * float(np.median(np.abs(values - median)))
        for row, value in known:
            score = abs(value - median) / scale if scale else 0.0
            if score > OUTLYING:
                model = row["model_id"] + (f"@{row['revision']}" if row["revision"] else "")
                found.append(Outlier(model=model, measure=name, value=float(value), score=score))
    return tuple(sorted(found, key=lambda outlier: -outlier.score))


def _write(path: Path, summary: Path, format: str) -> None:
    frame = pl.read_csv(summary, infer_schema_length=None)
    buffer = io.BytesIO()
    if format == "parquet":
        frame.write_parquet(buffer)
    else:
        frame.write_ndjson(buffer)
    with atomic(path) as file:
        file.write(buffer.getvalue())


def _key(cells: Mapping[str, str]) -> tuple[str, str]:
    return cells.get("model_id", ""), cells.get("revision", "")
