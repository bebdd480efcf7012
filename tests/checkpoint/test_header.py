from __future__ import annotations

import hashlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shardesd.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES, Header, read_header
from shardesd.errors import MalformedHeader


def read(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file, path.name)


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {
        "b": np.arange(6, dtype=np.float64).reshape(2, 3),
        "a": np.arange(5, dtype=np.int8),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(7, np.int32),
    }
    save_file(arrays, path, metadata={"format": "np", "ü": "λ"})
    header = read(path)
    data = path.read_bytes()
    assert header.metadata == {"format": "np", "ü": "λ"}
    assert header.size == len(data)
    assert {tensor.name for tensor in header.tensors} == set(arrays)
    for tensor in header.tensors:
        array = arrays[tensor.name]
        assert tensor.shape == array.shape
        assert tensor.shard == "x.safetensors"
        assert data[tensor.start : tensor.end] == array.tobytes()
    assert [tensor.start for tensor in header.tensors] == sorted(tensor.start for tensor in header.tensors)
    data_start = 8 + struct.unpack("<Q", data[:8])[0]
    assert header.sha256 == hashlib.sha256(data[:data_start]).hexdigest()


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_every_dtype_of_the_library_is_known(tmp_path: Path, shard_bytes: Any, dtype: str, bits: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_bytes({"t": entry([2, 4], [0, bits], dtype)}, bits))
    assert read(path).tensors[0].nbytes == bits
    with safe_open(path, "np") as file:
        assert file.get_slice("t").get_dtype() == dtype


REFUSED = {
    "unknown dtype": ({"t": entry(dtype="F12")}, 8, "tensor 't': dtype \"F12\" is not one of BOOL"),
    "dtype no string": ({"t": entry(dtype=["F32"])}, 8, "tensor 't': dtype"),
    "negative dimension": ({"t": entry([-2])}, 8, "tensor 't': shape [-2] is not a list"),
    "bool dimension": ({"t": entry([True], [0, 4])}, 4, "tensor 't': shape [true]"),
    "float dimension": ({"t": entry([2.0])}, 8, "tensor 't': shape [2.0]"),
    "minus zero": (b'{"t":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', 0, "tensor 't': shape [-0.0]"),
    "shape no list": ({"t": entry(2)}, 8, "tensor 't': shape 2 is"),
    "huge shape": ({"t": entry([2**63, 4, 0], [0, 0])}, 0, "too large"),
    "beyond u64": ({"t": entry([2**64, 0], [0, 0])}, 0, "tensor 't': shape"),
    "sub-byte": ({"t": entry([1], [0, 1], "F4")}, 1, "tensor 't': 1 bytes are not what F4 of shape [1] takes (0.5)"),
    "offsets reversed": ({"t": entry([0], [8, 0])}, 8, "tensor 't': data_offsets [8, 0]"),
    "offsets of three": ({"t": entry(offsets=[0, 4, 8])}, 8, "tensor 't': data_offsets"),
    "offsets negative": ({"t": entry(offsets=[-8, 0])}, 8, "tensor 't': data_offsets"),
    "wrong size": ({"t": entry([3])}, 8, "tensor 't': 8 bytes are not what F32 of shape [3] takes (12)"),
    "no shape": ({"t": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "tensor 't': its entry"),
    "more keys": ({"t": {**entry(), "strides": [1]}}, 8, "tensor 't': its entry"),
    "entry no object": ({"t": [1]}, 0, "tensor 't': its entry"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "tensor 'b': its bytes overlap"),
    "same bytes": ({"a": entry(), "b": entry()}, 8, "tensor 'b': its bytes overlap"),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "tensor 'b': 4 bytes before it"),
    "hole at the start": ({"a": entry(offsets=[8, 16])}, 16, "tensor 'a': 8 bytes before it"),
    "left over": ({"a": entry()}, 9, "1 bytes are left over"),
    "metadata no object": ({"__metadata__": []}, 0, "__metadata__"),
    "metadata number": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    "no object": (b"[]", 0, "not a JSON object"),
    "nothing": (b"", 0, "not a JSON object"),
    "leading space": (b" {}", 0, "not a JSON object"),
    "no JSON": (b'{"a":', 0, "not JSON"),
    "NaN": (b'{"a":NaN}', 0, "NaN is not JSON"),
    "no UTF-8": (b'{"\xff":1}', 0, "byte 2 is not UTF-8"),
    "lone surrogate": (rb'{"\ud800":1}', 0, "surrogate"),
    "twice": (b'{"a":1,"b":2,"a":3}', 0, "key 'a' is there twice"),
    "deeply nested": (b'{"a":' + b"[" * 200_000, 0, "nested too deeply"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(tmp_path: Path, shard_bytes: Any, case: str) -> None:
    header, nbytes, message = REFUSED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(shard_bytes(header, nbytes))
    with pytest.raises(MalformedHeader) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (struct.pack("<Q", 3) + b"{}", "lead beyond the file's 10"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "at most 100000000"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"<!doctype html><html>", "not a safetensors file"),
    ],
)
def test_refuses_what_is_no_safetensors_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(MalformedHeader) as caught:
        read(path)
    assert message in str(caught.value)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"w": np.zeros((10, 10), np.float32)}, path)
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 17)
    with pytest.raises(MalformedHeader) as caught:
        read(path)
    assert f"promises {whole} bytes (up to tensor 'w'), {whole - 17} are there: download it again" in str(caught.value)


def test_a_hundred_thousand_tensors_are_quick(tmp_path: Path, shard_bytes: Any) -> None:
    path = tmp_path / "many.safetensors"
    tensors = {f"model.layers.{i}.weight": entry([2, 2], [16 * i, 16 * i + 16]) for i in range(100_000)}
    path.write_bytes(shard_bytes(tensors, 16 * 100_000))
    began = time.process_time()
    assert len(read(path).tensors) == 100_000
    assert time.process_time() - began < 5


# What we accept, the library accepts, with the same meaning; so what it refuses, we refuse.

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 20), st.just(2**64), st.floats(0, 9), st.sampled_from(["F32", "U8", "x"])
)
SHAPES = st.lists(st.one_of(st.integers(0, 4), VALUES), max_size=3)
ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*DTYPE_BITS, "F12", 3]),
            "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), SHAPES, VALUES),
            "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
        },
        optional={"extra": VALUES},
    ),
    VALUES,
)


@st.composite
def nearly_good(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header whose tensors follow each other, with some of it changed."""
    at, header = 0, {}
    for name in draw(st.lists(st.text(max_size=3), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = int(np.prod(shape)) * DTYPE_BITS[dtype] // 8
        header[name] = entry(shape, [at, at + size], dtype)
        at += size
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.one_of(st.none(), st.dictionaries(st.text(max_size=2), st.text(max_size=2))))
    items = draw(st.permutations(list(header.items())))
    raw = json.dumps(dict(items), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    raw += b" " * draw(st.integers(0, 8))
    if draw(st.integers(0, 3)) == 0 and raw:
        where = draw(st.integers(0, len(raw) - 1))
        raw = raw[:where] + draw(st.binary(max_size=2)) + raw[where + 1 :]
    return raw, at + draw(st.sampled_from([0, 0, 0, -1, 1]))


@st.composite
def anything(draw: st.DrawFn) -> tuple[bytes, int]:
    header = draw(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES, max_size=3))
    return json.dumps(header).encode(), draw(st.integers(0, 40))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.one_of(nearly_good(), anything()))
def test_accepts_only_what_the_library_accepts(tmp_path: Path, shard_bytes: Any, case: tuple[bytes, int]) -> None:
    raw, nbytes = case
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_bytes(raw, max(nbytes, 0)))
    try:
        header = read(path)
    except MalformedHeader:
        header = None
    try:
        with safe_open(path, "np") as file:
            theirs = {
                name: (s.get_dtype(), tuple(s.get_shape()))
                for name in file.offset_keys()
                for s in [file.get_slice(name)]
            }
    except SafetensorError:
        assert header is None
        return
    if header is not None:
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == theirs


def test_refuses_nothing_that_the_library_writes(tmp_path: Path) -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        shapes=st.dictionaries(st.text(min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=3), max_size=5),
        metadata=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    )
    def check(shapes: dict[str, list[int]], metadata: dict[str, str]) -> None:
        path = tmp_path / "x.safetensors"
        shapes.pop("__metadata__", None)
        save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, path, metadata or None)
        header = read(path)
        assert {tensor.name: list(tensor.shape) for tensor in header.tensors} == shapes
        assert header.metadata == metadata

    check()


def test_a_header_is_parsed_again_only_if_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(5, dtype=np.int8)}, path)
    before = read(path)
    with path.open("rb") as file:
        assert read_header(file, path.name, before) is before
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a"', b'"b"'))
    with path.open("rb") as file:
        (tensor,) = read_header(file, path.name, before).tensors
    assert tensor.name == "b"
    path.write_bytes(data[:-1])
    with path.open("rb") as file, pytest.raises(MalformedHeader):
        read_header(file, path.name, before)
