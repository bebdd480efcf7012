from __future__ import annotations

import pathlib

import pytest

from shardesd.errors import NotFound, OptionError
from shardesd.source import open_source
from shardesd.source.address import HubAddress, parse_hub


@pytest.mark.parametrize(
    ("text", "repo_id", "revision", "path"),
    [
        ("org/name", "org/name", None, ""),
        ("gpt2", "gpt2", None, ""),
        ("gpt2@v1", "gpt2", "v1", ""),
        ("org/name@main", "org/name", "main", ""),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1", ""),
        ("org/na.me_x-1@feature/x", "org/na.me_x-1", "feature/x", ""),
        ("hf://gpt2", "gpt2", None, ""),
        ("hf://org/name", "org/name", None, ""),
        ("hf://models/org/name/", "org/name", None, ""),
        ("hf://org/name@v1", "org/name", "v1", ""),
        ("hf://org/name/unet", "org/name", None, "unet"),
        ("hf://org/name@v1/a/b.safetensors", "org/name", "v1", "a/b.safetensors"),
        ("hf://org/name@refs/pr/1/unet", "org/name", "refs/pr/1", "unet"),
        ("hf://org/name@feature%2Fx/unet", "org/name", "feature/x", "unet"),
        ("hf://org/name/file@1.safetensors", "org/name", None, "file@1.safetensors"),
    ],
)
def test_places_on_the_hub(text: str, repo_id: str, revision: str | None, path: str) -> None:
    assert parse_hub(text) == HubAddress(repo_id=repo_id, revision=revision, path=path)


def test_a_revision_may_be_given_twice_if_it_is_the_same() -> None:
    assert parse_hub("org/name", "v1").revision == "v1"
    assert parse_hub("org/name@v1", "v1").revision == "v1"
    with pytest.raises(OptionError, match="names revision 'v1' and --revision names 'v2'"):
        parse_hub("org/name@v1", "v2")


@pytest.mark.parametrize("text", ["org/name@", "org/name@../x", "org/name@a b", "hf://org/name@/unet", "org/name@a\n"])
def test_revisions_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="revision"):
        parse_hub(text)


@pytest.mark.parametrize(
    "text",
    ["org name", "org/na--me", "org/", "@v1", "org/..", "name!", "hf://", "hf://datasets/org/name", "x" * 200, "é/x"],
)
def test_malformed_ids(text: str) -> None:
    with pytest.raises(NotFound):
        open_source(text)


@pytest.mark.parametrize(
    "text",
    [
        "./org/name",
        "../name",
        "/no/such",
        "~/no-such",
        "a/b/c",
        "a/b/c@v1",
        "C:\\models\\x",
        "C:x",
        "folder/",
        "model.safetensors",
        "folder/model.safetensors.index.json",
        "https://huggingface.co/org/name",
    ],
)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardesd.source.hub.open_hub", lambda address: pytest.fail(f"asked for {address}"))
    with pytest.raises(NotFound) as caught:
        open_source(text)
    assert f"no such file or folder: '{text}'" in str(caught.value)


def test_a_path_object_is_a_path() -> None:
    with pytest.raises(NotFound, match="no such file or folder: 'org/name'"):
        open_source(pathlib.PurePosixPath("org/name"))


def test_what_exists_wins_over_the_hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardesd.source.hub.open_hub", lambda address: address)
    assert open_source("org/name").model_id == "name"
    assert isinstance(open_source("hf://org/name"), HubAddress)
    assert isinstance(open_source("org/other"), HubAddress)


def test_an_empty_repo() -> None:
    with pytest.raises(OptionError, match="REPO is empty"):
        open_source("")
