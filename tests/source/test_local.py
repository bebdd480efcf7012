from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardesd.errors import NotFound, OptionError, SourceError
from shardesd.source import open_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "ab" * 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    (folder / "unet").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, data in {
        "model.safetensors": b"12345",
        "config.json": b"{}",
        "lora.safetensors": b"lora",
        "unet/model.safetensors": b"unet",
        ".git/big.safetensors": b"hidden",
    }.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot in a Hub cache: links into the repo's blobs, one of which is a link into the cache's shared store."""
    cache = tmp_path / "hub"
    repo = cache / "models--org--name"
    folder = repo / "snapshots" / COMMIT
    for place in (repo / "blobs", cache / "blobs" / "cd", folder / "unet"):
        place.mkdir(parents=True)
    (repo / "blobs" / DIGEST).write_bytes(b"own")
    (cache / "blobs" / "cd" / ("cd" * 32)).write_bytes(b"shared")
    (repo / "blobs" / ("ef" * 32)).symlink_to(f"../../blobs/cd/{'cd' * 32}")
    (folder / "model.safetensors").symlink_to(f"../../blobs/{DIGEST}")
    (folder / "unet" / "model.safetensors").symlink_to(f"../../../blobs/{'ef' * 32}")
    return folder


def names(source: object) -> list[str]:
    return [ref.name for ref in source.files()]  # type: ignore[attr-defined]


def test_a_folder(model: Path) -> None:
    source = open_source(model)
    assert names(source) == ["config.json", "lora.safetensors", "model.safetensors", "unet/model.safetensors"]
    assert [ref.size for ref in source.files()] == [2, 4, 5, 4]
    assert (source.model_id, source.location) == ("my-model", str(model.resolve()))
    assert (source.revision, source.commit, source.file, source.partial) == (None, None, None, False)
    assert source.path("unet/model.safetensors").read_bytes() == b"unet"
    assert source.local("model.safetensors") == source.path("model.safetensors")
    assert source.local("nothing") is None
    with pytest.raises(NotFound, match="no file 'nothing' in"):
        source.path("nothing")


@pytest.mark.parametrize("written", [".", "./", "../my-model", "~/my-model"])
def test_a_folder_is_named_by_what_it_is(model: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.chdir(model)
    monkeypatch.setenv("HOME", str(model.parent))
    monkeypatch.setenv("USERPROFILE", str(model.parent))
    assert open_source(written).model_id == "my-model"


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("lora.safetensors", "lora"),
        ("v1.5-pruned.safetensors", "v1.5-pruned"),
        ("model.safetensors", "my-model"),
        ("model.fp16.safetensors", "my-model"),
        ("pytorch_model.safetensors", "my-model"),
        ("diffusion_pytorch_model.safetensors", "my-model"),
        ("adapter_model.safetensors", "my-model"),
        ("consolidated.00.safetensors", "my-model"),
        ("model-00001-of-00003.safetensors", "my-model"),
        ("lora-00001-of-00003.safetensors", "my-model"),
        ("model_v2.safetensors", "model_v2"),
    ],
)
def test_a_file(model: Path, name: str, model_id: str) -> None:
    (model / name).write_bytes(b"1")
    source = open_source(model / name)
    assert (source.model_id, source.file) == (model_id, name)
    assert names(source) == sorted(["config.json", name])
    assert source.location == str(model.resolve() / name)
    (model / "config.json").unlink()
    assert names(open_source(str(model / name))) == [name]


def test_an_index_stands_for_its_folder(model: Path) -> None:
    for name in ("model.safetensors.index.json", "big.safetensors.index.json"):
        (model / name).write_bytes(b"{}")
    source = open_source(model / "big.safetensors.index.json")
    assert source.model_id == "big"
    assert "model.safetensors.index.json" not in names(source)
    assert {"big.safetensors.index.json", "lora.safetensors", "config.json"} <= set(names(source))
    assert open_source(model / "model.safetensors.index.json").model_id == "my-model"
    with pytest.raises(NotFound, match="is no index"):
        open_source(model / "config.json")


def test_a_snapshot_in_a_hub_cache(snapshot: Path) -> None:
    source = open_source(snapshot)
    assert (source.model_id, source.commit, source.revision) == ("org/name", COMMIT, None)
    assert [(ref.name, ref.size, ref.sha256) for ref in source.files()] == [
        ("model.safetensors", 3, DIGEST),
        ("unet/model.safetensors", 6, "ef" * 32),
    ]
    assert source.path("model.safetensors").read_bytes() == b"own"
    assert source.path("unet/model.safetensors").read_bytes() == b"shared"
    assert open_source(snapshot / "unet").model_id == "org/name/unet"
    assert open_source(snapshot / "unet").path("model.safetensors").read_bytes() == b"shared"
    one = open_source(snapshot / "model.safetensors")
    assert (one.model_id, one.commit) == ("org/name", COMMIT)
    assert one.path("model.safetensors").read_bytes() == b"own"


@pytest.mark.parametrize(
    "name", ["../my-model/model.safetensors", "a/../../x", "..", "/etc/hosts", "C:\\x", "a\\b", ""]
)
def test_names_that_lead_outside(model: Path, name: str) -> None:
    source = open_source(model)
    with pytest.raises(SourceError, match="leads outside"):
        source.path(name)
    assert source.local(name) is None


def test_links_that_lead_outside(model: Path, tmp_path: Path, snapshot: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"secret")
    for folder in (model, snapshot):
        (folder / "link.safetensors").symlink_to(secret)
        (folder / "sub").symlink_to(tmp_path)
        source = open_source(folder)
        assert "link.safetensors" in names(source)
        assert "sub/secret.safetensors" not in names(source)
        for name in ("link.safetensors", "sub/secret.safetensors"):
            assert source.local(name) is None
            with pytest.raises(SourceError) as caught:
                source.path(name)
            assert f"leads outside the folder, to '{secret.resolve()}'" in str(caught.value)
    named = open_source(model / "link.safetensors")
    assert named.path("link.safetensors").read_bytes() == b"secret"
    (model / "inside.safetensors").symlink_to("model.safetensors")
    assert open_source(model).path("inside.safetensors").read_bytes() == b"12345"


def test_links_to_nothing(model: Path) -> None:
    (model / "gone.safetensors").symlink_to("evicted")
    (model / "loop.safetensors").symlink_to("loop.safetensors")
    source = open_source(model)
    assert [ref.size for ref in source.files() if ref.name == "gone.safetensors"] == [None]
    for name in ("gone.safetensors", "loop.safetensors"):
        with pytest.raises(NotFound, match="a link to"):
            source.path(name)
        with pytest.raises(NotFound, match="neither a file nor a folder"):
            open_source(model / name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everywhere")
def test_a_folder_that_cannot_be_read(model: Path) -> None:
    model.chmod(0o300)
    try:
        with pytest.raises(SourceError, match="can't be read"):
            open_source(model).files()
    finally:
        model.chmod(0o700)


def test_a_revision_of_a_local_folder_is_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="revision 'main' can't be used with the local path"):
        open_source(model, revision="main")
