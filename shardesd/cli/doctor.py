"""`shardesd doctor`: whether this machine can do the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from shardesd.cli.arguments import Json, Out, Verbose
from shardesd.cli.session import errors, tell
from shardesd.options import OutputOptions

_OUTPUT = OutputOptions()


def doctor(
    out: Out = _OUTPUT.out,
    network: Annotated[bool, typer.Option("--network/--no-network", help="Ask the Hub.")] = True,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check Python, packages, devices, memory, disk and the Hub; exit code 1 where a scan can't run."""
    with errors(verbose):
        from dataclasses import asdict
        from json import dumps

        from shardesd.doctor import examine

        bad = False
        for finding in examine(OutputOptions(out=out).folder, network=network):
            bad |= finding.grade == "bad"
            if json:
                tell(dumps(asdict(finding)))
                continue
            tell(f"{finding.grade:<4}  {finding.name:<8}  {finding.found}")
            if finding.remedy:
                tell(f"{'':16}→ {finding.remedy}")
        raise typer.Exit(1 if bad else 0)
