"""What GGUF calls a tensor or an architecture → what Hugging Face does, by the gguf package's own maps inverted.

The package maps every name that any converter has met to one of GGUF's. Of the names that lead to the same one, the
architecture's own is chosen by the tables here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

_MODEL_TYPES = {
    "bloom": "bloom",
    "gptneox": "gpt_neox",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "starcoder": "gpt_bigcode",
    "gpt-oss": "gpt_oss",
    "command-r": "cohere",
    "deepseek2": "deepseek_v2",
    "granitemoe": "granitemoe",
    "nomic-bert": "nomic_bert",
}
"""general.architecture → model_type, where the two differ."""
_BLOCKS = {
    "bert": "encoder.layer.",
    "jina-bert-v2": "encoder.layer.",
    "nomic-bert": "encoder.layers.",
    "gpt2": "transformer.h.",
    "starcoder": "transformer.h.",
    "falcon": "transformer.h.",
    "bloom": "transformer.h.",
    "gptj": "transformer.h.",
    "mpt": "transformer.blocks.",
    "gptneox": "gpt_neox.layers.",
    "mamba": "backbone.layers.",
    "mamba2": "backbone.layers.",
}
"""What the names of an architecture's blocks begin with; ``model.layers.`` for all others."""
_OUTSIDE = {
    **dict.fromkeys(("bert", "jina-bert-v2"), ("embeddings.",)),
    "nomic-bert": ("embeddings.", "emb_ln"),
    "phi2": ("model.embed_tokens", "model.final_layernorm", "lm_head"),
    "gptneox": ("gpt_neox.", "embed_out"),
    "mamba": ("backbone.", "lm_head"),
    "mamba2": ("backbone.", "lm_head"),
    "mpt": ("transformer.wte", "transformer.norm_f"),
    **dict.fromkeys(("gpt2", "starcoder", "gptj"), ("transformer.w", "transformer.ln_f")),
    **dict.fromkeys(("falcon", "bloom"), ("transformer.word_embeddings", "transformer.ln_f")),
}
_OTHERS_OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
_PREFERRED: dict[str, tuple[str, ...]] = {
    "phi2": ("self_attn.dense", "mlp.fc1", "mlp.fc2"),
    **dict.fromkeys(("phi3", "glm4", "chatglm", "modern-bert"), ("mlp.gate_up_proj",)),
    "jina-bert-v2": ("mlp.gated_layers", "mlp.gated_layers_w", "mlp.wo"),
    "starcoder2": ("mlp.c_fc", "mlp.c_proj"),
    "llama": ("mlp.up_proj", "block_sparse_moe.gate", *(f"block_sparse_moe.experts.w{i}" for i in (1, 2, 3))),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"),
    "gptj": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    "falcon": (
        *("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *("input_layernorm", "post_attention_layernorm"),
    ),
    "mpt": ("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
}
_PREFERRED["starcoder"] = _PREFERRED["gpt2"]
_PREFERRED["bloom"] = _PREFERRED["falcon"]
"""Ends of names that go first, where the first of the package's own isn't the architecture's."""
_USUAL: tuple[str, ...] = (
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "self_attn.qkv_proj",
    "mlp.gate",
    "mlp.experts.gate_proj",
)
_USUAL += ("mlp.experts.up_proj", "mlp.experts.down_proj", "self_attn.q_norm", "self_attn.k_norm")
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")
_CONV1D = re.compile(r"blk\.[0-9]+\.(?:attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
_ROTARY = re.compile(r"blk\.([0-9]{1,6})\.attn_([qk])\.weight")
_ROTATED = (
    *("llama", "deci", "arcee", "smollm3", "mistral3", "nanbeige", "granite", "granitemoe", "granitehybrid"),
    *("minicpm", "internlm2", "baichuan", "xverse", "olmo", "bailingmoe", "llada"),
    *("deepseek", "arctic", "chameleon"),
)
"""Architectures whose converters permute q and k: ``undo_permute``, or a call of ``permute``, in llama.cpp's."""
_COUNTS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.dimension_count": "gguf_rotary",
    "block_count": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
}


def hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as far as a GGUF file's metadata tells, with ``gguf_architecture``; {} where it names none."""
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    config: dict[str, Any] = {
        "gguf_architecture": architecture,
        "model_type": _MODEL_TYPES.get(architecture, architecture),
    }
    for key, word in _COUNTS.items():
        value = values.get(f"{architecture}.{key}")
        if type(value) is int and value > 0:
            config[word] = value
        elif isinstance(value, list):
            config[f"gguf_{word}"] = value  # one for each block
    return config


def is_transposed(name: str, config: Mapping[str, Any]) -> bool:
    """Whether Hugging Face keeps the transpose: GPT-2's Conv1D."""
    return config.get("gguf_architecture") == "gpt2" and bool(_CONV1D.fullmatch(name))


def rotated(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> int:
    """Rows of a head, for q or k whose rows llama.cpp has permuted within each head: row t·half + j lies at 2·j + t;
    0 where it hasn't."""
    match = _ROTARY.fullmatch(name)
    if not match or config.get("gguf_architecture") not in _ROTATED or len(shape) != 2:
        return 0
    heads = _heads(config, "num_attention_heads", int(match[1]))
    if match[2] == "k":
        heads = _heads(config, "num_key_value_heads", int(match[1]), heads)
    rows = shape[0] // heads if heads else config.get("head_dim", config.get("gguf_rotary", 0))
    return rows if rows and rows % 2 == 0 and shape[0] % rows == 0 else 0


def _heads(config: Mapping[str, Any], word: str, block: int, otherwise: int = 0) -> int:
    """How many a block has."""
    each = config.get(f"gguf_{word}", ())
    found = each[block] if block < len(each) else config.get(word, otherwise)
    return found if type(found) is int and found > 0 else 0


def fused_heads(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int] | None:
    """For a fused qkv that llama.cpp sorted into all q, all k, all v, and Hugging Face keeps group by group: q heads of
    a group, and groups."""
    architecture = config.get("gguf_architecture")
    if architecture not in ("gptneox", "bloom", "falcon") or not name.endswith(".attn_qkv.weight") or len(shape) != 2:
        return None
    heads = config.get("num_attention_heads", 0)
    groups = config.get("num_key_value_heads", 1) if architecture == "falcon" else heads
    if not heads or heads % groups or shape[0] % (heads + 2 * groups):
        return None
    return heads // groups, groups


def hf_name(name: str, config: Mapping[str, Any]) -> str:
    """The tensor's name in the model that the file was made from; `name` itself where the package knows none."""
    architecture = config.get("gguf_architecture")
    if not isinstance(architecture, str):
        return name
    stem, dot, end = name.rpartition(".")
    if end not in ("weight", "bias"):
        stem, dot, end = name, "", ""
    match = _BLOCK.match(stem)
    known = _names(architecture).get(stem.replace(match[0], "blk.0.", 1) if match else stem)
    if known is None:
        return name
    if match:
        known = known.replace(".0.", f".{match[1]}.", 1)
    return known + dot + end


@cache
def _names(architecture: str) -> dict[str, str]:
    """GGUF's name in block 0, or outside, → the architecture's own."""
    import gguf

    arch = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if arch is None:
        return {}
    candidates: dict[str, list[str]] = {}
    for theirs, (_, ours) in gguf.get_tensor_name_map(arch, 1).mapping.items():
        if theirs != ours:
            candidates.setdefault(ours, []).append(theirs.removesuffix(".weight"))
    block = _BLOCKS.get(architecture, "model.layers.") + "0."
    outside = _OUTSIDE.get(architecture, _OTHERS_OUTSIDE)
    preferred = tuple(block + end for end in (*_PREFERRED.get(architecture, ()), *_USUAL))
    chosen = {}
    for ours, names in candidates.items():
        starts = (block,) if ours.startswith("blk.") else outside
        first = [name for name in preferred if name in names]
        fitting = [name for name in names if name.startswith((*starts, "lm_head"))]
        chosen[ours] = (first or fitting or names)[0]
    return chosen
