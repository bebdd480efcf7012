"""λ kept by content: what was solved once is never solved, nor fetched, again.

`Keep` is a folder of spectra that many processes share; a spectrum is found by what it was computed from, never by a
model's name. `Recall` is one scan's use of it.
"""

from __future__ import annotations

from shardesd.keep.files import Contents
from shardesd.keep.keys import digest, spectrum_key
from shardesd.keep.recall import Recall
from shardesd.keep.spectra import Keep, default_folder

__all__ = ["Contents", "Keep", "Recall", "default_folder", "digest", "spectrum_key"]
