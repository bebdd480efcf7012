"""Fused layers of models whose code is on the Hub, in diffusers or timm, or which transformers takes apart on loading.

What transformers loads is held to the modules that it runs. Of the others the few lines of their forward pass that tell
the parts from each other stand here, in their own words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import emitted
from safetensors.torch import save_file
from tiny_modules import inside, model, module, randomise, save, save_as
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")

H, INNER = 16, 40
Halves = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def first_is_activated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(a) * b


def second_is_activated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * nn.functional.gelu(b)


TIMM = {"architecture": "vit_giant_patch14_reg4_dinov2", "num_classes": 0}
FORWARDS: dict[str, tuple[str, dict[str, Any], int, Halves]] = {
    # `gated = self.gated_layers(x); act(gated[:, :I]) * gated[:, I:]`
    "jina-v2": (
        *("encoder.layer.0.mlp.gated_layers", {"model_type": "bert", "intermediate_size": INNER}, 2 * INNER),
        first_is_activated,
    ),
    # `up, gated = self.up_gated_layer(x).chunk(2, dim=1); up * act(gated)`
    "jina-v2-code": (
        *("encoder.layer.0.mlp.up_gated_layer", {"model_type": "bert", "intermediate_size": INNER}, 2 * INNER),
        second_is_activated,
    ),
    # `y_1, y_2 = self.proj_1(x).chunk(2, dim=-1); self.act(y_1) * y_2`
    "openelm": ("transformer.layers.0.ffn.proj_1", {"model_type": "openelm"}, 2 * INNER, first_is_activated),
    # GEGLU: `hidden_states, gate = self.proj(x).chunk(2, dim=-1); hidden_states * gelu(gate)`
    "diffusers": (
        *("down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj", {"_class_name": "UNet"}, 8 * H),
        second_is_activated,
    ),
    "ldm": (
        *("model.diffusion_model.input_blocks.1.1.transformer_blocks.0.ff.net.0.proj", {}, 8 * H),
        second_is_activated,
    ),
    # SwiGLUPacked: `x1, x2 = self.fc1(x).chunk(2, dim=-1); self.act(x1) * x2`
    "timm": ("blocks.0.mlp.fc1", TIMM, 2 * INNER, first_is_activated),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_halves_by_the_models_own_lines(name: str, tmp_path: Path) -> None:
    longname, config, rows, forward = FORWARDS[name]
    layer = nn.Linear(H, rows, bias=False)
    save_as(layer, f"{longname}.", config, tmp_path)
    found = emitted(tmp_path)
    assert set(found) == {f"{longname}_gate", f"{longname}_up"}
    x = torch.randn(5, H)
    gate, up = (x @ torch.from_numpy(found[f"{longname}_{word}"].slices[0]).T for word in ("gate", "up"))
    torch.testing.assert_close(nn.functional.gelu(gate) * up, forward(*layer(x).chunk(2, dim=-1)))


@pytest.mark.parametrize(
    ("name", "rows", "config", "note"),
    [
        ("transformer_blocks.0.ff.net.0.proj", 4 * H, {"_class_name": "FluxTransformer2DModel"}, False),
        ("transformer_blocks.0.ff.net.0.proj", 5 * H, {"_class_name": "UNet2DConditionModel"}, True),
        ("blocks.0.mlp.fc1", 4 * H, {"architecture": "vit_base_patch16_224"}, False),
        ("transformer.layers.0.ffn.proj_1", 4 * H, {"model_type": "openelm", "ffn_with_glu": False}, False),
        ("transformer_blocks.0.norm1.linear", 6 * H, {"_class_name": "SD3Transformer2DModel"}, True),
        ("blocks.0.adaLN_modulation.1", 6 * H, {}, True),
        ("model.diffusion_head.layers.0.linear", 3 * H, {"text_config": {"model_type": "qwen2"}}, True),
        ("model.layers.0.mlp.up_gate_proj", 2 * H, {"model_type": "unheard_of"}, True),
        ("encoder.layer.0.mlp.gated_layers", 2 * H, {"model_type": "bert"}, True),
        ("backbone.layers.0.mixer.x_proj", 2 * H, {"d_model": H}, True),
        ("model.layers.0.attn.gqkv_proj", 4 * H, {"model_type": "unheard_of"}, True),
        ("model.layers.0.mlp.w13_dn", 4 * H, {"model_type": "unheard_of"}, True),
        ("single_transformer_blocks.0.attn.to_qkv_mlp_proj", 9 * H, {}, True),
    ],
)
def test_what_is_whole_says_why_where_it_may_be_fused(
    name: str, rows: int, config: dict[str, Any], note: bool, tmp_path: Path
) -> None:
    save_as(nn.Linear(H, rows, bias=False), f"{name}.", config, tmp_path)
    (found,) = emitted(tmp_path).items()
    assert found[0] == name
    assert bool(found[1].note) == note


TEXT = {
    **{"vocab_size": 32, "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
TAKEN_APART: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "gte": (model("Gte", "GteModel", **TEXT), {"q", "k", "v", "up", "gate"}),
    "hrm_text": (model("HrmText", "HrmTextModel", **TEXT, head_dim=8), {"q", "k", "v", "up", "gate"}),
    "nomic_bert": (model("NomicBert", "NomicBertModel", **TEXT), {"q", "k", "v"}),
    "jina_embeddings_v3": (model("JinaEmbeddingsV3", "JinaEmbeddingsV3Model", **TEXT), {"q", "k", "v"}),
}


@pytest.mark.parametrize("name", TAKEN_APART)
def test_what_transformers_takes_apart_on_loading(name: str, tmp_path: Path) -> None:
    make, words = TAKEN_APART[name]
    built = randomise(make())
    built.save_pretrained(tmp_path)
    parts = {key: one for key, one in emitted(tmp_path).items() if key.rpartition("_")[2] in (*words, "gate")}
    assert {key.rpartition("_")[2] for key in parts} >= words
    running = {path: layer for path, layer in built.named_modules() if isinstance(layer, nn.Linear)}
    for key, one in parts.items():
        word = key.rpartition("_")[2]
        same = [
            path
            for path, layer in running.items()
            if path.endswith(f"{word}_proj") and torch.equal(layer.weight, torch.from_numpy(one.slices[0]))
        ]
        assert [("mlp" in path) for path in same] == ["mlp" in key], key
        assert not one.note


def test_inklings_gate_and_up_in_turns(tmp_path: Path) -> None:
    """By the operation with which transformers loads them."""
    loading = pytest.importorskip("transformers.core_model_loading")
    disk = {
        "model.llm.layers.0.mlp.w13_dn.weight": torch.randn(24, H),
        "model.llm.layers.1.mlp.experts.w13_weight": torch.randn(3, 24, H),
        "model.llm.layers.1.mlp.shared_experts.shared_w13_weight": torch.randn(2, 24, H),
    }
    save_file(disk, tmp_path / "model.safetensors")
    config = '{"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text", "n_shared_experts": 2}}'
    (tmp_path / "config.json").write_text(config)
    found = emitted(tmp_path)
    for name, weight in disk.items():
        stacked = weight if weight.ndim == 3 else weight[None]
        loaded = loading.Interleave(dim=1).convert({name: stacked}, [name], [name])[name]
        longname = name.removesuffix(".weight")
        for i, (gate, up) in enumerate(one.chunk(2) for one in loaded):
            expert = f".experts.{i}" if weight.ndim == 3 else ""
            torch.testing.assert_close(torch.from_numpy(found.pop(f"{longname}{expert}_gate").slices[0]), gate)
            torch.testing.assert_close(torch.from_numpy(found.pop(f"{longname}{expert}_up").slices[0]), up)
    assert not found


def test_a_layer_in_an_adapters_wrapper(tmp_path: Path) -> None:
    """Phi-4-multimodal's files hold adapters beside the layers that they are on."""
    weights = {
        "model.layers.0.self_attn.qkv_proj": torch.randn(32, H),
        "model.layers.0.mlp.gate_up_proj": torch.randn(48, H),
        "model.layers.0.self_attn.o_proj": torch.randn(H, H),
    }
    config = '{"model_type": "phi4mm", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}'
    (tmp_path / "config.json").write_text(config)
    for wrapper in ("", ".base_layer"):
        save_file({f"{name}{wrapper}.weight": one for name, one in weights.items()}, tmp_path / "model.safetensors")
        found = {key.replace(".base_layer", ""): one for key, one in emitted(tmp_path).items()}
        if not wrapper:
            plain = found
    assert set(found) == set(plain)
    assert len(found) == 6
    for key, one in found.items():
        assert (one.block_type, one.note) == (plain[key].block_type, "")
        torch.testing.assert_close(one.slices[0], plain[key].slices[0])


def test_mobilevit_v2_has_one_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = module(
        *("MobileViTV2", "mobilevitv2.modeling_mobilevitv2", "MobileViTV2LinearSelfAttention"),
        "encoder.layer.2.transformer.layer.0.attention",
        H,
    )
    built = randomise(make())
    save(built, tmp_path)
    split: list[tuple[torch.Tensor, ...]] = []
    own = torch.split
    monkeypatch.setattr(torch, "split", lambda *args, **more: (split.append(own(*args, **more)), split[-1])[1])
    given: list[torch.Tensor] = []
    fused = f"{built.prefix}.qkv_proj.convolution"
    built.get_submodule(fused).register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        inside(H, 3, 5)(built)
    found = emitted(tmp_path)
    assert f"{fused}_q" not in found  # a single row
    for word, expected in zip("kv", split[0][1:], strict=True):
        (W,) = found[f"{fused}_{word}"].slices
        torch.testing.assert_close(torch.einsum("oi,bipn->bopn", torch.from_numpy(W), given[0]), expected)


@pytest.mark.parametrize(("name", "kind"), [("d_fine", "DFine"), ("deimv2", "Deimv2")])
def test_two_gates_of_a_gateway(name: str, kind: str, tmp_path: Path) -> None:
    prefix = "model.decoder.layers.0.gateway"
    home = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    gate = randomise(getattr(home, f"{kind}Gate")(H))
    save_as(gate, f"{prefix}.", {"model_type": name}, tmp_path)
    found = emitted(tmp_path)
    gate.norm = nn.Identity()
    residual, hidden = torch.randn(2, 3, H, dtype=torch.float64)
    with torch.no_grad():
        expected = gate(residual, hidden)
    first, second = (
        torch.sigmoid(torch.cat([residual, hidden], -1) @ torch.from_numpy(found[f"{prefix}.gate_{word}"].slices[0]).T)
        for word in ("gate1", "gate2")
    )
    torch.testing.assert_close(first * residual + second * hidden, expected)
