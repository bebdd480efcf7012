"""λ kept by content: what was solved once is never solved, nor fetched, again.

`Keep` is a folder of spectra that many processes share; a spectrum is found by what it was computed from, never by a
model's name. `Recall` is one scan's use of it.
"""

from __future__ import annotations

from shardesd.cachefolder import Contents
from shardesd.keep.keys import digest, spectrum_key
from shardesd.keep.recall import Recall
from shardesd.keep.spectra import Keep

__all__ = ["Contents", "Keep", "Recall", "digest", "spectrum_key"]
