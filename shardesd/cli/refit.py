"""`shardesd refit`: a folder's tables anew, from its stored eigenvalues."""

from __future__ import annotations

from typing import Annotated

import typer

from shardesd.cli.arguments import Bins, FilterZeros, FixFingers, Quiet, Thresh, Verbose, scan_options
from shardesd.cli.session import errors, say
from shardesd.options import ScanOptions

_SCAN = ScanOptions()


def refit(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="What --out was: the folder that holds models/.")],
    fix_fingers: FixFingers = _SCAN.fix_fingers,
    evals_thresh: Thresh = _SCAN.evals_thresh,
    filter_zeros: FilterZeros = _SCAN.filter_zeros,
    bins: Bins = _SCAN.bins,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compute all tables of a results folder anew from its stored spectra, with other fit options."""
    with errors(verbose):
        from shardesd.refitter import refit as run

        options = scan_options(locals())
        failed = 0
        for model in run(folder, options):
            failed += bool(model.problem)
            if model.problem or not quiet:
                say(f"{model.name}: {model.problem or f'{model.rows} rows'}")
        raise typer.Exit(3 if failed else 0)
