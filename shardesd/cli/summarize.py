"""`shardesd summarize`: a folder of results, across its models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardesd.cli.arguments import Format, Json, Quiet, Verbose
from shardesd.cli.session import errors, tell
from shardesd.options import OutputOptions

_OUTPUT = OutputOptions()


def summarize(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The --out of scans or of a batch.")] = _OUTPUT.out,
    format: Format = _OUTPUT.format,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Rebuild summary.csv from the models' tables, and say what they show together."""
    with errors(verbose):
        from shardesd.results import rebuild_summary
        from shardesd.show import digest_lines

        output = OutputOptions(out=folder, format=format)
        digest = rebuild_summary(output.folder, output.format)
        if json:
            import json as json_module

            tell(json_module.dumps(asdict(digest)))
        elif not quiet:
            for line in digest_lines(digest):
                tell(line)
