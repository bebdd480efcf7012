"""The same model gives the same rows as GGUF and as safetensors, whatever llama.cpp's converter makes of its tensors.

Weights are a tiny model's, saved by transformers; what the converter does to them is done here by its rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_files import store
from safetensors.torch import load_file

import shardesd
from shardesd.checkpoint import open_checkpoint
from shardesd.checkpoint.gguf_names import own_parts
from shardesd.errors import MalformedHeader
from shardesd.source import open_source

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden_size": 64, "vocab_size": 96, "intermediate_size": 48, "pad_token_id": 0}
HEADS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COUNTS = {"embedding_length": 64, "attention.head_count": 4, "block_count": 2}
STATE = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4}


def saved(tmp_path: Path, cls: str, config: Any) -> dict[str, torch.Tensor]:
    """A tiny model's weights, by the names that its checkpoints have."""
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "hf")
    return load_file(tmp_path / "hf" / "model.safetensors")


def permuted(W: torch.Tensor, heads: int) -> torch.Tensor:
    """As ``LlamaModel.permute``."""
    return W.reshape(heads, 2, -1, W.shape[-1]).swapaxes(1, 2).reshape(W.shape)


def converted(architecture: str, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    name_map = gguf.get_tensor_name_map(arch, 4)
    for name, W in weights.items():
        if name.endswith(("A_log", "dt_bias", "D", "e_score_correction_bias", "norm.weight")):
            continue
        if architecture in ("granitehybrid", "nemotron_h"):
            if name.endswith("q_proj.weight"):
                W = permuted(W, 4)
            elif name.endswith("k_proj.weight"):
                W = permuted(W, 2)
        if name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), W.chunk(2), strict=True):
                yield name_map.get_name(f"model.layers.{name.split('.')[2]}.mlp.{part}_proj") + ".weight", half
            continue
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            W = W.squeeze(1)
        theirs = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        yield theirs, W


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts with a tensor each, one above the other."""
    found: dict[str, Any] = {}
    for name, W in weights.items():
        match = re.fullmatch(r"(.*\.experts\.)([0-9]+)\.(.*)", name)
        if match:
            found.setdefault(match[1] + match[3], {})[int(match[2])] = W
        else:
            found[name] = W
    return {
        name: torch.stack([one[i] for i in range(len(one))]) if isinstance(one, dict) else one
        for name, one in found.items()
    }


def write(path: Path, architecture: str, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{architecture}.{key}", value)
    for name, W in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(W.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same(tmp_path: Path, architecture: str, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    write(tmp_path / "model.gguf", architecture, tensors, {**COUNTS, **values})
    for options in ({}, {"per_head": True}):
        options["max_aspect"] = 0
        expected = shardesd.scan(tmp_path / "hf", **options)
        found = shardesd.scan(tmp_path / "model.gguf", **options)
        columns = ("longname", "block_type", "layer_index", "M", "N", "status", "reason")
        rows = [
            {row["longname"]: tuple(row[column] for column in columns) for row in result.layers.iter_rows(named=True)}
            for result in (found, expected)
        ]
        assert rows[0] == rows[1]
        assert set(found.spectra) == set(expected.spectra)
        assert len(expected.spectra) > 5
        for name in expected.spectra:
            eigs = expected.spectra[name]
            np.testing.assert_allclose(found.spectra[name], eigs, rtol=0, atol=1e-6 * eigs[-1])


def models() -> dict[str, tuple[str, Any, dict[str, Any]]]:
    t = transformers
    mamba2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
    kv = {"attention.head_count_kv": [0, 2]}
    return {
        "jamba": (
            "JambaForCausalLM",
            t.JambaConfig(**SMALL, **HEADS, num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
            {**STATE, **kv},
        ),
        "granitehybrid": (
            "GraniteMoeHybridForCausalLM",
            t.GraniteMoeHybridConfig(
                **SMALL,
                **HEADS,
                **mamba2,
                layer_types=["mamba", "attention"],
                num_local_experts=0,
                shared_intermediate_size=48,
            ),
            {**STATE, **kv},
        ),
        "falcon-h1": (
            "FalconH1ForCausalLM",
            t.FalconH1Config(**SMALL, **HEADS, **mamba2, mamba_d_ssm=128),
            {**STATE, "attention.head_count_kv": 2, "attention.key_length": 16},
        ),
        "nemotron_h": (
            "NemotronHForCausalLM",
            t.NemotronHConfig(
                **SMALL,
                layers_block_type=["mamba", "attention", "mlp"],
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                mamba_num_heads=4,
                mamba_head_dim=32,
                ssm_state_size=16,
                n_groups=1,
            ),
            {**STATE, **kv, "attention.key_length": 16, "attention.value_length": 16},
        ),
        "mamba2": (
            "Mamba2ForCausalLM",
            t.Mamba2Config(
                hidden_size=64, vocab_size=96, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=1
            ),
            STATE,
        ),
        "mamba": (
            "MambaForCausalLM",
            t.MambaConfig(hidden_size=64, vocab_size=96, num_hidden_layers=2, state_size=16, time_step_rank=4),
            STATE,
        ),
        "lfm2": (
            "Lfm2ForCausalLM",
            t.Lfm2Config(**SMALL, **HEADS, layer_types=["conv", "full_attention"]),
            {"attention.head_count_kv": [0, 2]},
        ),
    }


@pytest.mark.parametrize(
    "architecture", ["jamba", "granitehybrid", "falcon-h1", "nemotron_h", "mamba", "mamba2", "lfm2"]
)
def test_state_space_models(tmp_path: Path, architecture: str) -> None:
    cls, config, values = models()[architecture]
    weights = saved(tmp_path, cls, config)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"]
    same(tmp_path, architecture, dict(converted(architecture, weights)), values)
    if architecture != "granitehybrid":  # whose shared_mlp.input_linear is cut
        assert_same_elements(tmp_path)


def test_what_config_json_would_have_to_tell_is_said(tmp_path: Path) -> None:
    """PLaMo 2's rows, and those of any model whose metadata lacks a size, are fused in a way that isn't known."""
    tensors = {"blk.0.ssm_in.weight": torch.randn(128, 64), "blk.0.ssm_x.weight": torch.randn(48, 64)}
    write(tmp_path / "plamo2.gguf", "plamo2", tensors, {})
    write(tmp_path / "granite.gguf", "granitehybrid", tensors, {})
    rows = shardesd.scan(tmp_path / "plamo2.gguf").layers.select("longname", "reason").rows()
    assert rows == [
        ("model.layers.layers.0.mixer.bcdt_proj", "fused bcdt_proj analysed whole"),
        ("model.layers.layers.0.mixer.in_proj", "fused in_proj analysed whole"),
    ]
    (row,) = shardesd.scan(tmp_path / "granite.gguf", include=("*in_proj",)).layers.iter_rows(named=True)
    assert row["longname"] == "model.layers.0.mamba.in_proj"
    assert row["reason"] == "fused in_proj analysed whole"


LATENT = {"attention.kv_lora_rank": 48, "rope.dimension_count": 8, "attention.head_count_kv": 1}
LATENT_NOW = {"attention.key_length_mla": 40, "attention.value_length_mla": 24}


@pytest.mark.parametrize("as_of", ["now", "before keys and values were told apart"])
def test_latent_attention(tmp_path: Path, as_of: str) -> None:
    """The converter cuts kv_b_proj by head and turns the keys; files from before 2025 have it whole."""
    config = transformers.DeepseekV2Config(
        **SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=1,
        q_lora_rank=None, kv_lora_rank=48, qk_rope_head_dim=8, qk_nope_head_dim=32, v_head_dim=24,
    )  # fmt: skip
    weights = saved(tmp_path, "DeepseekV2ForCausalLM", config)
    values = LATENT | LATENT_NOW | {"attention.key_length": 56, "attention.value_length": 48}
    if as_of == "now":
        W = weights.pop("model.layers.0.self_attn.kv_b_proj.weight").reshape(4, 32 + 24, 48)
        weights["model.layers.0.self_attn.k_b_proj.weight"] = W[:, :32].transpose(1, 2)
        weights["model.layers.0.self_attn.v_b_proj.weight"] = W[:, 32:]
    else:
        values = LATENT | {"attention.key_length": 40, "attention.value_length": 24, "attention.head_count_kv": 4}
    same(tmp_path, "deepseek2", dict(converted("deepseek2", weights)), values)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0"])
def test_keys_of_latent_attention_are_turned_back(tmp_path: Path, type: str) -> None:
    kind = gguf.GGMLQuantizationType[type]
    W = torch.randn(5, 32, 64).numpy()
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    for name in ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"):
        stored = np.ascontiguousarray(W.swapaxes(1, 2)) if "_k_" in name else W
        writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(open_source(path))
    with checkpoint.open(checkpoint.shards[0], path) as shard:
        assert [tensor.name for tensor in shard.tensors] == [
            f"model.layers.0.self_attn.kv_b_proj_{part}.weight" for part in "kv"
        ]
        for tensor in shard.tensors:
            assert tensor.shape == (160, 64)
            with shard.read(tensor) as raw:
                found = raw.copy() if raw.dtype != np.uint16 else (raw.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(found, W.reshape(160, 64), atol={"F32": 0, "Q8_0": 0.02}.get(type, 0.01))


LINEAR = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4 * 24,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
}
LINEAR_CONFIG: dict[str, Any] = {
    **{**SMALL, **HEADS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
}


def test_linear_attention_of_qwen3_next(tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(
        **LINEAR_CONFIG, num_experts=3, moe_intermediate_size=40, shared_expert_intermediate_size=56
    )
    weights = stacked(saved(tmp_path, "Qwen3NextForCausalLM", config))
    fused = weights.pop("model.layers.0.linear_attn.in_proj_qkvz.weight").reshape(2, 16 + 16 + 48 + 48, 64)
    q, k, v, z = (part.reshape(-1, 64) for part in fused.split([16, 16, 48, 48], dim=1))
    tensors = dict(converted("qwen3next", weights))
    tensors |= {"blk.0.attn_qkv.weight": torch.cat([q, k, v]), "blk.0.attn_gate.weight": z}
    same(tmp_path, "qwen3next", tensors, {**LINEAR, "expert_count": 3})


@pytest.mark.parametrize("experts", [False, True])
def test_linear_attention_of_qwen3_5(tmp_path: Path, experts: bool) -> None:
    """Value heads are stored in another order, which λ of all of them don't show, but those of one head do."""
    if experts:
        config = transformers.Qwen3_5MoeTextConfig(
            **LINEAR_CONFIG, num_experts=3, moe_intermediate_size=40, shared_expert_intermediate_size=56
        )
    else:
        config = transformers.Qwen3_5TextConfig(**LINEAR_CONFIG)
    weights = saved(tmp_path, "Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM", config)

    def tiled(W: torch.Tensor, size: int) -> torch.Tensor:
        return W.reshape(2, 2, size, -1).swapaxes(0, 1).reshape(W.shape)

    prefix = "model.layers.0.linear_attn."
    W = weights[f"{prefix}in_proj_qkv.weight"]
    weights[f"{prefix}in_proj_qkv.weight"] = torch.cat([W[:64], tiled(W[64:], 24)])
    for name, size in (("in_proj_z", 24), ("in_proj_a", 1), ("in_proj_b", 1)):
        weights[f"{prefix}{name}.weight"] = tiled(weights[f"{prefix}{name}.weight"], size)
    weights[f"{prefix}out_proj.weight"] = tiled(weights[f"{prefix}out_proj.weight"].T, 24).T
    architecture = "qwen35moe" if experts else "qwen35"
    same(tmp_path, architecture, dict(converted(architecture, stacked(weights))), LINEAR)
    assert_same_elements(tmp_path)


def assert_same_elements(tmp_path: Path) -> None:
    """In the same order, too."""
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    checkpoint = open_checkpoint(open_source(tmp_path / "model.gguf"))
    with checkpoint.open(checkpoint.shards[0], tmp_path / "model.gguf") as shard:
        assert len(shard.tensors) > 8
        for tensor in shard.tensors:
            with shard.read(tensor) as raw:
                np.testing.assert_array_equal(raw, expected[tensor.name], err_msg=tensor.name)


def test_stacks_of_mixtral(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=3)
    weights = stacked(saved(tmp_path, "MixtralForCausalLM", config))
    tensors = {}
    for name, W in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            W = permuted(W, 4 if name.endswith("q_proj.weight") else 2)
        # The converter's own name on the way.
        tensors[name.replace("model.layers", "layers").replace("block_sparse_moe.experts", "feed_forward.experts")] = W
    tensors = {name if "experts" in name else name.replace("layers", "model.layers"): W for name, W in tensors.items()}
    values = {"attention.head_count_kv": 2, "expert_count": 3}
    same(tmp_path, "llama", dict(converted("llama", tensors)), values)
    assert_same_elements(tmp_path)


def test_modernbert(tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4)
    weights = saved(tmp_path, "ModernBertModel", config)
    same(tmp_path, "modern-bert", dict(converted("modern-bert", weights)), {"feed_forward_length": 48})
    assert_same_elements(tmp_path)


def test_stacks_that_are_cut_in_gate_and_up(tmp_path: Path) -> None:
    """gpt-oss's lie as inputs × outputs, with gate and up in turns; Granite's as outputs × inputs."""
    gate, up, down = torch.randn(3, 48, 64), torch.randn(3, 48, 64), torch.randn(3, 64, 48)
    parts = (("gate", gate), ("up", up), ("down", down))
    tensors = {f"blk.0.ffn_{part}_exps.weight": W for part, W in parts}
    tensors["blk.0.ffn_up_exps.bias"] = up[:, :, 0]
    cases = {
        ("gpt-oss", "gpt_oss"): {
            "mlp.experts.gate_up_proj": torch.stack([gate, up], dim=2).reshape(3, 96, 64).swapaxes(1, 2),
            "mlp.experts.down_proj": down.swapaxes(1, 2),
        },
        ("granitemoe", "granitemoe"): {
            "block_sparse_moe.input_linear.weight": torch.cat([gate, up], dim=1),
            "block_sparse_moe.output_linear.weight": down,
        },
    }
    for (architecture, model_type), weights in cases.items():
        folder = tmp_path / architecture
        folder.mkdir()
        write(folder / "m.gguf", architecture, tensors, {"expert_count": 3})
        own = tmp_path / model_type / "hf"
        store(own, {f"model.layers.0.{name}": W for name, W in weights.items()}, model_type=model_type)
        found, expected = (shardesd.scan(place) for place in (folder, own))
        assert found.layers["longname"].to_list() == expected.layers["longname"].to_list()
        assert found.layers["block_type"].to_list() == expected.layers["block_type"].to_list()
        assert len(found.spectra) == 9
        for name in found.spectra:
            eigs = expected.spectra[name]
            np.testing.assert_allclose(found.spectra[name], eigs, rtol=0, atol=1e-6 * eigs[-1])


def test_a_later_file_of_a_split_set_cannot_be_read_alone(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "")
    writer.kv_data[0].clear()
    writer.add_uint16("split.no", 1)
    writer.add_tensor("blk.1.ffn_down.weight", torch.randn(64, 48).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(MalformedHeader, match="a part of a split set"):
        open_checkpoint(open_source(tmp_path / "m-00002-of-00002.gguf"))


def test_a_name_that_only_other_models_have_stays(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "bert", {"blk.0.attn_qkv.weight": torch.randn(96, 32)}, {})
    (row,) = shardesd.scan(tmp_path / "m.gguf").layers.iter_rows(named=True)
    assert row["longname"] == "blk.0.attn_qkv"
    assert row["reason"].startswith("fused qkv analysed whole")


def test_experts_do_not_multiply_without_end(tmp_path: Path) -> None:
    """Tensors may overlap, so a small file can seem to hold any number of stacks."""
    tensors = {f"blk.{i}.ffn_up_exps.weight": torch.ones(1 << 19, 1, 1, dtype=torch.float16) for i in range(3)}
    write(tmp_path / "m.gguf", "llama", tensors, {})
    with pytest.raises(MalformedHeader, match="each expert counted"):
        open_checkpoint(open_source(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen3moe", "model.layers.3.mlp.experts.1.up_proj"),
        ("deepseek2", "model.layers.3.mlp.experts.1.up_proj"),
        ("jamba", "model.layers.3.feed_forward.experts.1.up_proj"),
        ("lfm2moe", "model.layers.3.feed_forward.experts.1.w3"),
        ("minimax-m2", "model.layers.3.block_sparse_moe.experts.1.w3"),
        ("nemotron_h_moe", "backbone.layers.3.mixer.experts.1.up_proj"),
        ("llama4", "model.layers.3.feed_forward.experts.gate_up_proj.experts.1_up"),
    ],
)
def test_names_of_experts(architecture: str, name: str) -> None:
    parts = own_parts("blk.3.ffn_up_exps.weight", (2, 48, 64), {"gguf_architecture": architecture})
    assert parts[1] == (f"{name}.weight", 48)


def test_no_tensor_hides_another(tmp_path: Path) -> None:
    tensors = {f"blk.0.{name}.weight": torch.randn(48, 64) for name in ("ffn_gate", "ffn_gate_shexp")}
    write(tmp_path / "m.gguf", "granitemoe", tensors, {})
    names = shardesd.scan(tmp_path / "m.gguf").layers["longname"].to_list()
    assert names == ["blk.0.ffn_gate_shexp", "model.layers.0.shared_mlp.input_linear_gate"]


def test_stacks_of_a_model_that_the_package_does_not_know(tmp_path: Path) -> None:
    tensors = {f"blk.0.ffn_{name}_exps.weight": torch.randn(2, 48, 64) for name in ("up", "gate_up")}
    write(tmp_path / "m.gguf", "some-newer-model", tensors, {})
    rows = shardesd.scan(tmp_path / "m.gguf").layers.select("longname", "M", "N", "reason").rows()
    assert rows == [
        *((f"blk.0.ffn_gate_up_exps.experts.{i}", 48, 64, "fused gate_up analysed whole") for i in range(2)),
        *((f"blk.0.ffn_up_exps.experts.{i}", 48, 64, "") for i in range(2)),
    ]
