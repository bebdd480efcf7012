"""Notes of what is to be removed again: they outlive a process that is killed, and no other's are taken over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardesd.errors import ResultsError
from shardesd.source import Claims


def test_claims_of_the_dead_and_of_earlier_scans(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shardesd.source import Claims; "
        "Claims(Path(sys.argv[1]), 'hf://a', 'cache').make('dead.safetensors'); print('made', flush=True); "
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "made\n"
    claims = Claims(tmp_path, "hf://a", "cache")
    assert list(claims.orphans()) == []
    other.kill()
    other.communicate()
    assert list(claims.orphans()) == ["dead.safetensors"]
    claims.make("sub/mine.safetensors")
    # Another scan of this process, which is under way, has not been left.
    assert list(Claims(tmp_path, "hf://a", "cache").orphans()) == ["dead.safetensors"]
    claims.close()
    assert sorted(claims.orphans()) == ["dead.safetensors", "sub/mine.safetensors"]
    assert list(Claims(tmp_path, "hf://b", "cache").orphans()) == []
    assert list(Claims(tmp_path, "hf://a", "other cache").orphans()) == []
    for name in ("dead.safetensors", "sub/mine.safetensors"):
        claims.forget(name)
    assert list(claims.orphans()) == []
    claims.forget("never made")


def test_notes_of_another_machine_or_torn_ones_are_left_alone(tmp_path: Path) -> None:
    claims = Claims(tmp_path, "hf://a", "cache")
    claims.make("x")
    (path,) = tmp_path.rglob("*.json")
    note = json.loads(path.read_text())
    for content in (json.dumps({**note, "host": "elsewhere"}), "{", "[]", json.dumps({"name": "x"})):
        path.write_text(content)
        assert list(claims.orphans()) == []
    claims.close()
    path.write_text(json.dumps({**note, "since": 1.0}))  # its number is another process's by now
    assert list(claims.orphans()) == ["x"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResultsError, match="choose another --cache-dir"):
        Claims(tmp_path / "file", "hf://a", "cache").make("x")


def test_who_ends_leaves_the_claims_of_those_that_go_on(tmp_path: Path) -> None:
    first, second = Claims(tmp_path, "hf://a", "cache"), Claims(tmp_path, "hf://a", "cache")
    first.make("shard")
    second.make("shard")
    first.forget("shard")
    assert Claims(tmp_path, "hf://a", "cache").orphans() == []
    second.close()  # without having removed it
    third = Claims(tmp_path, "hf://a", "cache")
    assert third.orphans() == ["shard"]
    third.forget("shard")
    assert third.orphans() == []
    assert not list(tmp_path.rglob("*.json"))
