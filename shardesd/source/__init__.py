"""Where a checkpoint's bytes come from: a local folder or file, or a repo on the Hugging Face Hub."""

from __future__ import annotations

from shardesd.source.address import looks_like_path, open_source, parse_hub
from shardesd.source.base import Source, file_id
from shardesd.source.faults import Fault, cache_folder, endpoint, fault_of, source_error
from shardesd.source.fetch import Fetcher

__all__ = [
    "Fault",
    "Fetcher",
    "Source",
    "cache_folder",
    "endpoint",
    "fault_of",
    "file_id",
    "looks_like_path",
    "open_source",
    "parse_hub",
    "source_error",
]
