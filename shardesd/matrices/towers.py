"""Which part of config.json tells of a tensor, and what its sizes are called there.

A model of several towers (text, vision, audio …) has a config within its config for each. A tensor's name says which
tower it is in; a tensor that names none belongs to the text, but what leads from one to another to none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Keys of config.json that hold a tower's config, and the components of names that lead into that tower.
_TOWERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("thinker_config",), r"thinker"),
    (("vlm_config",), r"vlm|paligemma"),
    (("talker_config",), r"talker"),
    (("token2wav_config", "code2wav_config"), r"token2wav|code2wav"),
    (
        ("vision_config", "visual", "vision_encoder_config", "vit_config"),
        r"visual|vit|vision\w*|image_encoder|image_tower|video_tower|img_\w+|patch_embed\w*",
    ),
    (("image_config",), r"image_model"),
    (("multimodal_config",), r"multimodal_model"),
    (("audio_config", "audio_encoder", "speech_config", "sound_config"), r"audio\w*|speech\w*|sound\w*"),
    (("qformer_config",), r"q_?former"),
    (("text_config", "llm_config", "language_config", "text_encoder"), r"text\w*|language_model|llm"),
    (("backbone_config",), r"backbone|conv_encoder"),
    (("encoder", "encoder_config"), r"encoder"),
    (("decoder",), r"decoder"),
)
_DEFAULT = ("text_config", "llm_config", "language_config", "thinker_config")
_INTO = tuple((keys, re.compile(rule)) for keys, rule in _TOWERS)
_BETWEEN = "multi_modal_projector"
_LONGEST_NAME = 300
_DEEPEST = 4

# One word for what different models call differently. The first key that holds a positive integer counts.
ALIASES: dict[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": (
        *("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads", "multi_query_group_num"),
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "experts": (
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts"),
    ),
}
# What a config that leaves a key out means.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "RefinedWebModel": {"multi_query": True, "new_decoder_architecture": False},
    "RefinedWeb": {"multi_query": True, "new_decoder_architecture": True},
    "gpt_bigcode": {"multi_query": True},
    "chatglm": {"multi_query_attention": False},
    "openelm": {"ffn_with_glu": True},
}


class Values:
    """The sizes that layouts are made of, by name: of one tensor's tower in config.json, and of the tensor itself.

    Names are keys of the config, dotted ones for a config within it (``ffn_config.moe_num_experts``), the words of
    `ALIASES`, and what `own` gives (``rows``, ``columns``, ``kernel``).
    """

    def __init__(
        self, name: str, config: Mapping[str, Any], own: Mapping[str, int] | None = None, layer: int | None = None
    ) -> None:
        """`layer`: the number of the layer, of which the config may say other things than of all."""
        self.config = _of_layer(layer, tower(name, config))
        model_type = self.config.get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else ""
        parts = name[:_LONGEST_NAME].split(".")
        self._stack = next((part for part in parts if part in ("encoder", "decoder")), "")
        self._own = own or {}

    def __call__(self, name: str) -> Any:
        """An int, a bool or a text; None where there is no such value. A null counts as none."""
        if name in self._own:
            return self._own[name]
        if name in ALIASES:
            return self._alias(name)
        value = self._key(name)
        return _DEFAULTS.get(self.model_type, {}).get(name) if value is None else value

    def _alias(self, name: str) -> int | None:
        keys = ALIASES[name]
        if name == "heads" and self._stack:
            keys = (f"{self._stack}_attention_heads", *keys)
        for key in keys:
            value = self._key(key)
            if type(value) is int and value > 0:
                return value
        if name == "kv_heads":
            return self._alias("heads")
        if name == "head_dim":
            hidden, heads = self._alias("hidden"), self._alias("heads")
            return hidden // heads if hidden and heads and hidden % heads == 0 else None
        return None

    def _key(self, name: str) -> Any:
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if type(value) is list and value and all(type(side) is int and side == value[0] for side in value):
            return value[0]  # patch_size of equal sides
        return value if type(value) in (int, bool, str) else None


def _of_layer(layer: int | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    each = config.get("per_layer_config")
    if layer is None or not isinstance(each, dict):
        return config
    own = next((value for key, value in each.items() if key.isdecimal() and int(key) == layer), None)
    return {**config, **own} if isinstance(own, dict) else config


def tower(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the tower that the tensor `name` is in, with the ``model_type`` of the whole where it has none."""
    parts = name[:_LONGEST_NAME].split(".")
    for _ in range(_DEEPEST):
        inner, parts = _inner(parts, config)
        if inner is None:
            break
        config = (
            inner if isinstance(inner.get("model_type"), str) else {**inner, "model_type": config.get("model_type")}
        )
    return config


def _inner(parts: list[str], config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, list[str]]:
    # What JSON calls an object is a dict; to ask each whether it is a Mapping takes ten times as long.
    if dict not in map(type, config.values()):
        return None, parts
    inside = [(config[key], rule) for keys, rule in _INTO for key in keys if isinstance(config.get(key), dict)]
    for i, part in enumerate(parts):
        for inner, rule in inside:
            if rule.fullmatch(part):
                return inner, parts[i + 1 :]
    for key in _DEFAULT if _BETWEEN not in parts else ():
        if isinstance(config.get(key), dict):
            return config[key], parts
    return None, parts
