from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest
from hub_server import HubServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """A hub that this process's client talks to, with an empty cache."""
    with HubServer() as server:
        hub_server.use_hub(monkeypatch, server, cache)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "hub-cache"
    folder.mkdir()
    return folder


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every wait that the client asked for, each cut short."""
    return hub_server.short_waits(monkeypatch)
