"""Decoded weights lie as the model itself keeps them, and what can't be told is refused: held to numpy on the weights
that the files were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shardesd
from shardesd.checkpoint.quantised.beside import Beside

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1}


def stored(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def lora(folder: Path, module: str) -> tuple[Path, torch.Tensor]:
    """An adapter, and its delta."""
    A, B = torch.randn(4, 64), torch.randn(64, 4)
    folder.mkdir()
    names = {f"base_model.model.{module}.lora_A.weight": A, f"base_model.model.{module}.lora_B.weight": B}
    save_file(names, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, B @ A


def eigenvalues(W: torch.Tensor) -> np.ndarray:
    return np.sort(np.linalg.svd(W.double().numpy(), compute_uv=False) ** 2)


def close(found: np.ndarray, W: torch.Tensor) -> None:
    expected = eigenvalues(W)
    assert len(found) == len(expected)
    assert np.abs(found - expected).max() <= 1e-6 * expected[-1]


def scan(model: Path, **options: Any) -> shardesd.Result:
    return shardesd.scan(model, cache=False, device="cpu", filter_zeros=False, **options)


def permuted(W: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter does it."""
    return W.reshape(heads, 2, W.shape[0] // heads // 2, W.shape[1]).swapaxes(1, 2).reshape(W.shape)


@pytest.mark.parametrize("architecture", ["llama", "granite", "deepseek", "qwen2"])
@pytest.mark.parametrize(("kind", "heads"), [("q", 4), ("k", 2)])
def test_adapters_and_minus_on_a_gguf_base(tmp_path: Path, architecture: str, kind: str, heads: int) -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    module = f"model.layers.0.self_attn.{kind}_proj"
    W = torch.randn(64 if kind == "q" else 32, 64)
    writer = gguf.GGUFWriter(str(tmp_path / "base.gguf"), architecture)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(64)
    lies = W if architecture == "qwen2" else permuted(W, heads)
    writer.add_tensor(f"blk.0.attn_{kind}.weight", lies.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    other = stored(tmp_path / "other", {f"{module}.weight": W + 0.01 * torch.randn_like(W)}, {"model_type": "llama"})
    adapter, delta = lora(tmp_path / "adapter", module)
    if kind == "q":
        close(scan(adapter, base=tmp_path / "base.gguf").spectra[module], W + delta)
    difference = scan(other, minus=tmp_path / "base.gguf").spectra[module]
    assert difference.max() < 0.1
    for head, spectrum in scan(tmp_path / "base.gguf", per_head=True).spectra.items():
        number = int(head.rpartition(".")[2])
        close(spectrum, W[16 * number : 16 * number + 16])


@pytest.mark.parametrize("method", ["int8", "gptq"])
def test_a_quantised_conv1d_is_turned_back(tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    module = "transformer.h.0.attn.c_proj"
    if method == "int8":
        codes, scale = torch.randint(-127, 128, (64, 64), dtype=torch.int8), torch.rand(64) + 0.1
        W = codes.float() * scale[:, None] / 127  # outputs × inputs
        tensors = {f"{module}.weight": codes, f"{module}.SCB": scale}
        settings: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    else:
        tensors, W = gptq(module, 64, more=1)
        settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    base = stored(tmp_path / "base", tensors, GPT2 | {"quantization_config": settings})
    adapter, delta = lora(tmp_path / "adapter", module)
    close(scan(adapter, base=base).spectra[module], W + delta)
    heads = scan(base, per_head=True).spectra
    for head in range(4):  # of the inputs
        close(heads[f"{module}.head.{head}"], W[:, 16 * head : 16 * head + 16])
    plain = stored(tmp_path / "plain", {f"{module}.weight": (W + 0.01).T}, GPT2)
    difference = scan(base, minus=plain).spectra[module]
    assert abs(difference.max() - 64 * 64 * 1e-4) < 1e-3


def test_a_quantised_fused_conv1d_is_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, scale = torch.randint(-127, 128, (192, 64), dtype=torch.int8), torch.rand(192) + 0.1
    module = "transformer.h.0.attn.c_attn"
    config = GPT2 | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    found = scan(stored(tmp_path / "base", {f"{module}.weight": codes, f"{module}.SCB": scale}, config)).spectra
    W = codes.float() * scale[:, None] / 127
    for part, name in enumerate("qkv"):
        close(found[f"{module}_{name}"], W[64 * part : 64 * part + 64])


def gptq(module: str, outputs: int, *, more: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """4 bits, 64 inputs in groups of 32, and what they mean where zero points are stored less `more`."""
    codes, zeros = torch.randint(0, 16, (64, outputs)), torch.randint(0, 15, (2, outputs))
    scales = (torch.rand(2, outputs) * 0.1 + 0.01).half()

    def words(values: torch.Tensor) -> torch.Tensor:
        packed = sum(values[i::8].long() << (4 * i) for i in range(8))
        return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)

    tensors = {
        f"{module}.qweight": words(codes),
        f"{module}.qzeros": words(zeros.T).T,
        f"{module}.scales": scales,
    }
    spread = (zeros + more).repeat_interleave(32, 0)
    return tensors, ((codes - spread).float() * scales.float().repeat_interleave(32, 0)).T


@pytest.mark.parametrize(
    ("packing", "more"), [("auto_round", 0), ("auto_round:gptqmodel", 0), ("auto_round:auto_gptq", 1)]
)
def test_auto_round_says_how_zero_points_are_stored(tmp_path: Path, packing: str, more: int) -> None:
    torch.manual_seed(0)
    tensors, W = gptq("l.0.up_proj", 32, more=more)
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing}
    close(scan(stored(tmp_path / "m", tensors, {"quantization_config": settings})).spectra["l.0.up_proj"], W)


CODES = torch.randn(64, 96).to(torch.float8_e4m3fn)
SCALE = torch.rand(64, 1)
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "TensorRT-LLM": ({"weight": CODES, "weights_scaling_factor": SCALE[:1, 0]}, "weights_scaling_factor"),
    "plural": ({"weight": CODES, "weight_scales": SCALE}, "weight_scales"),
    "quanto": ({"weight._data": CODES, "weight._scale": SCALE}, "optimum-quanto"),
    "quanto at 4 bits": (
        {
            "weight._data._data": torch.ones(64, 24, dtype=torch.uint8),
            "weight._scale": torch.rand(128, 1),
            "weight._shift": torch.rand(128, 1),
        },
        "optimum-quanto",
    ),
    "bitmask": (
        {
            "compressed": torch.randn(64, 48),
            "bitmask": torch.ones(64, 12, dtype=torch.uint8),
            "shape": torch.ones(2, 1),
        },
        "sparse bitmask",
    ),
    "hqq": ({"W_q": torch.ones(64, 32).bfloat16(), "scale": SCALE, "zero": torch.ones(64, 1)}, "HQQ"),
    "marlin": ({"B": torch.ones(8, 256, dtype=torch.int32), "s": SCALE}, "Marlin"),
    "one row of blocks": (
        {"weight": torch.randn(64, 200).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 2)},
        "blocks of 100 or of 128",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_by_name(tmp_path: Path, name: str) -> None:
    parts, why = REFUSED[name]
    result = scan(stored(tmp_path / "m", {f"l.0.up_proj.{end}": part for end, part in parts.items()}))
    assert result.layers["longname"].to_list() == ["l.0.up_proj"]
    assert result.layers["status"].to_list() == ["failed"]
    assert why in result.layers["reason"][0]


def test_mistrals_own_scale_is_multiplied(tmp_path: Path) -> None:
    module = "layers.0.feed_forward.w3"
    folder = stored(tmp_path / "m", {f"{module}.weight": CODES, f"{module}.qscale_weight": torch.tensor(0.01)})
    close(scan(folder).spectra[module], CODES.float() * 0.01)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("glm4", "model.layers.0.mlp.gate_up_proj"), ("jina-bert-v2", "encoder.layer.0.mlp.gated_layers")],
)
def test_a_fused_up_projection_of_gguf_is_cut(tmp_path: Path, architecture: str, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    W = np.random.default_rng(0).standard_normal((192, 48)).astype("f4")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), architecture)
    writer.add_feed_forward_length(96)
    writer.add_tensor("blk.0.ffn_up.weight", W)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = scan(tmp_path / "m.gguf").spectra
    close(found[f"{name}_gate"], torch.from_numpy(W[:96]))
    close(found[f"{name}_up"], torch.from_numpy(W[96:]))


def test_a_deltas_design_rank_is_its_shorter_side(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    base = stored(tmp_path / "base", {f"{module}.weight": torch.randn(64, 64)})
    adapter, _ = lora(tmp_path / "adapter", module)
    stats = scan(adapter, base=base, delta=True, stats=True).stats
    assert stats is not None
    assert stats.select("design_rank", "actual_rank", "rank_ratio").row(0) == (64, 4, 4 / 64)


def test_head_counts_of_each_block(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    W = torch.randn(32, 64)
    writer = gguf.GGUFWriter(str(tmp_path / "base.gguf"), "granitehybrid")
    writer.add_head_count([4, 4])
    writer.add_head_count_kv([0, 2])
    writer.add_embedding_length(64)
    writer.add_tensor("blk.1.attn_k.weight", permuted(W, 2).numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    other = stored(tmp_path / "other", {"model.layers.1.self_attn.k_proj.weight": W + 0.01})
    (difference,) = scan(other, minus=tmp_path / "base.gguf").spectra.values()
    assert abs(difference.max() - 32 * 64 * 1e-4) < 1e-3


@pytest.mark.parametrize(("layer", "rows"), [("c_proj", 64), ("c_fc", 256)])
def test_orthogonal_and_hadamard_adapters_of_a_quantised_conv1d(tmp_path: Path, layer: str, rows: int) -> None:
    """peft's OFT and LoHa on the linear layer that bitsandbytes makes of it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    where = "attn" if layer == "c_proj" else "mlp"
    module = f"transformer.h.0.{where}.{layer}"
    codes, scale = torch.randint(-127, 128, (rows, 64), dtype=torch.int8), torch.rand(rows) + 0.1
    W = codes.float() * scale[:, None] / 127
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {f"{module}.weight": codes, f"{module}.SCB": scale}
    base = stored(tmp_path / "base", tensors, GPT2 | {"quantization_config": settings})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = torch.nn.Linear(64, rows, bias=False)
            linear.weight.data = W.clone()
            block = torch.nn.ModuleDict({where: torch.nn.ModuleDict({layer: linear})})
            self.transformer = torch.nn.ModuleDict({"h": torch.nn.ModuleList([block])})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.transformer["h"][0][where][layer](x)

    for name, config in {
        "oft": peft.OFTConfig(oft_block_size=8, target_modules=[layer], use_cayley_neumann=False),
        "loha": peft.LoHaConfig(r=4, alpha=8, target_modules=[layer]),
    }.items():
        model = peft.get_peft_model(Model(), config)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path / name)
        merged = model.merge_and_unload().transformer["h"][0][where][layer].weight.data
        close(scan(tmp_path / name, base=base).spectra[module], merged)


def test_words_that_speak_of_scales_elsewhere_refuse_nothing(tmp_path: Path) -> None:
    tensors = {
        "multiscale_encoder.layers.0.fc.weight": CODES,
        "attn.scaler.weight": CODES.clone(),
        "attn.W_q": torch.randn(64, 64),
        "attn.scale": torch.ones(1),
    }
    result = scan(stored(tmp_path / "m", tensors))
    assert set(result.layers["status"]) == {"ok"}
    assert result.layers.height == 3


def test_groups_of_inputs_out_of_order_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, scales = torch.randint(-127, 128, (64, 128), dtype=torch.int8), torch.rand(64, 4) + 0.1
    ordered = torch.arange(128, dtype=torch.int32) // 32
    uneven = torch.tensor([0] * 10 + [1] * 54 + [2] * 32 + [3] * 32, dtype=torch.int32)
    unsaid = torch.full_like(ordered, -1)
    cases = [(ordered, "ok"), (unsaid, "ok"), (ordered.flip(0), "failed"), (uneven, "failed"), (ordered[:64], "failed")]
    for number, (groups, status) in enumerate(cases):
        parts = {"weight": codes, "weight_scale": scales, "weight_g_idx": groups}
        result = scan(stored(tmp_path / f"m{number}", {f"l.0.up_proj.{end}": part for end, part in parts.items()}))
        assert result.layers["status"].to_list() == [status]
        if status == "ok":
            close(result.spectra["l.0.up_proj"], codes.float() * scales.repeat_interleave(32, 1))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "int8"])
@pytest.mark.parametrize("module", ["l.0.embed_tokens", "l.0.up_proj"])
def test_a_matrix_beside_codes_is_never_lost_without_a_row(tmp_path: Path, module: str, dtype: str) -> None:
    """Though nothing else is said of the codes, those of an embedding say."""
    codes = torch.ones(64, 96).to(getattr(torch, dtype))
    result = scan(
        stored(tmp_path / "m", {f"{module}.weight": codes, f"{module}.mix": torch.randn(32, 48)}), show_skipped=True
    )
    assert f"{module}.mix" in result.layers["longname"].to_list()
    assert "ok" not in result.layers["status"].to_list()


def test_names_beside_thousands_of_weights_are_looked_up_not_looked_through() -> None:
    """By the work, not by the clock."""
    beside, asked = Beside(), [0]

    class Name(str):
        __slots__ = ()

        def startswith(self, *given: Any) -> bool:
            asked[0] += 1
            return super().startswith(*given)

    beside.learn(Name(f"l.p{i}_scale{j}") for i in range(1000) for j in range(2))
    assert [len(list(beside.of(f"l.p{i}", ""))) for i in range(1000)] == [2] * 1000
    assert asked[0] < 5000
