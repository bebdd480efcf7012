"""Eigenvalue spectra and power laws of safetensors checkpoints, one tensor at a time.

```python
import shardesd
result = shardesd.scan("openai-community/gpt2")
result.layers      # polars DataFrame, a row per matrix
result.spectra     # longname → λ, ascending float64
result.summary     # the model's row of summary.csv
for result in shardesd.scan_many("models.csv", out="results"):
    ...            # each model of a list, as it is done
```
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (which can't be done any more once the main thread has ended)
from typing import TYPE_CHECKING, Any

from shardesd.errors import ShardesdError
from shardesd.options import BatchOptions, ScanOptions
from shardesd.version import __version__

if TYPE_CHECKING:
    from shardesd.batch import scan_many
    from shardesd.results import Result
    from shardesd.scanner import scan, stream

__all__ = [
    "BatchOptions",
    "Result",
    "ScanOptions",
    "ShardesdError",
    "__version__",
    "scan",
    "scan_many",
    "stream",
]

# Loaded at first use: numpy and polars take longer to import than `shardesd --help` may take.
_LAZY = {
    "Result": "shardesd.results",
    "scan": "shardesd.scanner",
    "scan_many": "shardesd.batch",
    "stream": "shardesd.scanner",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shardesd' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
