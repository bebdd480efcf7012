"""Against transformers' own modules: what is a linear layer, a convolution or an embedding there must be one here.

Tiny random models are made from configs. What is expected comes from the modules' classes, not from names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardesd.matrices import Context, plan, slices
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, Skip, TensorRef

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore"),
]

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**SIZES, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 16}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    **{"vocab_size": 99, "d_model": 32, "max_position_embeddings": 16, "pad_token_id": 0, "decoder_start_token_id": 1},
    **{
        f"{stack}_{what}": size
        for stack in ("encoder", "decoder")
        for what, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))
    },
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

# Architecture: (config class without "Config", model class, settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "BertForMaskedLM", TEXT),
    "roberta": ("Roberta", "RobertaForMaskedLM", TEXT),
    "distilbert": ("DistilBert", "DistilBertForMaskedLM", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2}),
    "electra": ("Electra", "ElectraForMaskedLM", {**TEXT, "embedding_size": 16}),
    "deberta": ("Deberta", "DebertaForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": ("DebertaV2", "DebertaV2ForMaskedLM", {**TEXT, "relative_attention": True}),
    "modernbert": ("ModernBert", "ModernBertForMaskedLM", TEXT),
    "gpt2": ("GPT2", "GPT2LMHeadModel", {**GPT, "add_cross_attention": True}),
    "bigcode": ("GPTBigCode", "GPTBigCodeForCausalLM", GPT),
    "neox": ("GPTNeoX", "GPTNeoXForCausalLM", TEXT),
    "gptj": ("GPTJ", "GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "llama": ("Llama", "LlamaForCausalLM", TEXT),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", GROUPED),
    "phi": ("Phi", "PhiForCausalLM", TEXT),
    "phi3": ("Phi3", "Phi3ForCausalLM", TEXT),
    "t5": ("T5", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "opt": ("OPT", "OPTForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 16}),
    "bloom": ("Bloom", "BloomForCausalLM", {**GPT, "hidden_size": 32}),
    "falcon": ("Falcon", "FalconForCausalLM", TEXT),
    "vit": ("ViT", "ViTForImageClassification", IMAGE),
    "dinov2": ("Dinov2", "Dinov2Model", IMAGE),
    "swin": ("Swin", "SwinModel", {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}),
    "clip": ("CLIP", "CLIPModel", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}),
    "siglip": ("Siglip", "SiglipModel", {"text_config": {**TEXT, "projection_size": 32}, "vision_config": IMAGE}),
    "resnet": ("ResNet", "ResNetModel", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}),
    "convnext": ("ConvNext", "ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}),
    "whisper": (
        "Whisper",
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "bart": ("Bart", "BartForConditionalGeneration", SEQ2SEQ),
    "wav2vec2": (
        "Wav2Vec2",
        "Wav2Vec2Model",
        {**SIZES, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (10, 3)},
    ),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2Moe", "Qwen2MoeForCausalLM", {**GROUPED, "num_experts": 4, "moe_intermediate_size": 16}),
    "deepseek-v3": (
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        {**TEXT, **MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 2},
    ),
    "gpt-oss": ("GptOss", "GptOssForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "granite-moe": ("GraniteMoe", "GraniteMoeForCausalLM", {**TEXT, "num_key_value_heads": 1, "num_local_experts": 4}),
    "mamba": ("Mamba", "MambaForCausalLM", {**TEXT, "state_size": 8}),
}


@cache
def build(architecture: str) -> Any:
    import transformers  # slow, and not for those who run other tests

    config, model, settings = MODELS[architecture]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**settings))


def fits(shape: tuple[int, ...]) -> bool:
    return min(shape) > 1 and max(shape) < 8 * min(shape)


def refs(state: dict[str, torch.Tensor]) -> list[TensorRef]:
    words = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    return [
        TensorRef(name=name, dtype=words[value.dtype], shape=tuple(value.shape), shard="s", end=value.nbytes)
        for name, value in state.items()
    ]


def planned(tensors: list[TensorRef], config: dict[str, Any], **options: Any) -> list[MatrixRef | Skip]:
    context = Context(config=config, names=frozenset(t.name for t in tensors), options=ScanOptions(**options))
    return [item for tensor in tensors for item in plan(tensor, context)]


def expected(model: torch.nn.Module) -> Iterator[str]:
    """Longnames of all matrices, by the classes of modules, with fused tensors whole."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            if not hasattr(module, "parametrizations") and min(module.weight.shape[:2]) > 1:
                yield name
        elif isinstance(module, torch.nn.MultiheadAttention):
            yield f"{name}.in_proj_weight"
        elif (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D") and fits(module.weight.shape):
            yield name
        else:
            for parameter, value in module.named_parameters(recurse=False):
                if value.ndim == 3 and type(module).__name__.endswith("Experts") and fits(value.shape[1:]):
                    yield from (f"{name}.{parameter}.experts.{i}" for i in range(len(value)))


@pytest.mark.parametrize("architecture", MODELS)
def test_every_matrix_of_every_module_is_found_and_nothing_else(architecture: str) -> None:
    model = build(architecture)
    items = planned(refs(model.state_dict()), model.config.to_dict(), split="off")
    assert sorted(item.longname for item in items if isinstance(item, MatrixRef)) == sorted(expected(model))


@pytest.mark.parametrize("architecture", MODELS)
def test_embeddings_and_norms_are_known_by_name(architecture: str) -> None:
    model = build(architecture)
    skipped = {
        item.tensor.name: item.reason
        for item in planned(refs(model.state_dict()), model.config.to_dict())
        if isinstance(item, Skip)
    }
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.nn.Embedding):
            assert skipped[f"{name}.weight"] in ("embedding", "position embedding")
        elif kind.endswith("Norm") and getattr(module, "weight", None) is not None:
            assert skipped[f"{name}.weight"] in ("norm", "vector")


@pytest.mark.parametrize("architecture", MODELS)
def test_layer_indices_count_the_blocks_from_0(architecture: str) -> None:
    model = build(architecture)
    items = planned(refs(model.state_dict()), model.config.to_dict())
    # Two blocks, or two stages, in every stack of these models.
    assert {item.layer_index for item in items} - {None} == {0, 1}


@pytest.mark.parametrize("architecture", MODELS)
def test_a_saved_checkpoint_holds_the_same_elements(architecture: str, tmp_path: Path) -> None:
    model = build(architecture)
    model.save_pretrained(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    stored = [
        TensorRef(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]), shard="s")
        for name, entry in json.loads(raw[8 : 8 + size]).items()
        if name != "__metadata__"
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    state = model.state_dict()
    first = {value.data_ptr(): name for name, value in reversed(state.items())}
    untied = {name: value for name, value in state.items() if first[value.data_ptr()] == name}
    saved, live = (
        sum(item.numel for item in planned(tensors, config, max_aspect=1e9) if isinstance(item, MatrixRef))
        for tensors in (stored, refs(untied))
    )
    assert saved == live > 0
    kinds, live_kinds = ({item.block_type for item in planned(tensors, config)} for tensors in (stored, refs(untied)))
    assert kinds == live_kinds


@pytest.mark.parametrize("architecture", ["gpt-oss", "granite-moe"])
def test_each_expert_s_bytes_are_its_own(architecture: str, tmp_path: Path) -> None:
    model = build(architecture)
    model.save_pretrained(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    base = 8 + int.from_bytes(raw[:8], "little")
    seen = 0
    for name, entry in json.loads(raw[8:base]).items():
        if name == "__metadata__" or len(entry["shape"]) != 3:
            continue
        start, end = (base + offset for offset in entry["data_offsets"])
        stack = TensorRef(name=name, dtype="F32", shape=tuple(entry["shape"]), shard="s", start=start, end=end)
        whole = np.frombuffer(raw[start:end], np.float32).reshape(stack.shape)
        for i, item in enumerate(plan(stack, Context())):
            assert isinstance(item, MatrixRef)
            own = np.frombuffer(raw[item.tensor.start : item.tensor.end], np.float32).reshape(item.tensor.shape)
            np.testing.assert_array_equal(slices(item, own)[0], whole[i])
            seen += prod(item.tensor.shape)
    assert seen == 2 * 4 * (128 * 32 + 32 * 64)  # layers × experts × (gate_up + down)
