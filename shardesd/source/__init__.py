"""Where a checkpoint's bytes come from: a local folder or file, or a repo on the Hugging Face Hub."""

from __future__ import annotations

from shardesd.source.address import looks_like_path, open_source, parse_hub
from shardesd.source.ahead import Ahead, memory
from shardesd.source.base import Progress, Source, file_id
from shardesd.source.claims import Claims
from shardesd.source.faults import Fault, cache_folder, endpoint, fault_of, source_error
from shardesd.source.fetch import Fetcher
from shardesd.source.remote import Remote

__all__ = [
    "Ahead",
    "Claims",
    "Fault",
    "Fetcher",
    "Progress",
    "Remote",
    "Source",
    "cache_folder",
    "endpoint",
    "fault_of",
    "file_id",
    "looks_like_path",
    "memory",
    "open_source",
    "parse_hub",
    "source_error",
]
