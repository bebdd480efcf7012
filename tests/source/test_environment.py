"""The user's environment, in fresh processes: huggingface_hub reads most of it when it is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Fault, HubServer

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}

PROGRAM = """
import json, sys
from shardesd.errors import ShardesdError
from shardesd.source import open_source
try:
    source = open_source(sys.argv[1])
    path = source.path("model.safetensors")
    print(json.dumps({"commit": source.commit, "path": str(path), "bytes": path.stat().st_size}))
except ShardesdError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


def run(repo: str, env: dict[str, str]) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repo], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf-home"


def test_endpoint_home_and_offline(home: Path) -> None:
    with HubServer() as hub:
        commit = hub.add("org/name", FILES)
        online = run("org/name", hub.env(home))
        asked = len(hub.log)
        offline = run("org/name", hub.env(home, HF_HUB_OFFLINE="1"))
        assert len(hub.log) == asked
        nothing = run("org/other", hub.env(home, HF_HUB_OFFLINE="1"))
    assert online["commit"] == commit
    assert Path(str(online["path"])).is_relative_to(home / "hub")
    assert offline == online
    assert nothing["error"] == "Offline"


def test_token(home: Path) -> None:
    with HubServer(tokens={"hf_other"}) as hub:
        hub.add("org/gated", FILES, gated=True, readers={"hf_reader"})
        assert run("org/gated", hub.env(home, token="hf_reader"))["bytes"] == 7000
        refused = run("org/gated", hub.env(home / "other", token="hf_other"))
    assert refused["error"] == "AccessDenied"
    assert "hf_other" not in str(refused["message"])


def test_nothing_of_the_client_is_printed(home: Path) -> None:
    with HubServer() as hub:
        hub.add("org/name", FILES)
        hub.fail("*/model.safetensors", Fault(cut=100), Fault(status=500), method="GET")
        assert run("org/name", hub.env(home))["bytes"] == 7000  # run() sees to it that stderr is empty


def test_importing_the_room_imports_no_client() -> None:
    code = (
        "import shardesd.source, sys; print([m for m in ('huggingface_hub', 'tenacity', 'torch') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
