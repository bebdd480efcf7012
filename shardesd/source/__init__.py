"""Where a checkpoint's bytes come from: a local folder or file, or a repo on the Hugging Face Hub."""

from __future__ import annotations

from shardesd.source.address import open_source
from shardesd.source.base import Source
from shardesd.source.fetch import Fetcher

__all__ = ["Fetcher", "Source", "open_source"]
