from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardesd.checkpoint import Checkpoint, adapter_file, open_checkpoint
from shardesd.checkpoint.layout import natural
from shardesd.errors import (
    CheckpointError,
    MalformedHeader,
    MalformedIndex,
    NotFound,
    NoWeights,
    ShardChanged,
    SourceError,
)
from shardesd.source import open_source

INDEX = "model.safetensors.index.json"


def shards(checkpoint: Checkpoint) -> list[str]:
    return [shard.name for shard in checkpoint.shards]


def index(**weight_map: str) -> dict[str, Any]:
    return {"metadata": {"total_size": 48}, "weight_map": weight_map}


def test_one_file(source: Any) -> None:
    checkpoint = open_checkpoint(source({"model.safetensors": {"a": 1, "b": 2}, "config.json": {"x": 10**30}}))
    assert shards(checkpoint) == ["model.safetensors"]
    assert checkpoint.names == {"a", "b"}
    assert checkpoint.config == {"x": 10**30}
    assert checkpoint.notes == ()
    assert checkpoint.complete
    assert {tensor.name for tensor in checkpoint.tensors()} == {"a", "b"}


def test_an_index_wins_over_everything_else(source: Any) -> None:
    checkpoint = open_checkpoint(
        source(
            {
                INDEX: index(a="m-2.safetensors", b="m-10.safetensors"),
                "m-2.safetensors": {"a": 1},
                "m-10.safetensors": {"b": 1},
                "model.safetensors": {"a": 1, "b": 1},
                "consolidated.safetensors": {"a": 1},
                "adapter_model.safetensors": {"l": 1},
                "unet/x.safetensors": {"u": 1},
            }
        )
    )
    assert shards(checkpoint) == ["m-2.safetensors", "m-10.safetensors"]
    assert checkpoint.names == {"a", "b"}
    assert checkpoint.notes == (
        "ignored adapter_model.safetensors: an adapter, not a model's weights",
        "ignored unet/x.safetensors: in a subfolder",
        f"ignored consolidated.safetensors, model.safetensors: {INDEX} names the shards",
    )


def test_the_index_places_what_two_shards_hold_and_lets_in_what_it_does_not_list(source: Any) -> None:
    files = {INDEX: index(a="x.safetensors", b="y.safetensors"), "x.safetensors": {"a": 1, "b": 9, "extra": 3}}
    src = source({**files, "y.safetensors": {"b": 2}})
    checkpoint = open_checkpoint(src)
    assert checkpoint.names == {"a", "b", "extra"}
    held = {}
    for shard in checkpoint.shards:
        with checkpoint.open(shard, src.path(shard.name)) as opened:
            for tensor in opened.tensors:
                assert tensor.name not in held
                with opened.read(tensor) as raw:
                    held[tensor.name] = float(raw[0, 0])
    assert held == {"a": 1, "b": 2, "extra": 3}
    assert checkpoint.notes == (f"ignored 1 tensors of x.safetensors that {INDEX} places elsewhere",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "it is not JSON"),
        (b"[]", "no weight_map"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": ["a"]}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "tensor 'a': its shard is not a string"),
        (b'{"weight_map": {"a": "model.safetensors", "a": "b.safetensors"}}', "key 'a' is there twice"),
        (b'{"weight_map": ' + b"[" * 200_000, "nested too deeply"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "tensor 'a': shard 'gone.safetensors' isn't there"),
        (b'{"weight_map": {"a": "pytorch_model.bin"}}', "tensor 'a': shard 'pytorch_model.bin' is not a safetensors"),
    ],
)
def test_malformed_index(source: Any, content: bytes, message: str) -> None:
    with pytest.raises(MalformedIndex) as caught:
        open_checkpoint(source({INDEX: content, "model.safetensors": {"a": 1}, "pytorch_model.bin": b""}))
    assert message in str(caught.value)
    assert INDEX in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "a\\x.safetensors", "C:x.safetensors", ""],
)
def test_a_shard_that_leads_outside(source: Any, name: str) -> None:
    with pytest.raises(MalformedIndex, match="leads outside"):
        open_checkpoint(source({INDEX: index(a=name), "x.safetensors": {"a": 1}}))


def test_a_shard_that_is_a_link_to_outside(tmp_path: Path, source: Any) -> None:
    source({"outside/x.safetensors": {"a": 1}, f"inside/{INDEX}": index(a="x.safetensors")})
    (tmp_path / "inside" / "x.safetensors").symlink_to(tmp_path / "outside" / "x.safetensors")
    with pytest.raises(SourceError, match="leads outside"):
        open_checkpoint(open_source(tmp_path / "inside"))


def test_a_tensor_that_the_shard_lacks(source: Any) -> None:
    weight_map = index(a="x.safetensors", b="x.safetensors", c="x.safetensors")
    with pytest.raises(MalformedIndex) as caught:
        open_checkpoint(source({INDEX: weight_map, "x.safetensors": {"a": 1}}))
    assert str(caught.value) == f"{INDEX} places tensor 'b' and 1 more in x.safetensors, which doesn't hold it"


def test_several_indices(source: Any) -> None:
    files = {
        "text.safetensors.index.json": index(a="x.safetensors"),
        "vision.safetensors.index.json": index(b="y.safetensors"),
        "x.safetensors": {"a": 1},
        "y.safetensors": {"b": 1},
    }
    with pytest.raises(MalformedIndex, match=r"text\.safetensors\.index\.json, vision\.safetensors\.index\.json"):
        open_checkpoint(source(files))
    usual = {"diffusion_pytorch_model.safetensors.index.json": index(b="y.safetensors")}
    assert shards(open_checkpoint(source(usual))) == ["y.safetensors"]


def test_a_numbered_set_without_an_index(source: Any) -> None:
    names = [f"model-{i:05}-of-00012.safetensors" for i in range(1, 13)]
    files = {name: {f"t{i}": i} for i, name in enumerate(names)}
    checkpoint = open_checkpoint(source({**files, "other.safetensors": {"o": 1}}))
    assert shards(checkpoint) == names
    assert checkpoint.names == {f"t{i}" for i in range(12)}
    assert checkpoint.notes == (
        "ignored other.safetensors: model-00001-of-00012.safetensors and the others of its set are the model",
    )


def test_a_numbered_set_with_gaps(source: Any) -> None:
    names = [f"model-{i:05}-of-00004.safetensors" for i in (1, 3)]
    with pytest.raises(MalformedIndex, match="lacks 2 of 4 files: number 2, 4"):
        open_checkpoint(source({name: {name: 1} for name in names}))


def test_several_numbered_sets(source: Any) -> None:
    src = source({f"{stem}-1-of-1.safetensors": {"a": 1} for stem in ("ema", "raw")})
    with pytest.raises(MalformedIndex, match=r"ema-1-of-1\.safetensors, raw-1-of-1\.safetensors"):
        open_checkpoint(src)
    assert shards(open_checkpoint(source({"model-1-of-1.safetensors": {"a": 1}}))) == ["model-1-of-1.safetensors"]


def test_any_other_files_in_natural_order(source: Any) -> None:
    checkpoint = open_checkpoint(source({f"part{i}.safetensors": {f"t{i}": 1} for i in (10, 9, 1)}))
    assert shards(checkpoint) == ["part1.safetensors", "part9.safetensors", "part10.safetensors"]


def test_one_name_in_two_files(source: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in both x\.safetensors and y\.safetensors"):
        open_checkpoint(source({"x.safetensors": {"a": 1}, "y.safetensors": {"a": 1}}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no safetensors: it is empty"),
        ({"README.md": b""}, "holds no safetensors, only README.md"),
        ({"pytorch_model.h5": b"", "x.onnx": b"", "a.txt": b""}, "only pytorch_model.h5, x.onnx: convert"),
        (
            {"pytorch_model.bin": b"", "a.txt": b""},
            "only pytorch_model.bin: a pickled file is read with --allow-pickle",
        ),
        ({"training_args.bin": b""}, "only training_args.bin: convert"),
        ({"unet/d.safetensors": b"", "vae/d.safetensors": b"", "model.onnx": b""}, "name one: {0}/unet, {0}/vae"),
        ({"adapter_model.safetensors": b"", "adapter_config.json": b"{}"}, "holds an adapter and no base model"),
    ],
)
def test_no_weights_says_what_is_there(source: Any, files: dict[str, bytes], message: str) -> None:
    src = source(files)
    with pytest.raises(NoWeights) as caught:
        open_checkpoint(src)
    assert message.format(src.location) in str(caught.value)


def test_a_file_that_was_named_is_the_checkpoint(tmp_path: Path, source: Any) -> None:
    name = "adapter_model.safetensors"
    src = source({name: {"a": 1}, "model.safetensors": {"b": 1}})
    assert adapter_file(src.files()).name == name  # type: ignore[union-attr]
    assert open_checkpoint(open_source(tmp_path / name)).names == {"a"}
    part = "model-00002-of-00002.safetensors"
    source({part: {"c": 1}})
    assert open_checkpoint(open_source(tmp_path / part)).names == {"c"}


@pytest.mark.parametrize("config", [b"{", b"[1]", b"\xff", b"[" * 200_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_a_malformed_config_is_a_note(source: Any, config: bytes) -> None:
    checkpoint = open_checkpoint(source({"model.safetensors": {"a": 1}, "config.json": config}))
    assert checkpoint.config == {}
    assert len(checkpoint.notes) == 1
    assert "config.json" in checkpoint.notes[0]
    assert len(checkpoint.notes[0]) < 400


def test_all_local_headers_are_checked_at_once(source: Any) -> None:
    with pytest.raises(MalformedHeader, match=r"m-2\.safetensors"):
        open_checkpoint(source({"m-1.safetensors": {"a": 1}, "m-2.safetensors": b""}))


def test_shards_that_are_not_here_yet(tmp_path: Path, source: Any) -> None:
    src = source({"m-1.safetensors": {"a": 1}, "m-2.safetensors": {"a": 1, "b": 1}}, remote=("m-2.safetensors",))
    checkpoint = open_checkpoint(src)
    assert checkpoint.names is None
    assert not checkpoint.complete
    assert checkpoint.digests()["m-2.safetensors"]["header_sha256"] is None
    with pytest.raises(CheckpointError, match="tensor 'a' is in both"):
        checkpoint.open(checkpoint.shards[1], tmp_path / "m-2.safetensors")
    source({INDEX: index(a="m-1.safetensors", b="m-2.safetensors")})
    checkpoint = open_checkpoint(src)
    assert checkpoint.names == {"a", "b"}
    with checkpoint.open(checkpoint.shards[1], tmp_path / "m-2.safetensors") as shard:
        assert [tensor.name for tensor in shard.tensors] == ["b"]
    assert checkpoint.complete


def test_a_source_that_can_not_name_all_files_is_believed_about_those_it_has(source: Any) -> None:
    src = source({INDEX: index(a="m-1.safetensors", b="m-2.safetensors"), "m-1.safetensors": {"a": 1}}, remote=("x",))
    src.partial = True
    checkpoint = open_checkpoint(src)
    assert shards(checkpoint) == ["m-1.safetensors", "m-2.safetensors"]
    assert checkpoint.names == {"a", "b"}


def test_a_shard_that_was_replaced_since_its_header_was_read(tmp_path: Path, source: Any) -> None:
    src = source({"model.safetensors": {"a": 1}})
    checkpoint = open_checkpoint(src)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotFound):
        checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors")
    source({"model.safetensors": {"a": 1, "b": 2}})
    with pytest.raises(ShardChanged):
        checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors")


def test_identity_tells_weights_apart(tmp_path: Path, source: Any) -> None:
    src = source({"model.safetensors": {"a": 1}})
    before = open_checkpoint(src).identity()
    assert json.loads(json.dumps(before)) == before == open_checkpoint(src, io="pread").identity()
    of_commit = open_checkpoint(source({}, commit="c" * 40)).identity()
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    assert open_checkpoint(src).identity() != before
    assert open_checkpoint(source({}, commit="c" * 40)).identity() == of_commit
    assert open_checkpoint(source({}, commit="d" * 40)).identity() != of_commit


def test_natural_order() -> None:
    assert natural(["a10", "a9", "b", "a", "1", "a09"]) == ["1", "a", "a09", "a9", "a10", "b"]
