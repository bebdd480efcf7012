"""A stream for what nobody's work may depend on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TextIO


class Unfailing:
    """A text stream whose writes can't fail: what a full disk or a closed terminal won't take is lost.

    Everything else is the stream's own. None, which Python has for a standard stream that is closed, takes everything.
    """

    encoding: str

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)  # type: ignore[union-attr]
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()  # type: ignore[union-attr]

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
