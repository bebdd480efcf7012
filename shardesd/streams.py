"""stdin, stdout and stderr as a shell may leave them: closed, full, or in an encoding that lacks most characters."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_streams() -> None:
    """Opens what is closed to nothing, so that no other file gets its number and is written to by mistake; what an
    encoding lacks is escaped from now on. A width or height of 0 is none, which rich would take at its word."""
    for size in ("COLUMNS", "LINES"):
        if not os.environ.get(size, "1").strip("0 "):
            del os.environ[size]
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def settle_streams() -> None:
    """Lets go of what can't be written, so that the interpreter doesn't fail over it at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                handle = os.open(os.devnull, os.O_WRONLY)
                os.dup2(handle, stream.fileno())
                os.close(handle)


def encodable_json(text: str, encoding: str | None) -> str:
    """JSON in which every character that `encoding` may lack is escaped."""
    if (encoding or "utf-8").lower().startswith("utf"):
        return text
    return re.sub(r"[^\x00-\x7f]", lambda match: _escaped(match[0]), text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))
