from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The reference is peft's own merge. Only what an adapter is and which base it names can be tested without it.
if not all(importlib.util.find_spec(name) for name in ("peft", "transformers")):
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_adapter_base.py"
    ]
