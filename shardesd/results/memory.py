"""One model's results in memory: the surface of `store.ModelStore`, without files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from shardesd.records import Row, StatsRow
from shardesd.results.result import Result, make_result
from shardesd.results.statistics import stats_frame
from shardesd.results.store import Amend, Begun, Order, arranged
from shardesd.results.tables import row_values


class MemoryStore:
    """The same surface without files: rows and λ are held in memory."""

    def __init__(self, model_id: str, revision: str | None = None, *, show_skipped: bool = False) -> None:
        self.model_id, self.revision, self.show_skipped = model_id, revision, show_skipped
        self._appended: dict[str, Row] = {}
        self._eigs: dict[str, np.ndarray] = {}
        self._rows: list[Row] | None = None
        self._stats: pl.DataFrame | None = None

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, fingerprint: Mapping[str, Any], *, overwrite: bool) -> Begun:
        """Always new: memory holds no earlier run."""
        return Begun("new")

    def append(self, row: Row, eigs: np.ndarray | None, tensor: str | None = None) -> None:
        """Keeps a finished row and its λ."""
        if not row.longname.isascii():  # it may be one that no file can hold, and is named and sorted as on disk
            row = Row(**row_values(row))
        self._appended[row.longname] = row
        if eigs is not None:
            self._eigs[row.longname] = eigs

    def eigs(self, longname: str) -> np.ndarray | None:
        """The λ of a row that has been appended; None for one that has none."""
        return self._eigs.get(longname)

    def finish(
        self,
        order: Order,
        provenance: Mapping[str, Any],
        amend: Amend = lambda row: row,
        *,
        stats: Iterable[StatsRow] | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> tuple[Path, ...]:
        """Sorts rows by ``order(longname)`` and passes them through `amend`; there are no files to name."""
        self._stats = None if stats is None else stats_frame(stats)
        self._rows = arranged(self._appended.values(), order, amend)
        return ()

    def result(self) -> Result:
        """The model, or as much of it as there is so far."""
        rows = list(self._appended.values()) if self._rows is None else self._rows
        spectra = {
            row.longname: self._eigs[row.longname]
            for row in rows
            if row.longname in self._eigs and row.status != "skipped"
        }
        return make_result(
            self.model_id, self.revision, rows, show_skipped=self.show_skipped, spectra=spectra, stats=self._stats
        )

    def close(self) -> None:
        """Nothing to let go of."""
