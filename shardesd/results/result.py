"""What a scan gives to Python: `Result`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from shardesd.records import Row
from shardesd.results.summary import summarise
from shardesd.results.tables import to_frame


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """One model's tables and spectra."""

    model_id: str
    revision: str | None
    """As it was asked for; None for the default branch."""
    layers: pl.DataFrame
    """A row per matrix, with the columns of the model's table; skipped tensors only where they were asked for."""
    spectra: Mapping[str, np.ndarray]
    """Longname → λ, ascending, float64, no 1/N; read from the spectra file where there is one."""
    summary: dict[str, Any]
    """The model's row of summary.csv."""
    stats: pl.DataFrame | None = None
    """A row per tensor, with the columns of `records.StatsRow`; None where no statistics were asked for."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → how many tensors, or parts of one, were left out for it."""
    files: tuple[Path, ...] = ()
    """What was written; none for a result that lives in memory."""

    @property
    def failed(self) -> pl.DataFrame:
        """The rows of `layers` that could not be analysed; the column ``reason`` says why."""
        return self.layers.filter(pl.col("status") == "failed")


def shown(rows: Iterable[Row], show_skipped: bool) -> pl.DataFrame:
    """The table of rows in their final order; of skipped ones only where they were asked for."""
    return to_frame(row for row in rows if show_skipped or row.status != "skipped")


def make_result(
    model_id: str,
    revision: str | None,
    rows: Iterable[Row],
    *,
    show_skipped: bool,
    spectra: Mapping[str, np.ndarray],
    stats: pl.DataFrame | None = None,
    files: tuple[Path, ...] = (),
    layers: pl.DataFrame | None = None,
) -> Result:
    """The result that rows in their final order make. `layers` is their table where it has been made before."""
    rows = list(rows)
    if layers is None:
        layers = shown(rows, show_skipped)
    return Result(
        model_id=model_id,
        revision=revision,
        layers=layers,
        spectra=spectra,
        stats=stats,
        summary=summarise(layers, model_id, revision),
        skipped=dict(Counter(row.reason for row in rows if row.status == "skipped").most_common()),
        files=files,
    )
