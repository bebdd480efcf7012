"""`--per-head` of attentions whose heads config.json counts in words of its own, or that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import emitted
from tiny_modules import model, module, randomise, save, save_as
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("transformers")

H = 32
DELTA = {
    **{"vocab_size": 64, "hidden_size": H, "intermediate_size": H, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 16, "pad_token_id": None},
}
DELTAS = {
    "qwen3_next": ("Qwen3Next", "qwen3_next", "Qwen3NextGatedDeltaNet", "norm", "out_proj"),
    "qwen3_5": ("Qwen3_5Text", "qwen3_5", "Qwen3_5GatedDeltaNet", "norm", "out_proj"),
    "olmo_hybrid": ("OlmoHybrid", "olmo_hybrid", "OlmoHybridGatedDeltaNet", "o_norm", "o_proj"),
}


@pytest.mark.parametrize("name", DELTAS)
def test_the_output_of_linear_attention_takes_value_heads(name: str, tmp_path: Path) -> None:
    """The norm before it works on one head at a time: each must meet its own columns."""
    config, home, kind, norm, out = DELTAS[name]
    prefix = "model.layers.0.linear_attn"
    types = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    built = randomise(module(config, f"{home}.modeling_{home}", kind, prefix, 0, **{**DELTA, **types})())
    save(built, tmp_path)
    heads = {key: one for key, one in emitted(tmp_path, per_head=True).items() if f".{out}.head." in key}
    assert not any(one.note for one in heads.values())
    attention = built.get_submodule(prefix)
    seen: list[torch.Tensor] = []
    attention.get_submodule(norm).register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        expected = attention(torch.randn(2, 5, H, dtype=torch.float64))
        (given,) = seen
        given = given.reshape(10, len(heads), -1)
        own = sum(
            given[:, i] @ torch.from_numpy(heads[f"{prefix}.{out}.head.{i}"].slices[0]).T for i in range(len(heads))
        )
    torch.testing.assert_close(own, expected.reshape(10, -1), rtol=1e-5, atol=1e-7)


SIZES = {"hidden_size": H, "num_hidden_layers": 1, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
SEAMLESS = {
    **{"hidden_size": H, "vocab_size": 32, "t2u_vocab_size": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"t2u_encoder_layers": 1, "t2u_decoder_layers": 1, "speech_encoder_layers": 1, "encoder_ffn_dim": 24},
    **{"decoder_ffn_dim": 24, "t2u_encoder_ffn_dim": 24, "t2u_decoder_ffn_dim": 24, "unit_embed_dim": 16},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "t2u_encoder_attention_heads": 8},
    **{"t2u_decoder_attention_heads": 16, "speech_encoder_intermediate_size": 24, "unit_hifi_gan_vocab_size": 32},
    **{"speech_encoder_attention_heads": 2, "lang_embed_dim": 8, "spkr_embed_dim": 8, "upsample_initial_channel": 32},
}
ONE_BY_ONE: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "seamless": (model("SeamlessM4T", "SeamlessM4TModel", **SEAMLESS), "t2u_model", 12),
    "flava": (
        model(
            "Flava",
            "FlavaModel",
            hidden_size=H,
            image_config={**SIZES, "num_attention_heads": 2},
            text_config={**SIZES, "num_attention_heads": 4, "vocab_size": 32},
            multimodal_config={**SIZES, "num_attention_heads": 8},
        ),
        "_model.encoder",
        9,
    ),
}


def heads_of(attention: nn.Module) -> int:
    """As the module counts them."""
    return next(
        int(getattr(attention, word)) for word in ("num_heads", "num_attention_heads") if hasattr(attention, word)
    )


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_stack_has_its_own_number(name: str, tmp_path: Path) -> None:
    make, where, count = ONE_BY_ONE[name]
    built = randomise(make())
    built.save_pretrained(tmp_path)
    found = emitted(tmp_path, per_head=True)
    layers: dict[str, Any] = {
        path: layer
        for path, layer in built.named_modules()
        if isinstance(layer, nn.Linear)
        and where in path
        and path.endswith(
            ("query", "key", "value", "q_proj", "k_proj", "v_proj", "attn.out_proj", "attention.out_proj")
        )
    }
    assert len(layers) == count
    for path, layer in layers.items():
        number = heads_of(built.get_submodule(path.rpartition(".")[0]))
        for i in range(number):
            side = 1 if path.endswith("out_proj") else 0
            expected = layer.weight.chunk(number, dim=side)[i]
            torch.testing.assert_close(torch.from_numpy(found[f"{path}.head.{i}"].slices[0]), expected.detach())
        assert f"{path}.head.{number}" not in found


@pytest.mark.parametrize(
    ("make", "end"),
    [
        (
            module(
                *("GroupViTVision", "groupvit.modeling_groupvit", "GroupViTAssignAttention"),
                "vision_model.encoder.stages.0.downsample.assign",
                hidden_size=H,
            ),
            "assign.q_proj",
        ),
        (
            module(
                *("MobileBert", "mobilebert.modeling_mobilebert", "Bottleneck"),
                "mobilebert.encoder.layer.0.bottleneck",
                num_attention_heads=4,
                intra_bottleneck_size=32,
            ),
            "bottleneck.attention.dense",
        ),
    ],
    ids=["groupvit", "mobilebert"],
)
def test_what_has_no_heads_is_not_cut(make: Callable[[], nn.Module], end: str, tmp_path: Path) -> None:
    built = randomise(make())
    save(built, tmp_path)
    found = emitted(tmp_path, per_head=True)
    assert not [name for name in found if ".head." in name and not name.endswith("out_proj")]
    assert not [one for one in found.values() if one.note]
    assert any(name.endswith(end) for name in found)


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [({"ffn_hidden_size": 48}, True), ({"inner_hidden_size": 96}, False), ({}, None)],
)
def test_the_first_chatglm_has_no_gate(sizes: dict[str, int], cut: bool | None, tmp_path: Path) -> None:
    """By the code on the Hub: `GLU` of 6B's first version is dense_h_to_4h, GELU, dense_4h_to_h."""
    name = "transformer.layers.0.mlp.dense_h_to_4h"
    layer = nn.ModuleDict({"dense_h_to_4h": nn.Linear(H, 96, bias=False)})
    save_as(layer, "transformer.layers.0.mlp.", {"model_type": "chatglm", **sizes}, tmp_path)
    found = emitted(tmp_path)
    assert set(found) == ({f"{name}_gate", f"{name}_up"} if cut else {name})
    assert bool(next(iter(found.values())).note) == (cut is None)


def test_a_layer_s_heads_are_counted_as_its_own_config_has_them(tmp_path: Path) -> None:
    """Its one head of keys is as long as the two of the others."""
    types = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "head_dim": 8}
    own = {"1": {"head_dim": 16, "num_key_value_heads": 1}}
    home = "embedding_gemma2.modeling_embedding_gemma2"
    built = randomise(
        module(
            "EmbeddingGemma2Text",
            home,
            "EmbeddingGemma2TextModel",
            "model",
            **{**sizes, **more, "intermediate_size": 48, "layer_types": types, "per_layer_config": own},
        )()
    )
    save(built, tmp_path)
    found = emitted(tmp_path, per_head=True)
    for i, layer in enumerate(built.model.layers):
        attention = layer.self_attn
        size = attention.head_dim
        for word in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, word).out_features
            heads = [key for key in found if f"layers.{i}.self_attn.{word}.head." in key]
            whole = [key for key in found if key.endswith(f"layers.{i}.self_attn.{word}")]
            assert len(heads) == (rows // size if rows > size else 0)
            assert len(whole) == (rows == size)
        assert not any(one.note for key, one in found.items() if f"layers.{i}.self_attn" in key)
