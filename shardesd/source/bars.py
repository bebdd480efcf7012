"""huggingface_hub's progress bars, heard and not drawn."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardesd.source.patience import Meter


@contextmanager
def bars(meter: Meter) -> Iterator[dict[str, Any]]:
    """Options for `hf_hub_download` that send its progress to `meter` and draw nothing."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, tqdm

    if "tqdm_class" not in inspect.signature(hf_hub_download).parameters:
        # Version 1.0 takes no class: its bars can only be switched off, and nothing is heard until the end.
        if are_progress_bars_disabled():
            yield {}
            return
        disable_progress_bars()
        try:
            yield {}
        finally:
            enable_progress_bars()
        return

    class Bar(tqdm):
        monitor_interval = 0  # or each of these classes has a thread of its own, for good

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            meter.total = meter.total or kwargs.get("total")
            meter.at(int(kwargs.get("initial") or 0))

        def update(self, n: float | None = 1) -> None:
            meter.advance(int(n or 0))

        def update_transfer(self, n: float) -> None:
            """Bytes on the wire, which Xet counts apart from the file's."""

        def set_transfer_postfix_str(self, *args: Any, **kwargs: Any) -> None:
            """The wire's speed; nothing is drawn."""

    yield {"tqdm_class": Bar}
