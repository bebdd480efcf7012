"""One row per model: statistics of its layers, and the summary.csv that is kept current with them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from shardesd.errors import ResultsError
from shardesd.results.files import Lock, atomic, named_errors, remove_leftovers

SUMMARY_COLUMNS: tuple[str, ...] = (
    "model_id",
    "revision",
    "is_adapter",
    "source_model",
    "num_layers",
    "num_failed",
    "alpha_mean",
    "alpha_median",
    "alpha_std",
    "alpha_min",
    "alpha_max",
    "alpha_q25",
    "alpha_q75",
    "alpha_weighted_mean",
    "D_mean",
    "log_alpha_norm_mean",
    "spectral_norm_mean",
    "spectral_norm_max",
    "stable_rank_mean",
    "stable_rank_median",
    "entropy_mean",
    "entropy_median",
    "total_params",
    "seconds",
)
Cells = dict[str, str]
LOCK_TIMEOUT = 60.0
"""Seconds to wait for others that write the same summary."""


def summarise(layers: pl.DataFrame, model_id: str = "", revision: str | None = None) -> dict[str, Any]:
    """A model's row of the summary, from its table. `model_id` and `revision` are for a table without rows.

    `num_layers` counts the rows with status ``ok``. The statistics of alpha, alpha_weighted, D and log_alpha_norm are
    over those of them whose fit succeeded (alpha > 0), those of entropy over those whose matrix_rank exceeds 1 (at 1
    its denominator is next to nothing); all others over all of them. `num_failed` counts the rows with
    status ``failed`` and the ok ones whose fit failed. Quantiles are linear interpolations, `alpha_std` is the
    sample's (ddof = 1) and None for one row, as is every statistic of none. `seconds` is the sum over all rows.
    """
    # Column by column: polars wakes all its threads for each table that it filters.
    status = layers["status"].to_numpy()
    ok, failed = (np.array(status == word, np.bool_) for word in ("ok", "failed"))
    fitted = ok & (layers["alpha"].to_numpy() > 0)
    ranked = ok & ~(layers["matrix_rank"].to_numpy() <= 1)  # also where it is unknown
    first = layers.row(0, named=True) if layers.height else {"model_id": model_id, "revision": revision}
    params = layers["params"].fill_null(0) if layers["params"].null_count() else layers["params"]
    alpha = _numbers(layers, "alpha", fitted)
    spectral_norm, stable_rank = (_numbers(layers, name, ok) for name in ("spectral_norm", "stable_rank"))
    entropy = _numbers(layers, "entropy", ranked)
    values = {
        "model_id": first["model_id"],
        "revision": first["revision"],
        "is_adapter": first.get("is_adapter") or False,
        "source_model": first.get("source_model"),
        "num_layers": int(ok.sum()),
        "num_failed": int(failed.sum() + ok.sum() - fitted.sum()),
        "alpha_mean": _mean(alpha),
        "alpha_median": _quantile(alpha, 0.5),
        "alpha_std": float(alpha.std(ddof=1)) if alpha.size > 1 else None,
        "alpha_min": _quantile(alpha, 0.0),
        "alpha_max": _quantile(alpha, 1.0),
        "alpha_q25": _quantile(alpha, 0.25),
        "alpha_q75": _quantile(alpha, 0.75),
        "alpha_weighted_mean": _mean(_numbers(layers, "alpha_weighted", fitted)),
        "D_mean": _mean(_numbers(layers, "D", fitted)),
        "log_alpha_norm_mean": _mean(_numbers(layers, "log_alpha_norm", fitted)),
        "spectral_norm_mean": _mean(spectral_norm),
        "spectral_norm_max": _quantile(spectral_norm, 1.0),
        "stable_rank_mean": _mean(stable_rank),
        "stable_rank_median": _quantile(stable_rank, 0.5),
        "entropy_mean": _mean(entropy),
        "entropy_median": _quantile(entropy, 0.5),
        "total_params": int(params.to_numpy()[ok].sum()),
        "seconds": float(layers["seconds"].sum()),
    }
    return {name: values[name] for name in SUMMARY_COLUMNS}


def _numbers(layers: pl.DataFrame, column: str, rows: np.ndarray) -> np.ndarray:
    values: np.ndarray = layers[column].to_numpy()[rows]
    known: np.ndarray = values[~np.isnan(values)]  # a null is NaN to numpy
    return known


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


def _quantile(values: np.ndarray, q: float) -> float | None:
    """As `numpy.quantile`, to the last bit, whose first call takes long: it imports numpy's masked arrays."""
    if not values.size:
        return None
    ordered, position = np.sort(values), q * (values.size - 1)
    at = int(position)
    low, high, share = float(ordered[at]), float(ordered[min(at + 1, values.size - 1)]), position - at
    return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share


def update_summary(out: Path, row: Mapping[str, Any]) -> Path:
    """Puts a model's row into ``out/summary.csv``, in place of the one with its model_id and revision; gives the path.

    Other models' rows, and columns that aren't in `SUMMARY_COLUMNS` or not in `row`, stay as they are, text for text.
    Processes that
    do this at once wait for each other. Raises `NoSpace` or `ResultsError`.
    """
    new = {name: cell(row[name]) for name in SUMMARY_COLUMNS if name in row}

    def put(rows: list[Cells]) -> list[Cells]:
        same = [i for i, old in enumerate(rows) if all(old.get(k, "") == new[k] for k in ("model_id", "revision"))]
        if not same:
            return [*rows, new]
        rows[same[0]] = {**rows[same[0]], **new}
        return [old for i, old in enumerate(rows) if i not in same[1:]]

    return edit_table(out / "summary.csv", SUMMARY_COLUMNS, put)


def edit_table(
    path: Path, columns: Sequence[str], change: Callable[[list[Cells]], list[Cells]], extra: Sequence[str] = ()
) -> Path:
    """Replaces the rows of a CSV file whose rows are models by what `change` makes of them; gives the path.

    Columns beyond `columns` stay, those named in `extra` first and in that order. Processes that do this at once wait
    for each other; a file that would stay as it is isn't touched, nor is one made for no rows. Raises `NoSpace` or
    `ResultsError`.
    """
    lock = Lock(path.parent / f".{path.stem}.lock")
    try:
        lock.acquire(LOCK_TIMEOUT, lambda holder: f"{holder} has held {path} for {LOCK_TIMEOUT:.0f} s; try again later")
        remove_leftovers([path])
        rows = change(read_models(path))
        with named_errors(path):
            current = path.read_bytes() if path.exists() else None
        if current is None and not rows:
            return path
        found = {name: None for row in rows for name in row if name not in columns}
        names = [*columns, *(name for name in extra if name in found), *(name for name in found if name not in extra)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
        if data != current:
            with atomic(path) as file:
                file.write(data)
    finally:
        lock.release()
    return path


def read_summary(out: Path) -> list[Cells]:
    """The rows of ``out/summary.csv`` as text; none where there is no such file.

    Raises `ResultsError` where the file is something else than a summary.
    """
    return read_models(out / "summary.csv")


def read_models(path: Path) -> list[Cells]:
    """The rows of a CSV file with a column ``model_id``, as text; none where there is no such file.

    Raises `ResultsError` where the file is something else.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
            columns = reader.fieldnames or ()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ResultsError(f"can't read {path}: {error}; move it away, or choose another --out") from error
    if columns and ("model_id" not in columns or any(None in row for row in rows)):
        raise ResultsError(f"{path} is not a table of models; move it away, or choose another --out")
    return rows


def cell(value: Any) -> str:
    """A value as the summary's CSV writes it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
