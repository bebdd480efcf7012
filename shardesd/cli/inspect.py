"""`shardesd inspect`: what a scan would do, from headers alone."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Annotated

import typer

from shardesd.cli.arguments import (
    Base,
    CacheDir,
    Embeddings,
    Exclude,
    Fetch,
    Include,
    LayoutFile,
    MaxAspect,
    NoCache,
    PerHead,
    Precision,
    Revision,
    Solver,
    Split,
    Verbose,
    scan_options,
)
from shardesd.cli.session import errors, tell
from shardesd.options import ScanOptions

_SCAN = ScanOptions()


def inspect(
    repo: Annotated[
        str,
        typer.Argument(metavar="REPO", help="A model or an adapter: a folder or file, org/name, org/name@revision."),
    ],
    revision: Revision = None,
    base: Base = None,
    solver: Solver = _SCAN.solver,
    precision: Precision = _SCAN.precision,
    max_aspect: MaxAspect = _SCAN.max_aspect,
    include: Include = None,
    exclude: Exclude = None,
    embeddings: Embeddings = _SCAN.embeddings,
    split: Split = _SCAN.split,
    layout: LayoutFile = None,
    per_head: PerHead = _SCAN.per_head,
    fetch: Fetch = _SCAN.fetch,
    no_cache: NoCache = not _SCAN.cache,
    cache_dir: CacheDir = _SCAN.cache_dir,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say what a scan would find, fetch and compute, from headers alone."""
    with errors(verbose):
        from shardesd.inspector import inspect as run
        from shardesd.show import inspection_lines

        options = scan_options(locals())
        found = asdict(run(repo, options, revision=revision, base=base))
        tell(dumps(found) if json else "\n".join(inspection_lines(found)))
