"""Models whose files call tensors otherwise than their modules do, and weights with an axis for heads or groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from emitted import emitted
from tiny_modules import model, randomise, save
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}
TEXT = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}
DEEPSEEK4 = {**TEXT, **MOE, "q_lora_rank": 16, "qk_rope_head_dim": 4, "sliding_window": 8}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "axk2": model("AXK2", "AXK2ForCausalLM", **{**TEXT, **MOE, **LATENT, "num_key_value_heads": 4}),
    "mistral_large4": model(
        "MistralLarge4",
        "MistralLarge4ForConditionalGeneration",
        vision_config={**IMAGE, "head_dim": 8, "model_type": "pixtral"},
        text_config={**TEXT, **MOE, **LATENT, "model_type": "mistral_large4_text"},
    ),
    "deepseek_v4": model("DeepseekV4", "DeepseekV4ForCausalLM", **DEEPSEEK4),
    "cosmos3_omni": model(
        "Cosmos3Omni",
        "Cosmos3OmniForConditionalGeneration",
        text_config={**TEXT, "model_type": "qwen3_vl_text"},
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4},
            **{"out_hidden_size": 32, "model_type": "qwen3_vl_vision"},
        },
        image_token_id=18,
        video_token_id=38,
    ),
    "pi0": model(
        "PI0",
        "PI0ForConditionalGeneration",
        vlm_config={
            "vision_config": {**IMAGE, "projection_dim": 16, "model_type": "siglip_vision_model"},
            "text_config": {**TEXT, "model_type": "gemma"},
            **{"image_token_index": 29, "vocab_size": 96, "projection_dim": 16, "model_type": "paligemma"},
        },
        dit_config={**TEXT, "model_type": "gemma"},
    ),
    "step3p7": model(
        "Step3p7",
        "Step3p7ForConditionalGeneration",
        vision_config={**IMAGE, "max_position_embeddings": 64},
        text_config={**TEXT, **MOE},
        image_token_id=18,
    ),
}


def spectra(folder: Path) -> list[np.ndarray]:
    """Singular values of what is emitted. Some files have a head's rows in another order, which don't change them."""
    found = []
    for one in emitted(folder).values():
        if len(one.slices[0]) != TEXT["vocab_size"]:  # some write a head of the vocabulary that the model shares
            found.append(np.sort(np.concatenate([np.linalg.svd(W, compute_uv=False) for W in one.slices])))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_file_s_names_give_the_matrices_that_the_module_s_names_give(name: str, tmp_path: Path) -> None:
    built = randomise(MODELS[name]())
    for folder in ("file", "modules"):
        (tmp_path / folder).mkdir()
    built.save_pretrained(tmp_path / "file")
    save(built, tmp_path / "modules")
    ours, theirs = spectra(tmp_path / "file"), spectra(tmp_path / "modules")
    assert len(ours) == len(theirs)
    for one in ours:
        assert any(one.shape == other.shape and np.allclose(one, other) for other in theirs)


def test_a_group_of_heads_has_an_output_projection_of_its_own(tmp_path: Path) -> None:
    built = randomise(MODELS["deepseek_v4"]())
    built.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    layer = built.model.layers[0].self_attn.o_a_proj
    groups, inputs = layer.n_groups, layer.in_features
    for i in range(groups):
        x = torch.zeros(inputs, 1, groups, inputs, dtype=torch.float64)
        x[:, 0, i] = torch.eye(inputs)
        with torch.no_grad():
            expected = layer(x)[:, 0, i].T.numpy()
        (name,) = [key for key in found if key.endswith(f"layers.0.attn.wo_a.experts.{i}")]
        np.testing.assert_allclose(found[name].slices[0], expected)


def test_the_query_and_its_gate_lie_side_by_side_in_each_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = randomise(MODELS["axk2"]())
    built.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    attention = built.model.layers[1].self_attn
    projection = attention.q_gate_proj
    told = torch.randn(1, 1, projection.out_features, dtype=torch.float64, requires_grad=True)
    home = __import__(type(attention).__module__, fromlist=["_"])
    queries: list[torch.Tensor] = []

    def caught(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> Any:
        if module is not attention:
            return own(module, query, *_, **__)
        queries.append(query)
        raise StopIteration

    own = home.eager_attention_forward
    monkeypatch.setattr(home, "eager_attention_forward", caught)
    built.config._attn_implementation = "eager"
    monkeypatch.setattr(projection, "forward", lambda x: told)
    with pytest.raises(StopIteration):
        built(torch.tensor([[5]]))
    (gradient,) = torch.autograd.grad(queries[0].square().sum(), told)
    rows = gradient[0, 0] != 0
    W = projection.weight.detach()
    np.testing.assert_array_equal(found["model.layers.1.self_attn.q_b_proj_q"].slices[0], W[rows].numpy())
    np.testing.assert_array_equal(found["model.layers.1.self_attn.q_b_proj_gate"].slices[0], W[~rows].numpy())


def test_an_adapter_of_gate_and_up_is_cut_as_they_are(tmp_path: Path) -> None:
    settings = {**SIZES, "num_key_value_heads": 4, "vocab_size": 96, "layers_block_type": ["mamba", "hybrid"]}
    more = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 16}
    built = randomise(model("Zamba2", "Zamba2Model", **settings, **more, use_shared_attention_adapter=True)())
    save(built, tmp_path)
    found = emitted(tmp_path)
    (mlp,) = [layer for layer in built.modules() if type(layer).__name__ == "Zamba2MLP"]
    given: list[torch.Tensor] = []
    mlp.act_fn.forward = lambda gate: given.append(gate) or torch.ones_like(gate)
    mlp.down_proj.forward = lambda product: product
    with torch.no_grad():
        plain = mlp.gate_up_proj.weight.clone()
        mlp.gate_up_proj.weight.zero_()
        x = torch.eye(32, dtype=torch.float64)
        up = mlp(x, next(iter(mlp.layer_dic)))
        mlp.gate_up_proj.weight.copy_(plain)
    first, second = (W.weight.detach() for W in mlp.gate_up_proj_adapter_list[0])
    (gate_name,) = [key for key in found if key.endswith("gate_up_proj_adapter_list.0.1_gate")]
    gate_W, up_W = (torch.from_numpy(found[gate_name.removesuffix("gate") + end].slices[0]) for end in ("gate", "up"))
    torch.testing.assert_close(given[0], (gate_W @ first).T)
    torch.testing.assert_close(up, (up_W @ first).T)
    assert len(second) == len(gate_W) + len(up_W)


def test_xlnet_s_weights_have_an_axis_for_heads(tmp_path: Path) -> None:
    settings = {"vocab_size": 96, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48, "d_head": 8}
    built = randomise(model("XLNet", "XLNetModel", **settings)())
    save(built, tmp_path)
    found = emitted(tmp_path)
    attention = built.layer[0].rel_attn
    eye = torch.eye(32, dtype=torch.float64)
    for word in "qkvr":
        heads = torch.einsum("ibh,hnd->ibnd", eye[:, None], getattr(attention, word))  # as its forward has it
        np.testing.assert_allclose(found[f"layer.0.rel_attn.{word}"].slices[0], heads.detach().reshape(32, 32).numpy())
    out = torch.einsum("ibnd,hnd->ibh", eye.reshape(32, 1, 4, 8), attention.o)
    np.testing.assert_allclose(found["layer.0.rel_attn.o"].slices[0].T, out.detach().reshape(32, 32).numpy())


@pytest.mark.skipif(not hasattr(transformers, "FunnelModel"), reason="transformers has no Funnel")
def test_funnel_s_positions_are_multiplied_by_a_weight_with_an_axis_for_heads(tmp_path: Path) -> None:
    settings = {"vocab_size": 96, "d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 48}
    built = randomise(model("Funnel", "FunnelModel", **settings, num_decoder_layers=1)())
    save(built, tmp_path)
    found = {key: one for key, one in emitted(tmp_path).items() if key.endswith("r_kernel")}
    kernels = {key: value for key, value in built.state_dict().items() if key.endswith("r_kernel")}
    assert set(found) == set(kernels)
    for key, kernel in kernels.items():
        out = torch.einsum("td,dnh->tnh", torch.eye(32, dtype=torch.float64), kernel)
        np.testing.assert_allclose(found[key].slices[0].T, out.reshape(32, 32).T.numpy())


def test_zamba_s_heads_have_projections_of_their_own(tmp_path: Path) -> None:
    types = ["mamba", "hybrid", "hybrid"]
    settings = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4, "vocab_size": 96, "layers_block_type": types}
    more = {"mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 3, "attention_head_dim": 16}
    built = randomise(model("Zamba", "ZambaModel", **settings, **more, use_mamba_kernels=False)())
    built.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    mixer = built.layers[0].mamba
    for i in range(2):
        x = torch.eye(mixer.x_proj_weight.shape[-1], dtype=torch.float64)
        sizes = (mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size)
        expected = (mixer.x_proj_weight[i] @ x).split(sizes)  # as its forward has it
        for word, W in zip(("dt", "B", "C"), expected, strict=True):
            own = found[f"layers.0.mamba.x_proj_weight.experts.{i}_{word}"].slices[0]
            np.testing.assert_array_equal(own, W.detach().numpy())
        own = found[f"layers.0.mamba.dt_proj_weight.experts.{i}"].slices[0]
        np.testing.assert_array_equal(own, mixer.dt_proj_weight[i].detach().numpy())


def test_recurrent_gemma_s_gates_are_a_matrix_for_each_head(tmp_path: Path) -> None:
    settings = {**SIZES, "vocab_size": 96, "num_key_value_heads": 1, "lru_width": 32, "block_types": ["recurrent"]}
    built = randomise(model("RecurrentGemma", "RecurrentGemmaModel", **settings)())
    save(built, tmp_path)
    found = emitted(tmp_path)
    (lru,) = [layer for name, layer in built.named_modules() if name == "layers.0.temporal_block.rg_lru"]
    for word in ("input_gate_weight", "recurrent_gate_weight"):
        for i, W in enumerate(getattr(lru, word)):
            own = found[f"layers.0.temporal_block.rg_lru.{word}.experts.{i}"].slices[0]
            np.testing.assert_array_equal(own, W.detach().numpy())
