"""Whole scans of quantised checkpoints: the table says where its weights come from; laziness and memory are kept."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import HubServer, use_hub
from quantised_files import decoded, opened, random, store

import shardesd
from shardesd.checkpoint import open_live
from shardesd.events import Event, Notice, ShardOpened

E4M3 = torch.float8_e4m3fn
SIZE, HIDDEN, EXPERTS, LAYERS = 32, 48, 64, 4


def experts(stacked: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """FP8 experts with their scales, and what they decode to in float32, by torch."""
    quantised, plain = {}, {}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.mlp.experts"
        codes = random(EXPERTS, SIZE, HIDDEN, seed=layer).to(E4M3)
        scale = random(EXPERTS, 2, 3, seed=layer).abs()
        W = codes.float() * scale.repeat_interleave(16, 1).repeat_interleave(16, 2)
        if stacked:
            quantised |= {f"{base}.down_proj": codes, f"{base}.down_proj_scale_inv": scale}
            plain[f"{base}.down_proj"] = W
        else:
            for i in range(EXPERTS):
                name = f"{base}.{i}.down_proj.weight"
                quantised |= {name: codes[i], f"{name}_scale_inv": scale[i]}
                plain[name] = W[i]
    return quantised, plain


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_in_fp8_give_the_table_of_the_same_weights_in_float32(tmp_path: Path, stacked: bool) -> None:
    quantised, plain = experts(stacked)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    fp8 = shardesd.scan(store(tmp_path / "fp8", quantised, quantization=config))
    expected = shardesd.scan(store(tmp_path / "plain", plain))
    assert len(fp8.layers) == EXPERTS * LAYERS
    assert set(fp8.layers["dtype"]) == {"fp8_e4m3[16x16]"}
    assert fp8.layers["quantised"].all()
    assert not expected.layers["quantised"].any()
    differs = ["model_id", "dtype", "seconds", "quantised"]
    assert fp8.layers.drop(differs).equals(expected.layers.drop(differs))
    assert all(np.array_equal(fp8.spectra[name], expected.spectra[name]) for name in expected.spectra)


def test_one_expert_of_a_stack_costs_the_memory_of_one_expert(tmp_path: Path) -> None:
    name, side = "model.layers.0.mlp.experts.down_proj", 1024
    codes = random(8, side, side).to(E4M3)
    store(tmp_path, {name: codes, f"{name}_scale_inv": random(8, 8, 8)})
    checkpoint = opened(tmp_path)
    (tensor,) = checkpoint.tensors()
    one = replace(tensor, shape=(side, side), start=3 * 4 * side**2, end=4 * 4 * side**2)
    with checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors") as shard:
        with shard.read(one):
            pass
        tracemalloc.start()
        with shard.read(one):
            peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1.6 * 4 * side**2  # the float32 elements, the codes beside them, and what Python needs


@pytest.mark.parametrize("family", ["gptq", "nf4", "mxfp4"])
def test_decoding_takes_little_beside_the_decoded_elements(tmp_path: Path, family: str) -> None:
    side = 1024
    words = torch.randint(0, 100, (side // 8, side), dtype=torch.int32)
    if family == "gptq":
        tensors = {"a.qweight": words, "a.qzeros": words[:8, : side // 8], "a.scales": random(8, side).half()}
    elif family == "nf4":
        pytest.importorskip("bitsandbytes")
        from bitsandbytes import functional

        codes, state = functional.quantize_4bit(random(side, side), quant_type="nf4", compress_statistics=True)
        tensors = {"a.weight": codes, **{f"a.weight.{key}": part for key, part in state.as_dict(packed=True).items()}}
    else:
        blocks = torch.randint(0, 100, (1, side, side // 32, 16), dtype=torch.uint8)
        tensors = {"experts.x_proj_blocks": blocks, "experts.x_proj_scales": blocks[..., 0].contiguous()}
    store(tmp_path, tensors)
    checkpoint = opened(tmp_path)
    (tensor,) = checkpoint.tensors()
    with checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors") as shard:
        with shard.read(tensor):
            pass
        tracemalloc.start()
        with shard.read(tensor):
            peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 5 * 4 * side**2  # the budget counts 16 bytes an element for the solve, which comes after


def test_scales_in_a_later_shard_of_a_hub_repo(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing is fetched early, and rows are the folder's."""
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(4)]
    codes = {name: random(64, 64, seed=i).to(E4M3) for i, name in enumerate(names)}
    scales = {f"{name}_scale_inv": random(4, 4, seed=i).abs() for i, name in enumerate(names)}
    shards = [
        {
            names[0]: codes[names[0]],
            names[1]: codes[names[1]],
            f"{names[0]}_scale_inv": scales[f"{names[0]}_scale_inv"],
        },
        {f"{name}_scale_inv": scales[f"{name}_scale_inv"] for name in names[1:]} | {names[2]: codes[names[2]]},
        {names[3]: codes[names[3]], "model.norm.weight": random(64)},
    ]
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    for index in (True, False):
        folder = store(tmp_path / str(index), *shards, quantization=config, index=index)
        expected = shardesd.scan(folder)
        assert set(expected.layers["status"]) == {"ok"}
        with HubServer() as hub:
            hub.add("org/name", folder)
            use_hub(monkeypatch, hub, tmp_path / f"cache{index}")
            events: list[Event] = []
            result = shardesd.scan("org/name", on_event=events.append)
        assert [event.number for event in events if isinstance(event, ShardOpened)] == [1, 2, 3]
        assert result.layers["longname"].to_list() == [name.removesuffix(".weight") for name in names]
        differs = ["model_id", "seconds"]
        assert result.layers.drop(differs).equals(expected.layers.drop(differs))


def test_what_cant_be_decoded_is_a_failed_row_by_name(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": random(16, 16).to(E4M3),
        "model.layers.1.mlp.up_proj.qweight": torch.ones(4, 16, dtype=torch.int32),
        "model.layers.2.mlp.up_proj.weight": random(16, 16),
        "model.layers.3.mlp.up_proj.weight": torch.ones(16, 16, dtype=torch.int8),
    }
    result = shardesd.scan(store(tmp_path, tensors, quantization={"quant_method": "fp8"}))
    rows = {row["longname"][13:14]: row for row in result.layers.to_dicts()}
    assert [rows[i]["status"] for i in "0123"] == ["failed", "failed", "ok", "failed"]
    assert [rows[i]["quantised"] for i in "012"] == [True, True, False]
    assert rows["0"]["reason"] == (
        "quantised weight can't be decoded: F8_E4M3 codes of quant_method 'fp8' without scales"
    )
    assert rows["1"]["reason"] == "quantised weight can't be decoded: its scales is missing"
    assert "codes are not analysed" in rows["3"]["reason"]


def test_a_state_dict_is_decoded_too(tmp_path: Path) -> None:
    name = "layers.0.up_proj.weight"
    state = {name: random(64, 48).to(E4M3), f"{name}_scale": random(64, 1)}
    checkpoint = open_live(state)
    (tensor,) = checkpoint.tensors()
    with checkpoint.open(checkpoint.shards[0], Path("memory")) as shard, shard.read(tensor) as raw:
        np.testing.assert_array_equal(raw, decoded(store(tmp_path, state))[name])
    (row,) = shardesd.stream(state)
    assert (row.dtype, row.quantised, row.status) == ("fp8_e4m3[channel]", True, "ok")


def test_stats_of_what_cannot_be_decoded_and_no_matrix_needs_are_nulls(tmp_path: Path) -> None:
    """It is left out for its shape, so no row tells of it: a notice does, and the scan goes on."""
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    tensors = {}
    for layer, (inputs, outputs) in enumerate([(64, 48), (640, 48), (64, 48)]):
        module = f"model.layers.{layer}.mlp.up_proj"
        g_idx = torch.arange(inputs, dtype=torch.int32) // 32
        if layer == 1:
            g_idx[5] = 99
        tensors |= {f"{module}.qweight": words(inputs // 8, outputs), f"{module}.g_idx": g_idx}
        tensors |= {f"{module}.qzeros": words(inputs // 32, outputs // 8)}
        tensors |= {f"{module}.scales": torch.rand(inputs // 32, outputs, generator=generator).half()}
        tensors |= {f"model.layers.{layer}.input_layernorm.weight": torch.rand(48, generator=generator)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    events: list[Event] = []
    folder = store(tmp_path / "model", tensors, quantization=config)
    result = shardesd.scan(folder, out=tmp_path / "out", stats=True, on_event=events.append, max_aspect=10)
    assert len(result.layers) == 2
    assert not len(result.failed)
    assert result.stats is not None
    means = dict(zip(result.stats["tensor"], result.stats["mean"], strict=True))
    assert [name for name, mean in means.items() if mean is None] == ["model.layers.1.mlp.up_proj.weight"]
    assert len(means) == 6
    (told,) = [event.message for event in events if isinstance(event, Notice)]
    assert told.startswith("'model.layers.1.mlp.up_proj.weight' has no statistics: ")
    assert "g_idx" in told


def test_a_difference_gives_the_reason_of_either_side(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    plain = {f"{name}.weight": random(96, 160)}
    transform = {"type": "random-matrix", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    zeros = torch.zeros(96, 160)
    packed = {f"{name}.weight_packed": torch.zeros(96, 60, dtype=torch.uint8)}
    packed[f"{name}.weight_scale"] = torch.zeros(96, 5, dtype=torch.uint8)
    method = {"quant_method": "compressed-tensors"}
    store(tmp_path / "plain", plain)
    for kind, tensors, quantization, says in (
        ("distorted", plain, method | {"transform_config": {"config_groups": {"u": transform}}}, "no rotation"),
        ("packed", packed, method, "can't be decoded"),
        ("fp8", {f"{name}.weight": zeros.to(torch.float8_e4m3fn)}, {"quant_method": "fp8"}, "without scales"),
        ("integers", {f"{name}.weight": zeros.int()}, {"quant_method": "fp8"}, "I32"),
    ):
        store(tmp_path / kind, tensors, quantization=quantization)
        (row,) = shardesd.scan(tmp_path / "plain", minus=tmp_path / kind).layers.iter_rows(named=True)
        assert (row["longname"], row["status"]) == (name, "failed")
        assert row["reason"].startswith(f"in {kind}: ")
        assert says in row["reason"]
        (row,) = shardesd.scan(tmp_path / kind, minus=tmp_path / "plain").layers.iter_rows(named=True)
        assert row["status"] == "failed"
        assert not row["reason"].startswith("in ")
