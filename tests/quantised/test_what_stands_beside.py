"""What stands beside a weight's codes and isn't decoded with them: harmless, or the reason why there is no number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_files import decoded, opened, problems, random, same, store

import shardesd

BASE = "model.layers.0.mlp.up_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def integers(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def floats(*shape: int) -> torch.Tensor:
    return random(*shape, seed=2).abs() + 0.1


def named(parts: Tensors, base: str = BASE) -> Tensors:
    return {f"{base}{end}": part for end, part in parts.items()}


INT8 = {".weight": integers(40, 96), ".weight_scale": floats(40, 1)}
FP8 = {".weight": random(40, 96).to(E4M3), ".weight_scale": floats(40, 3)}
NVFP4 = {
    ".weight": integers(40, 48, dtype=torch.uint8),
    ".weight_scale": floats(40, 6).to(E4M3),
    ".weight_scale_2": torch.tensor(0.5),
}
WORDS = {
    ".qweight": integers(96, 8, dtype=torch.int32),
    ".qzeros": integers(3, 8, dtype=torch.int32),
    ".scales": floats(3, 64).half(),
}
PACKED = {
    ".weight_packed": integers(40, 12, dtype=torch.int32),
    ".weight_scale": floats(40, 3),
    ".weight_shape": torch.tensor([40, 96]),
}
TORCHAO = {"._weight_qdata": integers(40, 96), "._weight_scale": floats(40, 1)}
EXPERTS = {"": random(4, 40, 96).to(E4M3), "_scale": floats(4)}

UNKNOWN: dict[str, tuple[Tensors, str, torch.Tensor, str]] = {
    "Ascend's zero points": (INT8, ".weight_offset", floats(40, 1), BASE),
    "SmoothQuant": (INT8, ".smooth_scale", floats(96), BASE),
    "ModelOpt's quantiser": (INT8, ".input_quantizer._pre_quant_scale", floats(96), BASE),
    "ModelOpt's NVFP4_AWQ": (NVFP4, ".pre_quant_scale", floats(96), BASE),
    "ModelOpt's SVDQuant": (NVFP4, ".svdquant_lora_a", floats(16, 96), BASE),
    "a second scale of FP8": (FP8, ".weight_global_scale", torch.tensor([50.0]), BASE),
    "a second scale of integers": (PACKED, ".weight_global_scale", torch.tensor([50.0]), BASE),
    "AWQ's inputs": (WORDS, ".pre_quant_scale", floats(96), BASE),
    "rotated inputs": (WORDS, ".hadamard_matrix", floats(32, 32), BASE),
    "a bias of the weight": (FP8, ".weight_bias", floats(40), BASE),
    "within the weight": (FP8, ".weight.outliers", floats(40), BASE),
    "a stack's": (EXPERTS, "_smooth", floats(96), STACK),
    "a cast's": ({".weight": random(40, 96).to(E4M3)}, ".amax_history", floats(16), BASE),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_change_a_weight_refuses_it(tmp_path: Path, name: str) -> None:
    parts, end, other, base = UNKNOWN[name]
    store(tmp_path / "with", named({**parts, end: other}, base))
    store(tmp_path / "without", named(parts, base))
    weight = base if base == STACK else f"{base}.weight"
    assert f"what '{base}{end}' does to it isn't known" in problems(tmp_path / "with")[weight]
    assert problems(tmp_path / "without") == {}
    rows = shardesd.scan(tmp_path / "with", cache=False, max_aspect=0).layers
    assert base in {*rows["longname"]} <= {base, f"{base}{end}".removesuffix(".weight")}
    assert {*rows["status"]} == {"failed"}  # the other is no weight, and not lost without a word


def test_torchaos_smoothed_inputs(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    kind = {f"{BASE}.weight": '{"_type": "Int8Tensor"}'}
    quantised = named({**TORCHAO, "._weight_act_quant_scale": floats(1)})
    save_file(quantised, tmp_path / "model.safetensors", metadata=kind)
    W = TORCHAO["._weight_qdata"].float() * TORCHAO["._weight_scale"]
    assert same(decoded(tmp_path)[f"{BASE}.weight"], W)
    smoothed = {**quantised, f"{BASE}._weight_act_pre_scale": floats(96)}
    save_file(smoothed, tmp_path / "model.safetensors", metadata=kind)
    assert "_weight_act_pre_scale" in problems(tmp_path)[f"{BASE}.weight"]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_a_part_of_an_unknown_name_is_no_weight(tmp_path: Path, index: bool, order: int, dtype: torch.dtype) -> None:
    """As ComfyUI's scales of scales are, in float8: they would be codes of a cast."""
    part = {f"{BASE}.weight_s_rel": floats(40, 24).to(dtype)}
    store(tmp_path / "one", named(INT8) | part)
    store(tmp_path / "two", *[named(INT8), part][::order], index=index)
    for folder in (tmp_path / "one", tmp_path / "two"):
        if dtype == E4M3 or index or order == 1:  # else it comes before anything speaks of codes
            rows = {row.longname: row.status for row in shardesd.stream(folder)}
            assert rows == {BASE: "failed", f"{BASE}.weight_s_rel": "failed"}


@pytest.mark.parametrize("index", [True, False])
def test_what_may_yet_become_codes_swallows_nothing(tmp_path: Path, index: bool) -> None:
    """HQQ's name, and a matrix of one column, as bitsandbytes' codes are."""
    first = {"attn.W_q": random(8, 8), "attn.W_k": random(8, 8), "gate.weight": random(8, 1), "gate.U": random(8, 8)}
    store(tmp_path, first, {"other.weight": random(8, 8)}, index=index)
    rows = {row.longname: row.status for row in shardesd.stream(tmp_path)}
    assert rows == dict.fromkeys(("attn.W_q", "attn.W_k", "gate.U", "other"), "ok")


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_in_another_shard(tmp_path: Path, index: bool, order: int) -> None:
    """Neither order of the shards gives a number."""
    shards = [{**named(INT8), "other.weight": random(8, 8)}, {f"{BASE}.weight_offset": floats(40, 1)}]
    store(tmp_path, *shards[::order], index=index)
    assert "weight_offset" in problems(tmp_path)[f"{BASE}.weight"]
    rows = {row.longname: row.status for row in shardesd.stream(tmp_path)}
    assert rows == {BASE: "failed", f"{BASE}.weight_offset": "failed", "other": "ok"}


HARMLESS = {
    ".bias": floats(40),
    ".input_scale": torch.tensor(0.5),
    ".input_zero_point": torch.tensor(3, dtype=torch.int8),
    ".input_global_scale": torch.tensor([0.5]),
    ".activation_scale": torch.tensor(0.5),
    ".output_scale": torch.tensor(0.5),
    ".k_scale": torch.tensor(0.5),
    ".input_quantizer._amax": torch.tensor(0.5),
    ".k_fake_quantizer.qscale_act": torch.tensor(0.5),
    ".bias_scale": torch.tensor(0.5),
    ".e_score_correction_bias": floats(40),
    ".tid2eid": integers(40, 6, dtype=torch.int64),
    ".lora_A.default.weight": floats(4, 96),
    ".lora_B.default.weight": floats(40, 4),
    ".lora_magnitude_vector.default.weight": floats(40),
    "_bias": floats(40),
    "_gate": floats(40),
    "_norm.scale": floats(40),
}


@pytest.mark.parametrize("stored", [INT8, FP8, NVFP4, WORDS, PACKED], ids=["int8", "fp8", "nvfp4", "gptq", "packed"])
def test_what_leaves_a_weight_alone(tmp_path: Path, stored: Tensors) -> None:
    alone = decoded(store(tmp_path / "alone", named(stored)))
    (name,) = alone
    found = decoded(store(tmp_path / "with", named({**stored, **HARMLESS})))
    np.testing.assert_array_equal(found[name], alone[name])


def test_a_stack_and_its_neighbours(tmp_path: Path) -> None:
    tensors = named({**EXPERTS, "_bias": floats(4, 40), "_input_scale": floats(4)}, STACK)
    tensors |= {STACK.replace("gate_up", name): random(4, 8, 8) for name in ("gate", "down")}
    found = decoded(store(tmp_path, tensors))
    assert same(found[STACK], EXPERTS[""].float() * EXPERTS["_scale"][:, None, None])
    assert {tensor.name for tensor in opened(tmp_path).tensors()} == set(tensors) - {f"{STACK}_scale"}


@pytest.mark.parametrize("shards", [1, 2])
def test_parameters_that_are_merely_called_alike(tmp_path: Path, shards: int) -> None:
    """LTX-2's tables, in a model that was cast to FP8 whole."""
    names = ["block.scale_shift_table", "block.scale_shift_table_a2v_ca_audio"]
    tensors = {name: random(6, 32, seed=i).to(E4M3) for i, name in enumerate(names)}
    files = [tensors] if shards == 1 else [{name: value} for name, value in tensors.items()]
    found = decoded(store(tmp_path, *files))
    assert all(same(found[name], value.float()) for name, value in tensors.items())


@pytest.mark.parametrize(("key", "method"), [("quant_method", "paroquant"), ("quant_method", "woq"), ("method", "qqq")])
def test_words_of_another_method_are_refused_by_its_name(tmp_path: Path, key: str, method: str) -> None:
    store(tmp_path, named(WORDS), quantization={key: method, "bits": 4, "group_size": 32})
    assert f"qweight of quant_method '{method}' is not supported" in problems(tmp_path)[f"{BASE}.weight"]


OTHERS: dict[str, tuple[Tensors, str]] = {
    "paroquant": (
        {
            **WORDS,
            ".theta": floats(8, 48),
            ".pairs": integers(8, 96, dtype=torch.int16),
            ".channel_scales": floats(1, 96),
        },
        "ParoQuant",
    ),
    "nunchaku": (
        {
            ".qweight": integers(64, 48),
            ".wscales": floats(6, 64).to(E4M3),
            ".wtscale": floats(1),
            ".proj_down": floats(96, 32),
            ".proj_up": floats(64, 32),
            ".smooth_factor": floats(96),
        },
        "Nunchaku",
    ),
    "fp_quant": (
        {
            ".qweight": integers(64, 48, dtype=torch.uint8),
            ".scales": integers(64, 3, dtype=torch.uint8),
            ".forward_hadamard_matrix": floats(32, 32),
            ".backward_hadamard_matrix": floats(32, 32),
            ".weight_global_scale": floats(1),
            ".act_global_scale": floats(1),
        },
        "FP-Quant",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_formats_that_rotate_or_add_are_refused_by_name(
    tmp_path: Path, name: str, configured: bool, shards: int
) -> None:
    """And no matrix that is a part of one has a row of its own."""
    parts, why = OTHERS[name]
    tensors = list(named(parts).items())
    files = [dict(tensors[i::shards]) for i in range(shards)]
    store(tmp_path, *files, index=False, quantization={"quant_method": name} if configured else None)
    rows = shardesd.scan(tmp_path, cache=False).layers
    assert rows["longname"].to_list() == [BASE]
    assert rows["status"].to_list() == ["failed"]
    assert why in rows["reason"][0]


def comfy(folder: Path, parts: Tensors, said: Any, *, in_header: bool) -> None:
    """As ComfyUI's own files are: JSON in a tensor of bytes, or in the header, under names without a prefix."""
    from safetensors.torch import save_file

    tensors = named(parts)
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {BASE: said}})}
    if not in_header:
        tensors[f"{BASE}.comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata=metadata if in_header else None)


@pytest.mark.parametrize("in_header", [True, False])
def test_comfyui_says_what_its_parts_mean(tmp_path: Path, in_header: bool) -> None:
    name = f"{BASE}.weight"
    cast = {".weight": FP8[".weight"], ".weight_scale": torch.tensor(0.25), ".input_scale": torch.tensor(1.0)}
    comfy(tmp_path, cast, {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, in_header=in_header)
    assert same(decoded(tmp_path)[name], cast[".weight"].float() * 0.25)
    comfy(tmp_path, INT8, {"format": "int8_tensorwise", "convrot": False}, in_header=in_header)
    assert same(decoded(tmp_path)[name], INT8[".weight"].float() * INT8[".weight_scale"])
    for parts, said, why in (
        (NVFP4, {"format": "nvfp4"}, "ComfyUI's nvfp4 is not supported"),
        (FP8, {"format": "mxfp8"}, "ComfyUI's mxfp8 is not supported"),
        (INT8, {"format": "convrot_w4a4"}, "ComfyUI's convrot_w4a4 is not supported"),
        (INT8, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 32}, "with convrot"),
        (INT8, {"format": "int8_tensorwise", "rotated_by": 32}, "with rotated_by"),
        (FP8, ["mxfp8"], "ComfyUI's None is not supported"),
    ):
        comfy(tmp_path, parts, said, in_header=in_header)
        assert why in problems(tmp_path)[name]


def test_malformed_comfy_quants(tmp_path: Path) -> None:
    for text, why in ((b"{", "comfy_quant is malformed"), (b"[" * 5000, "malformed"), (b"[" * 70_000, "70000 bytes")):
        bad = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        store(tmp_path, named({**FP8, ".comfy_quant": bad}))
        assert why in problems(tmp_path)[f"{BASE}.weight"]
