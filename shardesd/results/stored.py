"""The λ of a model's rows in one safetensors file: written as a stream, read one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from safetensors import SafetensorError, safe_open

from shardesd.errors import ResultsError
from shardesd.records import Row
from shardesd.results.files import atomic
from shardesd.results.tables import read_table, to_rows


def write_spectra(
    path: Path, lengths: Mapping[str, int], eigs: Callable[[str], np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes the λ that `eigs` gives for each name, in the order of `lengths`, holding one array at a time.

    The file is float64 of shape (K,) per name, K = ``lengths[name]``. Raises `NoSpace` or `ResultsError`.
    """
    names = [name for name in lengths if name != "__metadata__"]  # the format keeps this name for itself
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + 8 * lengths[name]
        header[name] = {"dtype": "F64", "shape": [lengths[name]], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that every float is aligned
    with atomic(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            array = np.ascontiguousarray(eigs(name), dtype="<f8")
            if array.shape != (lengths[name],):
                raise ResultsError(f"{name} has λ of shape {array.shape} where {lengths[name]} were announced")
            file.write(array.data)


def read_whole(table: Path) -> pl.DataFrame:
    """As `read_table`, of a model's table that was not cut short: there are λ of no more matrices than it has rows.

    Not asked where a scan is under way, or was killed as it put its files away one by one. Raises `ResultsError`.
    """
    layers = read_table(table)
    out = table.parent.parent
    path = out / "spectra" / f"{table.stem}.safetensors"
    if (out / "partial" / f"{table.stem}.jsonl").exists():
        return layers
    try:
        stored = len(StoredSpectra(path))
    except ResultsError:
        return layers  # they may have been taken away
    if _analysed(layers) < stored:
        layers = read_table(table)  # another may have made it anew since it was read
        if (known := _analysed(layers)) < stored:
            raise ResultsError(
                f"{table} has {known} analysed rows, and {path} has λ of {stored} matrices: it was cut short; move it "
                "away, or add --overwrite to replace it"
            )
    return layers


def all_rows(layers: pl.DataFrame, run: Mapping[str, Any]) -> list[Row]:
    """The rows of a finished table, and in their places the skipped ones, which its provenance `run` holds."""
    rows = [row for row in to_rows(layers) if row.status != "skipped"]
    for values in run.get("skipped") or ():
        rows.insert(values["position"], Row(**{name: value for name, value in values.items() if name != "position"}))
    return rows


def _analysed(layers: pl.DataFrame) -> int:
    return int((layers["status"] == "ok").sum())


class StoredSpectra(Mapping[str, np.ndarray]):
    """Longname → λ (float64, ascending) out of a spectra file, each read when it is asked for.

    Raises `ResultsError` where the file can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._names: dict[str, None] = {}

    def _open(self) -> Any:
        if self._file is None:
            try:
                self._file = safe_open(self.path, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ResultsError(f"can't read the spectra {self.path}: {error}; scan the model again") from error
            self._names = dict.fromkeys(self._file.offset_keys())
        return self._file

    def __getitem__(self, longname: str) -> np.ndarray:
        file = self._open()
        if longname not in self._names:
            raise KeyError(longname)
        array: np.ndarray = file.get_tensor(longname)
        return array

    def __iter__(self) -> Iterator[str]:
        self._open()
        return iter(self._names)

    def __len__(self) -> int:
        self._open()
        return len(self._names)

    def __repr__(self) -> str:
        return f"StoredSpectra({str(self.path)!r})"
