"""Tables, atomic files, resume and stored spectra.

```
OUT/
  models/org--name.csv              a row per matrix (or .parquet, .jsonl)
  spectra/org--name.safetensors     the λ of every row, float64, keyed by longname
  runs/org--name.json               how it was made: the provenance, and the fingerprint that a second run compares
  summary.csv                       a row per model
  partial/org--name.jsonl           only while a scan is unfinished: its rows so far
```

`file_stem` says how names come about.
"""

from __future__ import annotations

from shardesd.results.files import atomic, file_stem
from shardesd.results.memory import MemoryStore
from shardesd.results.result import Result
from shardesd.results.store import Begun, ModelStore
from shardesd.results.stored import StoredSpectra
from shardesd.results.summary import SUMMARY_COLUMNS, summarise, update_summary
from shardesd.results.tables import SCHEMA, read_table, to_frame, to_rows

__all__ = [
    "SCHEMA",
    "SUMMARY_COLUMNS",
    "Begun",
    "MemoryStore",
    "ModelStore",
    "Result",
    "StoredSpectra",
    "atomic",
    "file_stem",
    "read_table",
    "summarise",
    "to_frame",
    "to_rows",
    "update_summary",
]
