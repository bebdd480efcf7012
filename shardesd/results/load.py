"""What finished scans have left in an output folder, found without opening any checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from shardesd.errors import ResultsError
from shardesd.options import FORMATS
from shardesd.records import may_pass
from shardesd.results.files import file_stem, named_errors
from shardesd.results.result import Result, make_result
from shardesd.results.statistics import read_stats, stats_path
from shardesd.results.stored import StoredSpectra, all_rows, read_whole
from shardesd.results.tables import read_table, to_rows


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished scan's files, and how it was made."""

    table: Path
    run_path: Path
    run: Mapping[str, Any]
    """Its provenance."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        found = self.run.get("fingerprint")
        return found if isinstance(found, dict) else {}

    def rows(self) -> tuple[int, int]:
        """How many rows there are, skipped ones not counted, and how many of these could not be analysed."""
        status = read_whole(self.table)["status"]
        return int((status != "skipped").sum()), int((status == "failed").sum())

    def may_pass(self) -> bool:
        """Whether some of its failed rows may not fail again: a scan would go on from the others."""
        failed = read_table(self.table).filter(pl.col("status") == "failed")
        return any(map(may_pass, to_rows(failed)))

    def moved_on(self) -> bool:
        """Whether the local files that it was made of are known to be others by now, by size or time."""
        for path, known in _local_files(self.fingerprint.get("weights")):
            try:
                found = os.stat(path)
            except OSError:
                continue  # what is gone can't be scanned again
            if [found.st_size, found.st_mtime_ns] != known[:2]:
                return True
        return False


def _local_files(weights: Any) -> Iterator[tuple[str, list[Any]]]:
    """Path, and [size, time, …], of every local shard in an identity, its base's and its adapters' too."""
    if isinstance(weights, list):
        for one in weights:
            yield from _local_files(one)
    elif isinstance(weights, dict):
        for name, value in weights.items():
            if name == "shards" and isinstance(value, dict):
                yield from ((path, known) for path, known in value.items() if isinstance(known, list))
            else:
                yield from _local_files(value)


def stored_models(out: Path) -> list[str]:
    """The stems of all models with a table under `out`, in the order of names."""
    folder = out / "models"
    if not folder.is_dir():
        return []
    with named_errors(folder / "models"):
        found = [path for path in folder.iterdir() if path.suffix[1:] in FORMATS and not path.name.startswith(".")]
    return sorted({path.stem for path in found})


def tables_of(out: Path, stem: str) -> list[Path]:
    """A model's tables, one a format."""
    return [path for format in FORMATS if (path := out / "models" / f"{stem}.{format}").exists()]


def find_finished(out: Path, model_id: str, revision: str | None) -> Finished | None:
    """The finished scan of a model, whatever its options and format; None where there is none.

    One that was killed in its last steps, before everything was put away, is not finished.
    """
    stem = file_stem(model_id, revision)
    if any((out / "partial" / f"{stem}.{suffix}").exists() for suffix in ("jsonl", "lock", "pid")):
        return None
    run_path = out / "runs" / f"{stem}.json"
    tables = tables_of(out, stem)
    if not tables:
        return None
    try:
        run = json.loads(run_path.read_bytes())
    except (OSError, ValueError):
        run = {}
    return Finished(tables[0], run_path, run if isinstance(run, dict) else {})


def load_result(out: Path, model_id: str, revision: str | None, *, show_skipped: bool = False) -> Result:
    """The result of a finished scan, from its files. Raises `ResultsError` where it isn't there or can't be read."""
    finished = find_finished(out, model_id, revision)
    if finished is None:
        raise ResultsError(f"there is no finished scan of {model_id} in {out}; scan it first")
    rows = all_rows(read_whole(finished.table), finished.run)
    stem = file_stem(model_id, revision)
    spectra = out / "spectra" / f"{stem}.safetensors"
    stats = (stats_path(out, stem, format) for format in FORMATS)
    files = (finished.table, *stats, spectra, finished.run_path, out / "summary.csv")
    return make_result(
        model_id,
        revision,
        rows,
        show_skipped=show_skipped,
        spectra=StoredSpectra(spectra) if spectra.exists() else {},
        stats=read_stats(out, stem),
        files=tuple(path for path in files if path.exists()),
    )
