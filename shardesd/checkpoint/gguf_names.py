"""What GGUF calls a tensor or an architecture → what Hugging Face does, by the gguf package's own maps inverted.

The package maps every name that any converter has met to one of GGUF's. Of the names that lead to the same one, the
architecture's own is chosen by the tables here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

MOST_TENSORS = 1 << 20
"""In a file, each expert of a stack counted."""
_BLOCKS = {
    **dict.fromkeys(("bert", "jina-bert-v2"), "encoder.layer."),
    **dict.fromkeys(("nomic-bert", "nomic-bert-moe", "jina-bert-v3"), "encoder.layers."),
    "modern-bert": "layers.",
    "neo-bert": "transformer_encoder.",
    **dict.fromkeys(("gpt2", "starcoder", "falcon", "bloom", "gptj"), "transformer.h."),
    **dict.fromkeys(("mpt", "dbrx"), "transformer.blocks."),
    "gptneox": "gpt_neox.layers.",
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "nemotron_h_moe"), "backbone.layers."),
    "plamo2": "model.layers.layers.",
}
"""What the names of an architecture's blocks begin with; ``model.layers.`` for all others."""
_OUTSIDE = {
    **dict.fromkeys(("bert", "jina-bert-v2"), ("embeddings.",)),
    **dict.fromkeys(("nomic-bert", "nomic-bert-moe", "jina-bert-v3"), ("embeddings.", "emb_ln")),
    "phi2": ("model.embed_tokens", "model.final_layernorm", "lm_head"),
    "gptneox": ("gpt_neox.", "embed_out"),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "nemotron_h_moe"), ("backbone.embeddings", "backbone.norm_f")),
    "modern-bert": ("embeddings.tok_embeddings", "embeddings.norm", "final_norm", "head.dense"),
    "mpt": ("transformer.wte", "transformer.norm_f"),
    **dict.fromkeys(("gpt2", "starcoder", "gptj"), ("transformer.w", "transformer.ln_f")),
    **dict.fromkeys(("falcon", "bloom"), ("transformer.word_embeddings", "transformer.ln_f")),
}
_OTHERS_OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
_PREFERRED: dict[str, tuple[str, ...]] = {
    "phi2": ("self_attn.dense", "mlp.fc1", "mlp.fc2"),
    **dict.fromkeys(("phi3", "glm4", "chatglm"), ("mlp.gate_up_proj",)),
    "jina-bert-v2": ("mlp.gated_layers", "mlp.gated_layers_w", "mlp.wo"),
    "starcoder2": ("mlp.c_fc", "mlp.c_proj"),
    "llama": ("mlp.up_proj", "block_sparse_moe.gate", *(f"block_sparse_moe.experts.w{i}" for i in (1, 2, 3))),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"),
    "gptj": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    "falcon": (
        *("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *("input_layernorm", "post_attention_layernorm"),
    ),
    "jamba": (
        *("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj", "feed_forward.router"),
        *("feed_forward.experts.gate_proj", "feed_forward.experts.up_proj", "feed_forward.experts.down_proj"),
        "pre_ff_layernorm",
    ),
    "qwen35": tuple(
        f"linear_attn.{part}"
        for part in ("in_proj_qkv", "in_proj_z", "out_proj", "conv1d", "A_log", "dt_proj", "norm", "in_proj_qkvz")
    ),
    "deepseek2": tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
    "kimi-linear": (
        *("block_sparse_moe.gate", *(f"block_sparse_moe.experts.w{i}" for i in (1, 2, 3))),
        *(f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
        *("self_attn.dt_proj", "self_attn.A_log", "self_attn.o_norm", "self_attn.b_proj"),
    ),
    "dbrx": ("norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj"),
    "nomic-bert-moe": ("mlp.fc1",),
    "jina-bert-v3": ("mixer.Wqkv", "mixer.out_proj", "mlp.fc1"),
    "modern-bert": ("attn_norm", "attn.Wo", "mlp_norm", "mlp.Wi", "mlp.Wo"),
    "falcon-h1": ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    "lfm2": (
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "self_attn.out_proj"),
        *("self_attn.q_layernorm", "self_attn.k_layernorm", "operator_norm", "ffn_norm"),
    ),
    "plamo2": ("mixer.o_proj", "mlp.gate_up_proj", "pre_mixer_norm", "mixer.q", "mixer.k"),
    "mpt": ("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
}
_PREFERRED["qwen3next"] = _PREFERRED["qwen35moe"] = _PREFERRED["qwen35"]
_PREFERRED["phimoe"] = _PREFERRED["minimax-m2"] = _PREFERRED["llama"]
_PREFERRED["lfm2moe"] = (*_PREFERRED["lfm2"], "feed_forward.gate")
_PREFERRED |= dict.fromkeys(
    ("deepseek", "glm4moe", "glm-dsa", "dots1", "bailingmoe", "bailingmoe2", "ernie4_5-moe", "mistral4"),
    _PREFERRED["deepseek2"],
)
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
_USUAL += tuple(f"mamba.{part}" for part in ("in_proj", "x_proj", "dt_proj", "out_proj", "conv1d", "A_log", "D"))
_USUAL += ("mlp.experts.up_proj", "mlp.experts.down_proj", "self_attn.q_norm", "self_attn.k_norm")
_EXPERTS = re.compile(r"\bexperts\.(?=(?!gate_up_proj)\w+$)")
"""What comes before an expert's number in checkpoints that have a tensor for each."""


def _stacks(experts: str) -> dict[str, str]:
    """Of an architecture whose own checkpoints have stacks, gate and up in one."""
    return {
        "ffn_gate_exps": f"{experts}.gate_up_proj.experts.{{}}_gate",
        "ffn_up_exps": f"{experts}.gate_up_proj.experts.{{}}_up",
        "ffn_down_exps": f"{experts}.down_proj.experts.{{}}",
    }


_CUT: dict[str, dict[str, str]] = {
    "granitemoe": {
        **{
            key: f"shared_mlp.input_linear_{part}"
            for part in ("gate", "up")
            for key in (f"ffn_{part}", f"ffn_{part}_shexp")
        },
        **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.input_linear.experts.{}_gate",
        "ffn_up_exps": "block_sparse_moe.input_linear.experts.{}_up",
        "ffn_down_exps": "block_sparse_moe.output_linear.experts.{}",
    },
    "lfm2moe": {
        f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{own}"
        for part, own in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
    "nemotron_h_moe": {f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
    "gpt-oss": {**_stacks("mlp.experts"), "ffn_gate_inp": "mlp.router"},
    "llama4": {**_stacks("feed_forward.experts"), "ffn_gate_inp": "feed_forward.router"},
    "qwen3next": {"attn_gate": "linear_attn.in_proj_qkvz_z"},
}
_CUT["granitehybrid"] = _CUT["granitemoe"]
"""Parts of what the converter cuts, of which the package's maps know nothing: in a block, GGUF's end of a name → the
architecture's own, {} for an expert's number."""
_CUT_EVERYWHERE = {"attn_k_b": "self_attn.kv_b_proj_k", "attn_v_b": "self_attn.kv_b_proj_v"}
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")


def hf_name(name: str, config: Mapping[str, Any]) -> str:
    """The tensor's name in the model that the file was made from; `name` itself where the package knows none."""
    return _known(name, config).replace(".{}", "") or name


def own_parts(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """For a tensor whose parts have names of their own in that model: theirs, and how many rows they have. Empty for
    others."""
    known = _known(name, config)
    if not prod(shape):
        return []
    if len(shape) == 3 and "{}" in known and shape[0] <= MOST_TENSORS:
        return [(known.replace("{}", str(i)), shape[1]) for i in range(shape[0])]
    if len(shape) == 2 and config.get("gguf_architecture") == "qwen3next" and name.endswith(".attn_qkv.weight"):
        keys = config.get("linear_num_key_heads", 0) * config.get("linear_key_head_dim", 0)
        values = config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
        if keys and values and shape[0] == 2 * keys + values:
            whole = known.replace("in_proj_qkv", "in_proj_qkvz_{}")
            return [(whole.format(part), rows) for part, rows in (("q", keys), ("k", keys), ("v", values))]
    return []


def _known(name: str, config: Mapping[str, Any]) -> str:
    architecture = config.get("gguf_architecture")
    if not isinstance(architecture, str):
        return ""
    stem, dot, end = name.rpartition(".")
    if end not in ("weight", "bias"):
        stem, dot, end = name, "", ""
    match = _BLOCK.match(stem)
    known = _names(architecture).get(stem.replace(match[0], "blk.0.", 1) if match else stem)
    if known is None:
        return ""
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
        fitting = [name for start in (starts, "lm_head") for name in names if name.startswith(start)]
        # Some dozen other models' names, and none of this one's, tell nothing.
        own = (first or fitting or (names if len(names) == 1 or not ours.startswith("blk.") else [ours]))[0]
        chosen[ours] = _EXPERTS.sub("experts.{}.", own) if ours.endswith("_exps") else own
    cut = _CUT_EVERYWHERE | _CUT.get(architecture, {})
    return chosen | {f"blk.0.{ours}": block + own for ours, own in cut.items()}
