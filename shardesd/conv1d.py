"""transformers' Conv1D: a linear layer that keeps inputs × outputs, where all others keep outputs × inputs."""

from __future__ import annotations

MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""``model_type`` of the models that have them."""
LAYERS = ("c_attn", "c_proj", "c_fc", "q_attn")
"""What they are called there."""


def is_conv1d(name: str, model_type: object) -> bool:
    """Whether a tensor, by its name, is the weight of one."""
    return model_type in MODELS and name.endswith(tuple(f".{layer}.weight" for layer in LAYERS))
