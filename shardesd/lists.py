"""Lists of models: made from ids, other lists or a search of the Hub, filled from configs, written, checked."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardesd.adapters import CONFIG_NAME, is_adapter
from shardesd.batch import ListRow, ModelList, Problem, as_list, make_plan, read_list
from shardesd.errors import ListError, ShardesdError
from shardesd.options import ScanOptions
from shardesd.results import atomic, text_table
from shardesd.source import Source, fault_of, open_source, source_error

SORTS = ("downloads", "likes", "created_at", "last_modified", "trending_score")
SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".txt")
_AT_ONCE = 8
_FIRST = ("full_name", "source_model", "base_model_relation", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search of the Hub."""

    text: str | None = None
    author: str | None = None
    tags: tuple[str, ...] = ()
    pipeline: str | None = None
    sort: str = "downloads"
    limit: int = 100

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise ListError(f"--sort '{self.sort}' is invalid (expected one of: {', '.join(SORTS)})")


def search_hub(search: Search) -> list[dict[str, Any]]:
    """The models that the Hub finds, as rows of a list with downloads and likes. Raises `SourceError`."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().list_models(
            search=search.text,
            author=search.author,
            filter=list(search.tags) or None,
            pipeline_tag=search.pipeline,
            sort=search.sort,  # type: ignore[arg-type]
            limit=search.limit,
        )
        return [
            {"full_name": model.id, "downloads": model.downloads, "likes": model.likes}
            for model in list(found)[: search.limit]
        ]
    except Exception as error:
        raise source_error(fault_of(error), repo_id="the search", revision=None) from error


def gather(ids: Iterable[str], files: Iterable[Path], searched: Iterable[dict[str, Any]] = ()) -> ModelList:
    """One list of all, each model once. Lines that name no model are among its problems."""
    problems: list[Problem] = []
    rows: dict[tuple[str, str | None], ListRow] = {}
    columns: dict[str, None] = {}
    sources: list[tuple[str, ModelList]] = [("", as_list([*ids]))]
    sources += [(f"{path}: ", read_list(path)) for path in files]
    sources.append(("the Hub: ", as_list(list(searched))))
    for where, found in sources:
        problems += [replace(problem, message=f"{where}{problem.message}") for problem in found.problems]
        columns |= dict.fromkeys(found.columns)
        for row in found.rows:
            first = rows.setdefault(row.key, row)
            if first is not row:
                problems.append(
                    Problem(line=row.line, text=row.name, message=f"{where}'{row.name}' is there already", repeats=True)
                )
    return ModelList(rows=tuple(rows.values()), problems=tuple(problems), columns=tuple(columns))


def filled(models: ModelList, on_failure: Callable[[ListRow, ShardesdError], None]) -> ModelList:
    """The same with `source_model` and relation from what the models' own configs say, where the list doesn't.

    `on_failure` is told of a model that can't be asked; its row stays as it is.
    """

    def fill(row: ListRow) -> ListRow:
        if row.source_model and row.relation:
            return row
        try:
            source, relation = _told(open_source(row.model, revision=row.revision))
        except ShardesdError as error:
            on_failure(row, error)
            return row
        return replace(row, source_model=row.source_model or source, relation=row.relation or relation)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return replace(models, rows=tuple(pool.map(fill, models.rows)))


def _told(source: Source) -> tuple[str | None, str | None]:
    """(base, relation) by a model's config: an adapter's, or a model's own ``base_model`` in its card."""
    names = {file.name for file in source.files()}
    if is_adapter(names) and CONFIG_NAME in names:
        config = _json(source.path(CONFIG_NAME))
        kind = config.get("peft_type")
        kind = kind.lower() if isinstance(kind, str) and kind else "adapter"
        base = config.get("base_model_name_or_path")
        return (base if isinstance(base, str) and base else None), kind
    if "README.md" in names:
        from huggingface_hub import metadata_load
        from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]

        try:
            card = metadata_load(source.path("README.md")) or {}
        except (OSError, ValueError, YAMLError, RecursionError):  # a card is written by hand
            return None, None
        base = card.get("base_model")
        base = base[0] if isinstance(base, list) and len(base) == 1 else base
        if isinstance(base, str) and base:
            return base, str(card.get("base_model_relation") or "finetune")
    return None, None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_list(path: Path, models: ModelList) -> None:
    """Writes a list; the suffix tells the format (`SUFFIXES`). A text file holds the ids alone.

    Raises `ListError` for another suffix, `ResultsError` where it can't be written.
    """
    if path.suffix not in SUFFIXES:
        raise ListError(f"the list '{path}' has no suffix that is known (expected one of: {', '.join(SUFFIXES)})")
    rows = [_cells(row) for row in models.rows]
    used = [name for name in _FIRST if name == "full_name" or any(row.get(name) for row in rows)]
    columns = [*used, *models.columns]
    if path.suffix == ".txt":
        data = "".join(f"{row.name if not row.model.startswith('hf://') else row.model}\n" for row in models.rows)
        content = data.encode()
    elif path.suffix == ".parquet":
        content = text_table([[row.get(name) or None for name in columns] for row in rows], columns)
    elif path.suffix == ".jsonl":
        lines = [{name: row[name] for name in columns if row.get(name)} for row in rows]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    else:
        content = _csv(rows, columns, "\t" if path.suffix == ".tsv" else ",")
    with atomic(path) as file:
        file.write(content)


def _cells(row: ListRow) -> dict[str, str]:
    cells = row.cells()
    cells["full_name"] = cells.pop("model_id")
    return cells


def _csv(rows: Sequence[dict[str, str]], columns: Sequence[str], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def unreachable(models: ModelList) -> Iterator[tuple[ListRow, str]]:
    """The models that can't be had or scanned, and why, in the list's order: what a batch's plan would find."""
    with tempfile.TemporaryDirectory() as nothing_done:
        plan = make_plan(models.rows, Path(nothing_done), ScanOptions(), failures={})
    for model in plan.models:
        if model.failure is not None:
            yield model.row, model.failure.message
