"""`shardesd cache`: the eigenvalues that are kept by content."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from shardesd.cli.arguments import MAX_CACHE, CacheDir, MaxCache
from shardesd.cli.session import errors, tell
from shardesd.errors import OptionError
from shardesd.options import ScanOptions, parse_bytes

if TYPE_CHECKING:
    from shardesd.keep import Keep

cache = typer.Typer(
    help="Eigenvalues that are kept by content, so that nothing is solved twice.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_DIR = ScanOptions().cache_dir


@cache.command()
def info(cache_dir: CacheDir = _DIR) -> None:
    """Say where it is and how much it holds."""
    with errors(False):
        keep = _keep(cache_dir)
        held = keep.contents()
        tell(f"{keep.folder}: {held.entries:,} entries, {held.nbytes / 1e6:,.1f} MB")


@cache.command()
def clear(cache_dir: CacheDir = _DIR) -> None:
    """Remove all that it holds."""
    with errors(False):
        _prune(cache_dir, 0)


@cache.command()
def prune(cache_dir: CacheDir = _DIR, max_cache: MaxCache = MAX_CACHE) -> None:
    """Remove what was used least recently, until no more than --max-cache is left."""
    with errors(False):
        _prune(cache_dir, parse_bytes(max_cache))


def _keep(cache_dir: str | None) -> Keep:
    from shardesd.scanner import open_keep

    if cache_dir is not None and os.path.exists(place := os.path.expanduser(cache_dir)) and not os.path.isdir(place):
        raise OptionError(f"--cache-dir '{cache_dir}' is invalid (expected the path of a folder)")
    return open_keep(ScanOptions(cache_dir=cache_dir))


def _prune(cache_dir: str | None, limit: int) -> None:
    keep = _keep(cache_dir)
    removed = keep.prune(limit)
    left = keep.contents()
    tell(f"removed {removed:,} entries, {left.entries:,} ({left.nbytes / 1e6:,.1f} MB) left in {keep.folder}")
