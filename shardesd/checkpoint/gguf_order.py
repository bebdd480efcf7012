"""Which of a GGUF file's tensors lie in another order than Hugging Face's, since llama.cpp's converters moved rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CONV1D = re.compile(r"blk\.[0-9]+\.(?:attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
_ROTARY = re.compile(r"blk\.([0-9]{1,6})\.attn_([qk])\.weight")
_ROTATED = (
    *("llama", "deci", "arcee", "smollm3", "mistral3", "nanbeige", "granite", "granitemoe", "granitehybrid"),
    *("nemotron_h", "nemotron_h_moe"),
    *("minicpm", "internlm2", "baichuan", "xverse", "olmo", "bailingmoe", "llada"),
    *("deepseek", "arctic", "chameleon"),
)
"""Architectures whose converters permute q and k: ``undo_permute``, or a call of ``permute``, in llama.cpp's."""
_KERNEL = re.compile(r"blk\.[0-9]+\.(?:ssm_conv1d|shortconv\.conv)\.weight")


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's: a depthwise convolution's kernel has its one input channel."""
    return (shape[0], 1, shape[1]) if _KERNEL.fullmatch(name) and len(shape) == 2 else shape


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
