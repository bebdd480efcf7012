from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """What a user's shell may set must not decide what the tests see."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
