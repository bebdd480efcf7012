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

from shardesd.results.again import StoredModel
from shardesd.results.digest import Digest, Spread, rebuild_summary
from shardesd.results.files import Lock, atomic, file_stem, make_folders, named_errors, remove_leftovers
from shardesd.results.load import Finished, find_finished, load_result, stored_models
from shardesd.results.memory import MemoryStore
from shardesd.results.result import Result
from shardesd.results.store import Begun, ModelStore
from shardesd.results.stored import StoredSpectra
from shardesd.results.summary import (
    SUMMARY_COLUMNS,
    Cells,
    edit_table,
    read_models,
    read_summary,
    summarise,
    update_summary,
)
from shardesd.results.tables import SCHEMA, read_table, text_table, to_frame, to_rows

__all__ = [
    "SCHEMA",
    "SUMMARY_COLUMNS",
    "Begun",
    "Cells",
    "Digest",
    "Finished",
    "Lock",
    "MemoryStore",
    "ModelStore",
    "Result",
    "Spread",
    "StoredModel",
    "StoredSpectra",
    "atomic",
    "edit_table",
    "file_stem",
    "find_finished",
    "load_result",
    "make_folders",
    "named_errors",
    "read_models",
    "read_summary",
    "read_table",
    "rebuild_summary",
    "remove_leftovers",
    "stored_models",
    "summarise",
    "text_table",
    "to_frame",
    "to_rows",
    "update_summary",
]
