"""compressed-tensors, bitsandbytes and torchao: tensors that the library made, against its own dequantisation."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_files import decoded, labels, opened, problems, random, same, store

import shardesd

BASE = "model.layers.0.mlp.up_proj"
NAME = f"{BASE}.weight"

# --- compressed-tensors


def compressed(
    folder: Path, format: str, args: dict[str, Any], shape: tuple[int, int], **more: torch.Tensor
) -> torch.Tensor:
    """Stores a module as compressed-tensors compresses it; gives what it decompresses."""
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(format)
    state = {"weight": random(*shape, dtype=more["weight_scale"].dtype), **more}
    stored = compressor.compress(state, scheme)
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "version": library.__version__,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(scheme.weights.model_dump_json())}},
    }
    store(folder, {f"{BASE}.{name}": value.data for name, value in stored.items()}, quantization=config)
    return compressor.decompress(dict(stored), scheme)["weight"]


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (random(*shape, seed=3).abs() / 8 + 0.02).to(dtype)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pack_quantized_in_groups(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    args = {"num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": True}
    theirs = compressed(tmp_path, "pack-quantized", args, (40, 96), weight_scale=scales(40, 3, dtype=dtype))
    assert same(decoded(tmp_path)[NAME], theirs)
    assert labels(tmp_path) == {NAME: f"int{bits}[g32]"}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pack_quantized_with_zero_points(tmp_path: Path, bits: int) -> None:
    zero = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (40, 3), dtype=torch.int8)
    args = {"num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": False}
    theirs = compressed(tmp_path, "pack-quantized", args, (40, 96), weight_scale=scales(40, 3), weight_zero_point=zero)
    assert same(decoded(tmp_path)[NAME], theirs)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("strategy", "shape"), [("tensor", [1]), ("channel", [0, 1]), ("group", [0, 3])], ids=str)
def test_pack_quantized_with_zero_points_of_any_strategy(
    tmp_path: Path, rows: int, strategy: str, shape: list[int]
) -> None:
    """That of a tensor isn't packed, that of one row is."""
    shape = [size or rows for size in shape]
    zero = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    args = {"num_bits": 8, "strategy": strategy, "symmetric": False} | (
        {"group_size": 32} if strategy == "group" else {}
    )
    theirs = compressed(
        tmp_path, "pack-quantized", args, (rows, 96), weight_scale=scales(*shape), weight_zero_point=zero
    )
    assert same(decoded(tmp_path)[NAME], theirs)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{BASE}.weight_zero_point"] = zero.long()
    store(tmp_path, tensors, **json.loads((tmp_path / "config.json").read_text()))
    assert same(decoded(tmp_path)[NAME], theirs)


@pytest.mark.parametrize("columns", [96, 97, 130])
def test_pack_quantized_by_channel(tmp_path: Path, columns: int) -> None:
    args = {"num_bits": 4, "strategy": "channel", "symmetric": True}
    theirs = compressed(tmp_path, "pack-quantized", args, (40, columns), weight_scale=scales(40, 1))
    assert same(decoded(tmp_path)[NAME], theirs)
    assert labels(tmp_path) == {NAME: "int4[channel]"}


@pytest.mark.parametrize(("bits", "columns"), [(3, 320), (3, 97), (5, 90), (6, 33), (7, 28)])
def test_pack_quantized_of_older_versions_lets_no_code_cross_a_word(tmp_path: Path, bits: int, columns: int) -> None:
    """Narrow weights take as many words either way: what no code fits into tells."""
    per, half = 32 // bits, 2 ** (bits - 1)
    q = torch.randint(-half, half, (6, columns), generator=torch.Generator().manual_seed(2))
    words = torch.zeros(6, -(-columns // per), dtype=torch.int64)
    for i in range(columns):
        words[:, i // per] |= (q[:, i] + half) << (bits * (i % per))
    scale = scales(6, 1)
    tensors = {
        f"{BASE}.weight_packed": words.to(torch.int32),
        f"{BASE}.weight_scale": scale,
        f"{BASE}.weight_shape": torch.tensor([6, columns]),
    }
    weights = {"num_bits": bits, "type": "int"}
    store(tmp_path / "old", tensors, quantization={"config_groups": {"group_0": {"weights": weights}}})
    assert same(decoded(tmp_path / "old")[NAME], q.to(scale.dtype) * scale)
    assert labels(tmp_path / "old") == {NAME: f"int{bits}[channel]"}
    args = {"num_bits": bits, "strategy": "channel", "symmetric": True}
    theirs = compressed(tmp_path / "new", "pack-quantized", args, (6, columns), weight_scale=scale)
    assert same(decoded(tmp_path / "new")[NAME], theirs)


def test_pack_quantized_in_an_order_of_its_own(tmp_path: Path) -> None:
    """weight_g_idx, of versions that stored it: the group of each input."""
    args = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    compressed(tmp_path / "plain", "pack-quantized", args, (40, 96), weight_scale=scales(40, 3))
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    one = dict(tensors)
    one[f"{BASE}.weight_scale"] = torch.ones(40, 1, dtype=torch.bfloat16)
    q = decoded(store(tmp_path / "one", one))[NAME]
    g_idx = torch.randperm(96) // 32
    ordered = store(tmp_path / "ordered", tensors | {f"{BASE}.weight_g_idx": g_idx.to(torch.int32)})
    assert same(decoded(ordered)[NAME], torch.from_numpy(q) * tensors[f"{BASE}.weight_scale"].float()[:, g_idx])


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_int_and_float_quantized(tmp_path: Path, strategy: str, kind: str) -> None:
    shape = {"tensor": (1,), "channel": (200, 1), "group": (200, 4), "block": (2, 2)}[strategy]
    more = {"group_size": 64} if strategy == "group" else {"block_structure": [128, 128]} if strategy == "block" else {}
    args = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}
    theirs = compressed(tmp_path, f"{kind}-quantized", args, (200, 256), weight_scale=scales(*shape))
    assert same(decoded(tmp_path)[NAME], theirs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_int_quantized_with_zero_points(tmp_path: Path, dtype: torch.dtype) -> None:
    zero = torch.randint(-128, 128, (40, 1), dtype=torch.int8)
    args = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    more = {"weight_scale": scales(40, 1), "weight_zero_point": zero.to(dtype)}
    theirs = compressed(tmp_path, "int-quantized", args, (40, 96), **more)
    assert same(decoded(tmp_path)[NAME], theirs)
    assert labels(tmp_path) == {NAME: "int8[channel]"}


def test_nvfp4_packed(tmp_path: Path) -> None:
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    scale = (random(40, 4, seed=1).abs() * 20 + 1).to(torch.float8_e4m3fn).float()
    theirs = compressed(
        tmp_path, "nvfp4-pack-quantized", args, (40, 64), weight_scale=scale, weight_global_scale=torch.tensor([77.7])
    )
    assert same(decoded(tmp_path)[NAME], theirs)
    assert labels(tmp_path) == {NAME: "nvfp4[g16]"}


@pytest.mark.parametrize(
    ("format", "bits", "label"), [("mxfp4-pack-quantized", 4, "mxfp4"), ("mxfp8-quantized", 8, "fp8_e4m3")]
)
def test_mx_formats(tmp_path: Path, format: str, bits: int, label: str) -> None:
    args = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    scale = torch.exp2(torch.randint(-6, 3, (40, 2)).float()).bfloat16()
    theirs = compressed(tmp_path, format, args, (40, 64), weight_scale=scale)
    assert same(decoded(tmp_path)[NAME], theirs)
    assert labels(tmp_path) == {NAME: f"{label}[g32]"}


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-matrix"])
def test_transforms_are_parts_and_only_rotations_leave_a_number(tmp_path: Path, kind: str) -> None:
    """As the library applies and saves them, of weights that aren't quantised besides."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = torch.nn.Linear(64, 32, bias=False)
            self.down_proj.weight.data = random(32, 64)

    model = Model()
    before = model.down_proj.weight.detach().double().numpy()
    places = [("input", False), ("weight_input", True)]
    args = [TransformArgs(targets=["Linear"], location=where, inverse=inverse) for where, inverse in places]
    config = TransformConfig(config_groups={"R4": TransformScheme(type=kind, apply=args)})
    apply_transform_config(model, config)
    stored = {name: value.detach().clone() for name, value in model.state_dict().items()}
    assert "down_proj.R4_input.weight" in stored
    quantization = {"quant_method": "compressed-tensors", "transform_config": json.loads(config.model_dump_json())}
    result = shardesd.scan(store(tmp_path, stored, quantization=quantization), cache=False)
    assert result.layers["longname"].to_list() == ["down_proj"]
    if kind == "random-matrix":
        assert result.layers["status"].to_list() == ["failed"]
        assert "transform R4 (random-matrix), which is no rotation" in result.layers["reason"][0]
    else:
        expected = np.linalg.svd(before, compute_uv=False)[::-1] ** 2
        np.testing.assert_allclose(result.spectra["down_proj"], expected, rtol=1e-5)


# --- bitsandbytes


def bnb_4bit(folder: Path, W: torch.Tensor, kind: str, block: int, nested: bool, storage: torch.dtype) -> torch.Tensor:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        W, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    parts = {f"{NAME}.{name}": value for name, value in state.as_dict(packed=True).items()}
    store(folder, {NAME: codes, **parts}, quantization={"quant_method": "bitsandbytes", "load_in_4bit": True})
    # In float32: its CPU kernel for float16 rounds to bfloat16 on the way. That kernel is right only where blocks
    # divide rows; rows of odd length take another way.
    state.dtype = torch.float32 if state.dtype == torch.float16 else state.dtype
    return functional.dequantize_4bit(codes, state)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "dtype", "storage"),
    [
        ((96, 64), 64, torch.bfloat16, torch.uint8),
        ((96, 128), 128, torch.float16, torch.bfloat16),
        ((640, 192), 64, torch.float32, torch.float32),
        ((33, 99), 256, torch.bfloat16, torch.uint8),
    ],
)
def test_bitsandbytes_4bit(
    tmp_path: Path,
    kind: str,
    nested: bool,
    shape: tuple[int, int],
    block: int,
    dtype: torch.dtype,
    storage: torch.dtype,
) -> None:
    theirs = bnb_4bit(tmp_path, random(*shape, dtype=dtype), kind, block, nested, storage)
    assert same(decoded(tmp_path)[NAME], theirs)
    assert labels(tmp_path) == {NAME: f"{kind}[{block}]"}


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4bit_stacks_of_experts(tmp_path: Path, nested: bool) -> None:
    """Parameters that it keeps as parametrisations, under names without weight."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    for name in ("gate_up_proj", "w1"):
        model.experts.register_parameter(name, torch.nn.Parameter(random(4, 64, 128)))
        replace_parameter_4bit(model.experts, name, compress_statistics=nested, quant_type="nf4")
    store(tmp_path, model.state_dict(), quantization={"quant_method": "bitsandbytes", "load_in_4bit": True})
    found = decoded(tmp_path)
    assert set(found) == {"experts.gate_up_proj", "experts.w1"}
    for name, W in found.items():
        assert same(W, getattr(model.experts, name.removeprefix("experts.")))
    assert set(labels(tmp_path).values()) == {"nf4[64]"}


def test_a_part_of_a_4bit_weight(tmp_path: Path) -> None:
    from dataclasses import replace

    bnb_4bit(tmp_path, random(300, 98), "nf4", 64, True, torch.uint8)
    whole = decoded(tmp_path)[NAME]
    checkpoint = opened(tmp_path)
    (tensor,) = checkpoint.tensors()
    with checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors") as shard:
        for first, last in [(0, 1), (7, 8), (13, 200), (299, 300)]:
            part = replace(tensor, shape=(last - first, 98), start=first * 392, end=last * 392)
            with shard.read(part) as raw:
                np.testing.assert_array_equal(raw, whole[first:last])


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes, scb, _ = functional.int8_vectorwise_quant(random(96, 64).half())
    tensors = {NAME: codes, f"{BASE}.SCB": scb, f"{BASE}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    store(tmp_path / "a", tensors, quantization={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert same(decoded(tmp_path / "a")[NAME], functional.int8_vectorwise_dequant(codes, scb))
    assert labels(tmp_path / "a") == {NAME: "bnb_int8"}
    tensors[f"{BASE}.weight_format"] += 1
    store(tmp_path / "b", tensors)
    assert "order (1,)" in problems(tmp_path / "b")[NAME]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (b"{}", "malformed"),
        (b"[" * 5000, "malformed"),
        (b'{"quant_type":"nf4","blocksize":64,"shape":[1000000,1000000]}', "not what shape"),
        (b'{"quant_type":"nf4","blocksize":0,"shape":[96,64]}', "blocks of 0"),
        (b'{"quant_type":"af4","blocksize":64,"shape":[96,64]}', "'af4'"),
    ],
)
def test_a_malformed_state_is_refused(tmp_path: Path, state: bytes, why: str) -> None:
    tensors = {
        NAME: torch.zeros(96 * 32, 1, dtype=torch.uint8),
        f"{NAME}.absmax": torch.ones(96),
        f"{NAME}.quant_map": torch.ones(16),
        f"{NAME}.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }
    store(tmp_path, tensors)
    assert why in problems(tmp_path)[NAME]


# --- torchao


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_torchao_in_safetensors(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        from safetensors.torch import save_file
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        module = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16))
        quantize_(module, Int8WeightOnlyConfig(version=2) if kind == "int8" else Float8WeightOnlyConfig())
        tensors, metadata = flatten_tensor_state_dict(module.state_dict())
        theirs = module[0].weight.dequantize()
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    assert same(decoded(tmp_path)["0.weight"], theirs)
    assert labels(tmp_path) == {"0.weight": "int8[channel]" if kind == "int8" else "fp8_e4m3[channel]"}


@pytest.mark.parametrize("kind", ["int8", "int8 in groups", "float8", "int8 of the tensor"])
def test_torchaos_stacks_of_experts(tmp_path: Path, kind: str) -> None:
    """Parameters of any name; their scales are no weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        from safetensors.torch import save_file
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import (
            Float8WeightOnlyConfig,
            FqnToConfig,
            Int8WeightOnlyConfig,
            PerGroup,
            PerTensor,
            quantize_,
        )

        config = {
            "int8": Int8WeightOnlyConfig(version=2),
            "int8 in groups": Int8WeightOnlyConfig(version=2, granularity=PerGroup(8)),
            "float8": Float8WeightOnlyConfig(),
            "int8 of the tensor": Int8WeightOnlyConfig(version=2, granularity=PerTensor()),
        }[kind]
        model = torch.nn.Module()
        model.experts = torch.nn.Module()
        model.experts.gate_up_proj = torch.nn.Parameter(random(3, 64, 96, dtype=torch.bfloat16))
        quantize_(model, FqnToConfig({"experts.gate_up_proj": config}), filter_fn=None)
        theirs = model.experts.gate_up_proj.dequantize()
        tensors, metadata = flatten_tensor_state_dict({name: W.data for name, W in model.state_dict().items()})
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    config_json = {"num_experts": 3, "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    found = decoded(tmp_path)
    assert found.keys() == {"experts.gate_up_proj"}
    assert same(found["experts.gate_up_proj"], theirs)
    assert opened(tmp_path).names == {"experts.gate_up_proj"}
    rows = shardesd.scan(tmp_path, device="cpu", cache=False).layers
    assert (rows.height, set(rows["status"])) == (3, {"ok"})
    metadata["experts.gate_up_proj"] = '{"_type": "Int4Tensor"}'
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    assert problems(tmp_path).keys() == {"experts.gate_up_proj"}
    assert "Int4Tensor is not supported" in problems(tmp_path)["experts.gate_up_proj"]


def test_torchaos_packed_tensors_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"0._weight_qdata": torch.ones(64, 64, dtype=torch.int8), "0._weight_scale": random(1, 64)}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"0.weight": '{"_type": "Int4Tensor"}'})
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    assert "torchao's Int4Tensor is not supported" in problems(tmp_path / "a")["0.weight"]
    assert "torchao's unknown tensor is not supported" in problems(tmp_path / "b")["0.weight"]
