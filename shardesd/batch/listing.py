"""A list of models: CSV, TSV, Parquet, JSON lines, or a text file of ids, checked line by line."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from shardesd.batch.model import ListRow, identified
from shardesd.errors import ListError, ShardesdError

NAME_COLUMNS = ("full_name", "model_id")
"""Of the columns that may hold the model, the first that has a value in a row counts."""
OWN_COLUMNS = (*NAME_COLUMNS, "source_model", "base_model_relation", "revision")
_DELIMITERS = ",;\t|"
_LONGEST = 100_000
"""Characters of a cell: Python's csv, which reads summary.csv again, takes little more."""
_Cells = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a line of the list is left out."""

    line: int
    text: str
    """What the line names, as far as it names anything."""
    message: str
    repeats: bool = False
    """It only says again what an earlier line says: nothing is lost."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """What a list says."""

    rows: tuple[ListRow, ...]
    problems: tuple[Problem, ...] = ()
    columns: tuple[str, ...] = field(default=())
    """Columns that mean nothing to shardesd, in their order."""


def read_list(path: str | os.PathLike[str]) -> ModelList:
    """The models of a list, each once, and what is wrong with its other lines.

    The suffix tells the format: ``.csv`` and ``.tsv`` (comma, semicolon, tab or bar; with or without a BOM),
    ``.parquet``, ``.jsonl``, anything else a text file with an id a line and ``#`` comments. A table needs a column
    ``full_name`` or ``model_id``; ``source_model``, ``base_model_relation`` and ``revision`` are understood, all other
    columns are kept. Raises `ListError` where the file can't be read or has no such column.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ListError(f"can't read the list {path}: {(error.strerror or str(error)).lower()}") from error
    reader = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".jsonl": _jsonl, ".ndjson": _jsonl}.get(
        path.suffix.lower(), _text
    )
    problems: list[Problem] = []
    records = list(reader(data, path, problems))
    return _checked(records, problems, base=path.parent)


def as_list(models: Iterable[str | Mapping[str, Any] | ListRow]) -> ModelList:
    """The same from ids, or mappings with a list's columns. Raises `ListError` for anything that is wrong."""
    records: list[tuple[int, _Cells]] = []
    for number, model in enumerate(models, start=1):
        if isinstance(model, ListRow):
            records.append((number, model.cells()))
        elif isinstance(model, str):
            records.append((number, {"model_id": model}))
        else:
            records.append((number, {_column(key): _cell(value) for key, value in model.items()}))
    found = _checked(records, [])
    for problem in found.problems:
        if not problem.repeats:
            raise ListError(f"model {problem.line}: {problem.message}")
    return found


def _checked(records: Sequence[tuple[int, _Cells]], problems: list[Problem], base: Path | None = None) -> ModelList:
    rows: dict[tuple[str, str | None], ListRow] = {}
    columns: dict[str, None] = {}
    for line, cells in records:
        columns |= {name: None for name in cells if name not in OWN_COLUMNS}
        name = next((cells[column] for column in NAME_COLUMNS if cells.get(column)), "")
        longest = max(cells, key=lambda column: len(cells[column]), default="")
        if longest and len(cells[longest]) > _LONGEST:
            message = f"its cell '{longest}' has {len(cells[longest]):,} characters (at most {_LONGEST:,} are taken)"
            problems.append(Problem(line=line, text=name[:200] or f"(line {line})", message=message))
            continue
        if not name:
            problems.append(Problem(line=line, text=f"(line {line})", message="it names no model"))
            continue
        try:
            row = identified(
                name,
                line=line,
                revision=cells.get("revision") or None,
                source_model=cells.get("source_model") or None,
                relation=(cells.get("base_model_relation") or "").lower() or None,
                extra={key: value for key, value in cells.items() if key not in OWN_COLUMNS},
                beside=base,
            )
        except ShardesdError as error:
            problems.append(Problem(line=line, text=name, message=str(error)))
            continue
        first = rows.setdefault(row.key, row)
        if first is row:
            continue
        same = (first.model, first.source_model) == (row.model, row.source_model)
        why = "" if same else " and means another: their results would have one name; give it another list and --out"
        problems.append(Problem(line=line, text=name, message=f"'{name}' repeats line {first.line}{why}", repeats=same))
    problems.sort(key=lambda problem: problem.line)
    return ModelList(rows=tuple(rows.values()), problems=tuple(problems), columns=tuple(columns))


def _decoded(data: bytes, path: Path) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ListError(f"the list {path} is not UTF-8 (line {line}); save it as UTF-8") from error


def _csv(data: bytes, path: Path, problems: list[Problem]) -> Iterator[tuple[int, _Cells]]:
    text = _decoded(data, path)
    head = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = next(
        (d for d in _DELIMITERS if not _columns(next(csv.reader([head], delimiter=d), [])).isdisjoint(NAME_COLUMNS)),
        None,
    )
    if delimiter is None:
        raise _no_column(path, next(csv.reader([head]), []))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    last = sum(1 for _ in io.StringIO(text, newline=""))
    names: list[str] | None = None
    line = 1
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            problems.append(Problem(line=line, text=f"(line {line})", message=f"it can't be read: {error}"))
            values = []
        if values is None:
            return
        if line < reader.line_num == last and _unclosed(text, line, delimiter):
            # csv takes the rest of the file for one cell: the models in it would be lost without a word.
            message = f"nothing closes a quotation mark: all from here to line {reader.line_num} is lost"
            problems.append(Problem(line=line, text=f"(line {line})", message=message))
            return
        if any(value.strip() for value in values):
            if names is None:
                names = _unique([_column(value) for value in values], path)
            elif len(values) > len(names) and any(value.strip() for value in values[len(names) :]):
                message = f"it has {len(values)} cells where there are {len(names)} columns"
                problems.append(Problem(line=line, text=values[0].strip() or f"(line {line})", message=message))
            else:
                cells = (_cell(value) for value in values)
                yield line, {name: cell for name, cell in zip(names, cells, strict=False) if name}
        line = reader.line_num + 1


def _unclosed(text: str, line: int, delimiter: str) -> bool:
    """Whether the record that begins at a line has a quoted cell that the end of the file cuts off."""
    rest = io.StringIO(text, newline="")
    for _ in range(line - 1):
        rest.readline()
    try:
        next(csv.reader(rest, delimiter=delimiter, strict=True), None)
    except csv.Error as error:
        return "end of data" in str(error)
    return False


def _parquet(data: bytes, path: Path, problems: list[Problem]) -> Iterator[tuple[int, _Cells]]:
    try:
        table = pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise ListError(f"can't read the list {path}: {str(error).strip().partition(chr(10))[0]}") from error
    names = _unique([_column(name) for name in table.columns], path)
    if _columns(names).isdisjoint(NAME_COLUMNS):
        raise _no_column(path, table.columns)
    for number, values in enumerate(table.iter_rows(), start=1):
        yield number, {name: _cell(value) for name, value in zip(names, values, strict=True)}


def _jsonl(data: bytes, path: Path, problems: list[Problem]) -> Iterator[tuple[int, _Cells]]:
    for line, text in enumerate(_decoded(data, path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(Problem(line=line, text=f"(line {line})", message=f"it is not JSON: {error}"))
            continue
        if isinstance(value, str):
            value = {"model_id": value}
        if not isinstance(value, dict):
            problems.append(Problem(line=line, text=f"(line {line})", message="it is no JSON object"))
            continue
        yield line, {_column(name): _cell(cell) for name, cell in value.items()}


def _text(data: bytes, path: Path, problems: list[Problem]) -> Iterator[tuple[int, _Cells]]:
    for line, text in enumerate(_decoded(data, path).splitlines(), start=1):
        name = re.sub(r"(^|\s)#.*", "", text).strip()
        if name:
            yield line, {"model_id": name}


def _column(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lstrip("\ufeff")).lower() if _known(name) else _writable(name)


def _known(name: str) -> bool:
    return re.sub(r"[\s-]+", "_", name.strip().lstrip("\ufeff")).lower() in OWN_COLUMNS


def _columns(names: Iterable[str]) -> set[str]:
    return {_column(name) for name in names}


def _unique(names: list[str], path: Path) -> list[str]:
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ListError(f"the list {path} has the column '{twice[0]}' twice")
    return names


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else _writable(str(value))


def _writable(text: str) -> str:
    """A cell's text as every table can hold it: no bare carriage returns and NULs, which csv writes and can't read,
    and no halves of surrogate pairs."""
    return re.sub(r"\r\n?", "\n", text.replace("\0", "")).strip().encode("utf-8", "backslashreplace").decode()


def _no_column(path: Path, found: Iterable[str]) -> ListError:
    names = ", ".join(name.strip() for name in found if name.strip()) or "nothing"
    return ListError(
        f"the list {path} has no column {' or '.join(NAME_COLUMNS)} (it has {names}); a list of bare ids is a .txt file"
    )
