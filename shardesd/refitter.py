"""All tables of a results folder anew, from the λ that lie beside them: no weights, no eigensolves."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardesd import metrics, spectra
from shardesd.errors import MatrixError, OptionError, ResultsError, ShardesdError
from shardesd.options import OutputOptions, ScanOptions
from shardesd.records import Row
from shardesd.results import StoredModel, stored_models, update_summary

_AT_ONCE = 1 << 16  # λ

FIT_OPTIONS = ("fix_fingers", "evals_thresh", "filter_zeros", "bins")
"""The options that `refit` takes; all others stay as the scan had them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refitted:
    """What became of one model."""

    name: str
    """The stem of its files."""
    rows: int = 0
    problem: str = ""
    """Why its files are as they were; empty where all went well."""


def refit(out: str | os.PathLike[str], options: ScanOptions, *, processes: int | None = None) -> Iterator[Refitted]:
    """Every model under `out`, its table, provenance and summary row made anew with the fit options of `options`.

    Models are shared out to `processes` (None: one a core), since fits are too small to profit from threads. Tables are
    what a scan with these options would have written, to the last digit. Raises `ResultsError` where `out` holds no
    results; one model's trouble is told in its `Refitted`.
    """
    folder = OutputOptions(out=os.fspath(out)).folder
    names = stored_models(folder)
    if not names:
        raise ResultsError(f"{folder} holds no models (expected a folder that `shardesd scan --out` wrote)")
    changes = {name: getattr(options, name) for name in FIT_OPTIONS}
    count = min(len(names), processes or os.cpu_count() or 1)
    if count == 1:
        for name in names:
            yield _kept(folder, _refit_one(folder, name, changes))
        return
    # A fresh interpreter each: a fork of a process with threads (the caller's own, or BLAS's) may hang.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        done = pool.map(_refit_one, *zip(*[(folder, name, changes) for name in names], strict=True))
        for found in done:
            yield _kept(folder, found)


def _refit_one(folder: Path, name: str, changes: dict[str, Any]) -> tuple[Refitted, dict[str, Any] | None]:
    try:
        with StoredModel(folder, name) as model:
            before = _options(model)
            options = replace(before, **changes)
            anew = _measured(model, options, finer=0 < options.resolve < (before.resolve or math.inf))
            rows = [anew.get(row.longname, row) for row in model.rows]  # failed and skipped ones have no λ
            return Refitted(name=name, rows=len(rows)), model.replace(rows, changes)
    except ShardesdError as error:
        return Refitted(name=name, problem=str(error)), None


def _options(model: StoredModel) -> ScanOptions:
    """Those of a model's scan that tell what its λ are good for."""
    kept = ("solver", "evals_thresh", "filter_zeros")
    known = {name: value for name, value in model.options.items() if name in kept}
    try:
        return ScanOptions(**known)
    except OptionError as error:
        raise ResultsError(f"its provenance doesn't say how it was made ({error}); scan the model again") from error


def _measured(model: StoredModel, options: ScanOptions, *, finer: bool) -> dict[str, Row]:
    """Longname → row with the metrics of its λ, of those that have any; several of one length at once.

    `finer`: smaller λ count than did before.
    """
    found: dict[str, Row] = {}
    waiting: dict[int, list[tuple[Row, np.ndarray]]] = {}

    def measure(group: list[tuple[Row, np.ndarray]]) -> None:
        try:
            eigs_BN = np.stack([eigs for _, eigs in group])
            measured = metrics.measure_many(eigs_BN, N=[row.N for row, _ in group], options=options)
        except MatrixError as error:
            if len(group) == 1:
                raise ResultsError(f"{group[0][0].longname}: {error}; scan the model again") from error
            for one in group:
                measure([one])
            return
        found.update({row.longname: replace(row, **values) for (row, _), values in zip(group, measured, strict=True)})

    for row in model.rows:
        eigs = model.eigs(row.longname)
        if eigs is not None:
            if finer:
                _check_rounding(row, eigs, options)
            group = waiting.setdefault(len(eigs), [])
            group.append((row, eigs))
            if len(group) * len(eigs) >= _AT_ONCE:
                measure(waiting.pop(len(eigs)))
    for group in waiting.values():
        measure(group)
    return found


def _check_rounding(row: Row, eigs: np.ndarray, options: ScanOptions) -> None:
    """Raises `ResultsError` where a scan with these options would not take a row's λ from a Gram, as this one did."""
    precision: spectra.Precision = "float64" if row.precision == "float64" else "float32"
    if row.solver == "gram" and spectra.drowned(eigs, options.solver, precision, options.resolve):
        raise ResultsError(
            f"{row.longname}: --evals-thresh {options.evals_thresh:g} would take rounding for λ, as these come from a"
            " scan with a larger one; scan the model again with it"
        )


def _kept(folder: Path, found: tuple[Refitted, dict[str, Any] | None]) -> Refitted:
    model, summary = found
    if summary is not None:
        if summary["source_model"] is None:
            del summary["source_model"]  # one that the table doesn't know may have been told by a list
        update_summary(folder, summary)
    return model
