"""MXFP4 and NVFP4 of gpt-oss and ModelOpt; compressed-tensors' are in test_quantised_compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import decoded, labels, problems, random, same, store

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAME = "model.layers.0.mlp.down_proj.weight"


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def values(packed: torch.Tensor) -> torch.Tensor:
    """The low nibble first."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
    return E2M1[pairs.long()].flatten(-2)


def test_gpt_oss_as_transformers_dequantises_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = codes(3, 40, 2, 16)
    scales = torch.randint(110, 135, (3, 40, 2), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    store(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": random(3, 40)})
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    assert theirs.shape == (3, 64, 40)
    assert same(decoded(tmp_path)[name], theirs)
    assert labels(tmp_path)[name] == "mxfp4[g32]"


def test_blocks_of_another_size_are_no_mxfp4(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    scales = torch.full((3, 40, 2), 127, dtype=torch.uint8)
    store(tmp_path, {f"{name}_blocks": codes(3, 40, 2, 15), f"{name}_scales": scales})
    assert "are not MXFP4's, of 16 bytes each" in problems(tmp_path)[name]


def test_one_expert_and_a_part_of_one(tmp_path: Path) -> None:
    from dataclasses import replace

    import numpy as np
    from quantised_files import opened

    name = "model.layers.0.mlp.experts.down_proj"
    scales = torch.randint(110, 135, (3, 40, 2), dtype=torch.uint8)
    store(tmp_path, {f"{name}_blocks": codes(3, 40, 2, 16), f"{name}_scales": scales})
    whole = decoded(tmp_path)[name]
    checkpoint = opened(tmp_path)
    (tensor,) = checkpoint.tensors()
    with checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors") as shard:
        size = 64 * 40 * 4
        with shard.read(replace(tensor, shape=(64, 40), start=size, end=2 * size)) as raw:
            np.testing.assert_array_equal(raw, whole[1])
        rows = replace(tensor, shape=(50, 40), start=size - 20 * 160, end=size + 30 * 160)
        with shard.read(rows) as raw:
            np.testing.assert_array_equal(raw, whole.reshape(-1, 40)[44:94])


def test_modelopt_nvfp4(tmp_path: Path) -> None:
    packed = codes(40, 32)
    scale = random(40, 4).abs().to(torch.float8_e4m3fn)
    factor = torch.tensor(0.0123)
    tensors = {NAME: packed, NAME + "_scale": scale, NAME + "_scale_2": factor}
    tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.tensor(1.0)
    store(tmp_path, tensors, quantization={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    expected = values(packed).reshape(40, 4, 16) * (scale.float() * factor)[:, :, None]
    assert same(decoded(tmp_path)[NAME], expected.reshape(40, 64))
    assert labels(tmp_path)[NAME] == "nvfp4[g16]"


@pytest.mark.parametrize("factor", [torch.tensor(0.5), torch.tensor([0.5]), random(3)])
def test_stacks_of_nvfp4_have_a_second_scale_or_one_for_each(tmp_path: Path, factor: torch.Tensor) -> None:
    packed, scale = codes(3, 40, 32), random(3, 40, 4).abs().to(torch.float8_e4m3fn)
    name = "model.layers.0.mlp.experts.down_proj"
    store(tmp_path, {name: packed, name + "_weight_scale": scale, name + "_weight_scale_2": factor})
    wide = scale.float() * factor.reshape(-1, 1, 1)
    assert same(decoded(tmp_path)[name], (values(packed).reshape(3, 40, 4, 16) * wide[..., None]).reshape(3, 40, 64))
    store(tmp_path, {name: packed, name + "_weight_scale": scale, name + "_weight_scale_2": random(2)})
    assert "second scale" in problems(tmp_path)[name]


@pytest.mark.parametrize(
    ("scale", "factor", "why"),
    [
        (random(40, 4).abs().to(torch.float8_e4m3fn), None, "no scale for the tensor"),
        (random(40, 3), torch.tensor(1.0), "neither MXFP4 nor NVFP4"),
        (random(39, 4), torch.tensor(1.0), "its scales have"),
        (random(40, 4).abs().to(torch.float8_e4m3fn), random(40), "second scale"),
    ],
)
def test_what_is_neither_is_refused(tmp_path: Path, scale: torch.Tensor, factor: torch.Tensor | None, why: str) -> None:
    tensors = {NAME: codes(40, 32), NAME + "_scale": scale}
    if factor is not None:
        tensors[NAME + "_scale_2"] = factor
    store(tmp_path, tensors)
    assert why in problems(tmp_path)[NAME]


def test_inputs_that_are_scaled_are_refused(tmp_path: Path) -> None:
    scale = random(40, 4).abs().to(torch.float8_e4m3fn)
    tensors = {NAME: codes(40, 32), NAME + "_scale": scale, NAME + "_scale_2": torch.tensor(1.0)}
    tensors[NAME.replace("weight", "pre_quant_scale")] = random(64)
    store(tmp_path, tensors)
    assert "pre_quant_scale" in problems(tmp_path)[NAME]


@pytest.mark.parametrize(
    "config", [{"data_type": "mx_int"}, {"data_type": "mx_fp", "extra_config": {"l.0": {"data_type": "mx_int4"}}}]
)
def test_auto_rounds_mxint_is_no_mxfp4(tmp_path: Path, config: dict[str, Any]) -> None:
    """It has MXFP4's names, types and shapes; only the config tells that its codes are integers."""
    scales = torch.randint(110, 135, (40, 2), dtype=torch.uint8)
    tensors = {NAME + "_packed": codes(40, 32), NAME + "_scale": scales}
    quantization = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", **config}
    store(tmp_path, tensors, quantization=quantization)
    assert "MXINT is not supported" in problems(tmp_path)[NAME]
    store(tmp_path, tensors, quantization={**quantization, "data_type": "mx_fp", "extra_config": {}})
    expected = values(tensors[NAME + "_packed"]).reshape(40, 2, 32) * torch.exp2(scales.float() - 127)[:, :, None]
    assert same(decoded(tmp_path)[NAME], expected.reshape(40, 64))
