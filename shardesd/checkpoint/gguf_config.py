"""What a GGUF file's metadata says of its model, in the words of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
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
    "nomic-bert-moe": "nomic_bert",
    "jina-bert-v3": "jina_embeddings_v3",
    "modern-bert": "modernbert",
    "granitehybrid": "granitemoehybrid",
    "falcon-h1": "falcon_h1",
    "nemotron_h_moe": "nemotron_h",
    "lfm2moe": "lfm2_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "glm4moe": "glm4_moe",
    "glm-dsa": "glm_moe_dsa",
    "kimi-linear": "kimi_linear",
}
"""general.architecture → model_type, where the two differ."""
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
_OWN_COUNTS: dict[str, dict[str, str]] = {
    "mamba": {"ssm.time_step_rank": "time_step_rank", "ssm.state_size": "state_size"},
    "mamba2": {"ssm.time_step_rank": "num_heads", "ssm.head_length": "head_dim"},
    "jamba": {"ssm.time_step_rank": "mamba_dt_rank", "ssm.state_size": "mamba_d_state"},
    "granitehybrid": {"ssm.time_step_rank": "mamba_n_heads", "ssm.head_length": "mamba_d_head"},
    "falcon-h1": {"ssm.time_step_rank": "mamba_n_heads", "ssm.inner_size": "mamba_d_ssm"},
    "nemotron_h": {"ssm.time_step_rank": "mamba_num_heads", "ssm.head_length": "mamba_head_dim"},
    "qwen3next": {
        "ssm.group_count": "linear_num_key_heads",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.head_length": "linear_value_head_dim",
    },
}
_OWN_COUNTS["nemotron_h_moe"] = _OWN_COUNTS["nemotron_h"]
_OWN_COUNTS["qwen35"] = _OWN_COUNTS["qwen35moe"] = _OWN_COUNTS["qwen3next"]
"""By architecture: llama.cpp has one key for what each of them calls by a word of its own."""
_LATENT = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "nope_length": "qk_nope_head_dim",
    "attention.value_length_mla": "v_head_dim",
}
"""Of multi-head latent attention."""


def hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as far as a GGUF file's metadata tells, with ``gguf_architecture``; {} where it names none."""
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    config: dict[str, Any] = {
        "gguf_architecture": architecture,
        "model_type": _MODEL_TYPES.get(architecture, architecture),
    }
    start = f"{architecture}."
    own = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
    own |= _derived(own)
    words = _COUNTS | _OWN_COUNTS.get(architecture, {})
    if "attention.kv_lora_rank" in own:
        words |= _LATENT
    for key, word in words.items():
        value = own.get(key)
        if type(value) is int and value > 0:
            config[word] = value
        elif isinstance(value, list):
            config[f"gguf_{word}"] = value  # one for each block
            some = {count for count in value if count}  # 0 in the blocks that have no attention, or no MLP
            if len(some) == 1:
                config[word] = some.pop()
    return config


def _derived(own: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that a config.json gives and the metadata only implies. Before latent attention's keys and values were
    counted apart, its plain ones were the model's own."""

    def count(key: str) -> int:
        value = own.get(key)
        return value if type(value) is int and value > 0 else 0

    inner, heads = count("ssm.inner_size"), count("ssm.time_step_rank")
    key = count("attention.key_length_mla") or count("attention.key_length")
    return {
        "ssm.head_length": inner // heads if heads and inner % heads == 0 else 0,
        "nope_length": key - count("rope.dimension_count"),
        "attention.value_length_mla": count("attention.value_length_mla") or count("attention.value_length"),
    }
