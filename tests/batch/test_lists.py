"""`shardesd models`: what each command writes, to the letter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from batch_models import lora
from checkpoints import cli, one_file, random_weights
from hub_server import HubServer, use_hub

from shardesd.batch import read_list


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        yield server


def test_create_fills_bases_from_configs(hub: HubServer, tmp_path: Path) -> None:
    card = b"---\nbase_model: org/plain\nbase_model_relation: merge\n---\n# A model\n"
    weights = {path.name: path.read_bytes() for path in one_file(tmp_path / "w", random_weights()).iterdir()}
    hub.add("org/plain", weights)
    hub.add("org/adapter", lora(1))
    hub.add("org/tuned", {**weights, "README.md": card})
    (tmp_path / "more.txt").write_text("org/tuned\norg/plain\norg/gone\n")
    out = tmp_path / "models.csv"
    result = cli("models", "create", "org/plain", "org/adapter", "--from", tmp_path / "more.txt", "--to", out)
    assert result.exit_code == 0, result.output
    assert out.read_text() == (
        "full_name,source_model,base_model_relation\n"
        "org/plain,,\n"
        "org/adapter,org/plain0,lora\n"
        "org/tuned,org/plain,merge\n"
        "org/gone,,\n"
    )
    assert f"note: line 2: {tmp_path}/more.txt: 'org/plain' is there already" in result.stderr
    assert "note: not filled: no model 'org/gone'" in result.stderr
    assert f"4 models written to {out}" in result.stderr


@pytest.mark.parametrize("card", ["---\nbase_model: [\n---\n", "---\n- a\n---\n", "---\n\tx: y\n---\n"])
def test_a_card_that_is_broken_tells_nothing(hub: HubServer, tmp_path: Path, card: str) -> None:
    hub.add("org/broken", {"README.md": card.encode()})
    result = cli("models", "create", "org/broken", "--to", tmp_path / "list.csv")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "list.csv").read_text() == "full_name\norg/broken\n"


def test_a_search_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    hub.add("alice/one", {"model.safetensors": b""})
    hub.add("alice/two", {"model.safetensors": b""})
    hub.add("bob/three", {"model.safetensors": b""})
    out = tmp_path / "models.jsonl"
    result = cli("models", "create", "--author", "alice", "--limit", 5, "--no-fill", "--to", out)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [
        {"full_name": "alice/one", "downloads": "0", "likes": "0"},
        {"full_name": "alice/two", "downloads": "0", "likes": "0"},
    ]
    assert "--sort 'size' is invalid" in cli("models", "create", "--search", "x", "--sort", "size", "--to", out).stderr


def test_convert_and_merge_between_all_formats(tmp_path: Path) -> None:
    first = tmp_path / "a.csv"
    first.write_text('full_name;revision;likes;note\norg/a;v1;3;"x, y"\norg/b;;;\n')
    (tmp_path / "b.txt").write_text("org/b\norg/c\n")
    for name in ("a.tsv", "a.parquet", "a.jsonl", "back.csv"):
        assert cli("models", "convert", first, "--to", tmp_path / name).exit_code == 0
        first = tmp_path / name
    assert first.read_text() == 'full_name,revision,likes,note\norg/a,v1,3,"x, y"\norg/b,,,\n'
    assert pl.read_parquet(tmp_path / "a.parquet")["likes"].to_list() == ["3", None]
    merged = tmp_path / "all.txt"
    assert cli("models", "merge", first, tmp_path / "b.txt", "--to", merged).exit_code == 0
    assert merged.read_text() == "org/a@v1\norg/b\norg/c\n"
    assert [row.name for row in read_list(merged).rows] == ["org/a@v1", "org/b", "org/c"]
    wrong = cli("models", "convert", first, "--to", tmp_path / "a.xls")
    assert wrong.exit_code == 1
    assert "no suffix that is known" in wrong.stderr


def test_check(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/a", {"model.safetensors": b""})
    path = tmp_path / "models.csv"
    path.write_text(
        "full_name,source_model,base_model_relation,likes\n"
        "org/a,,,\norg/gone,,,\norg/a,,,\norg/x y,,,\norg/l,org/a,lora,\n"
    )
    result = cli("models", "check", path)
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        "note: line 4: 'org/a' repeats line 2",
        "wrong: line 5: 'org/x y' is neither a local path nor a Hub model id (expected org/name or org/name@revision)",
        "3 models, 1 of them adapters, 1 wrong, columns of its own: likes",
    ]
    reached = cli("models", "check", path, "--reach").stdout
    assert "wrong: line 3: no model 'org/gone'" in reached
    assert "3 wrong" in reached


def test_check_asks_whether_models_can_be_scanned(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/a", {"model.safetensors": b"", "config.json": b"{}"})
    hub.add("org/gated", {"model.safetensors": b"", "config.json": b"{}"}, gated=True)
    hub.add("org/text", {"README.md": b"no weights"})
    path = tmp_path / "models.txt"
    path.write_text("org/a\norg/gated\norg/text\n")
    result = cli("models", "check", path, "--reach")
    assert result.exit_code == 3
    gated, text, summary = result.stdout.splitlines()
    assert gated.startswith("wrong: line 2: ")
    assert "org/gated" in gated
    assert text.startswith("wrong: line 3: ")
    assert "org/text" in text
    assert summary == "3 models, 0 of them adapters, 2 wrong"
