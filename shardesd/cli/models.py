"""`shardesd models`: lists of models made, converted, joined and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardesd.cli.arguments import Quiet, Verbose
from shardesd.cli.session import at_once, errors, say, tell

if TYPE_CHECKING:
    from shardesd.batch import ListRow, ModelList
    from shardesd.errors import ShardesdError

models = typer.Typer(help="Make, convert, join and check lists of models.", no_args_is_help=True, rich_markup_mode=None)

To = Annotated[
    str, typer.Option("--to", metavar="LIST", help="Where the list goes: .csv, .tsv, .parquet, .jsonl or .txt.")
]
Fill = Annotated[
    bool, typer.Option("--fill/--no-fill", help="Ask each model's config for source_model and base_model_relation.")
]


@models.command()
def create(
    to: To,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Ids or paths of models.")] = None,
    files: Annotated[
        list[str] | None, typer.Option("--from", metavar="LIST", help="The models of another list; repeatable.")
    ] = None,
    search: Annotated[str | None, typer.Option("--search", metavar="TEXT", help="Search the Hub for it.")] = None,
    author: Annotated[str | None, typer.Option("--author", help="Search the Hub: models of this author.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="Search the Hub: models with this tag; repeatable.")
    ] = None,
    pipeline: Annotated[str | None, typer.Option("--pipeline", help="Search the Hub: models for this task.")] = None,
    sort: Annotated[
        str, typer.Option("--sort", help="Of the search: downloads, likes, created_at, last_modified, trending_score.")
    ] = "downloads",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Of the search.")] = 100,
    fill: Fill = True,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make a list from ids, other lists and a search of the Hub, each model once."""
    with errors(verbose):
        from shardesd.lists import Search, gather, search_hub, write_list

        wanted = Search(text=search, author=author, tags=tuple(tag or ()), pipeline=pipeline, sort=sort, limit=limit)
        found = search_hub(wanted) if any((search, author, tag, pipeline)) else []
        listed = gather(ids or (), [Path(path) for path in files or ()], found)
        listed = _filled(listed) if fill else listed
        write_list(Path(to), listed)
        _end(listed, to, quiet)


@models.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="LIST", help="The list to read.")],
    to: To,
    fill: Fill = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a list in another format."""
    with errors(verbose):
        from shardesd.lists import gather, write_list

        listed = gather((), [Path(source)])
        listed = _filled(listed) if fill else listed
        write_list(Path(to), listed)
        _end(listed, to, quiet)


@models.command()
def merge(
    sources: Annotated[list[str], typer.Argument(metavar="LIST...", help="The lists to join.")],
    to: To,
    fill: Fill = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Join lists, each model once: the first list that names it counts."""
    with errors(verbose):
        from shardesd.lists import gather, write_list

        listed = gather((), [Path(path) for path in sources])
        listed = _filled(listed) if fill else listed
        write_list(Path(to), listed)
        _end(listed, to, quiet)


@models.command()
def check(
    source: Annotated[str, typer.Argument(metavar="LIST", help="The list to check.")],
    reach: Annotated[bool, typer.Option("--reach", help="Ask for each model whether it can be had.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say what is wrong with a list, line by line; exit code 3 where something is."""
    with errors(verbose):
        from shardesd.batch import read_list
        from shardesd.lists import unreachable

        listed = read_list(source)
        wrong = 0
        for problem in listed.problems:
            tell(f"{'note' if problem.repeats else 'wrong'}: {problem}")
            wrong += not problem.repeats
        with at_once():
            for row, why in unreachable(listed) if reach else ():
                tell(f"wrong: line {row.line}: {why}")
                wrong += 1
        adapters = sum(row.base is not None for row in listed.rows)
        extra = f", columns of its own: {', '.join(listed.columns)}" if listed.columns else ""
        tell(f"{len(listed.rows)} models, {adapters} of them adapters, {wrong} wrong{extra}")
        raise typer.Exit(3 if wrong else 0)


def _filled(listed: ModelList) -> ModelList:
    from shardesd.lists import filled

    def failed(row: ListRow, error: ShardesdError) -> None:
        say(f"note: not filled: {error}")

    with at_once():
        return filled(listed, failed)


def _end(listed: ModelList, to: str, quiet: bool) -> None:
    wrong = 0
    for problem in listed.problems:
        wrong += not problem.repeats
        if not quiet:
            say(f"{'note' if problem.repeats else 'left out'}: {problem}")
    if not quiet:
        say(f"{len(listed.rows)} models written to {to}")
    raise typer.Exit(3 if wrong else 0)
