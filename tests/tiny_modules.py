"""Tiny random models and single modules of transformers, for tests of what a scan takes them apart into."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn


def randomise(model: nn.Module) -> nn.Module:
    """Every weight random, no biases."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.double().eval().named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=0.3)
    return model


def inside(*shape: int) -> Callable[[nn.Module], object]:
    """Runs the only module of what `module` makes."""
    return lambda model: model.get_submodule(model.prefix)(torch.randn(2, *shape, dtype=torch.float64))


def of(name: str, **settings: Any) -> Any:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} doesn't have {name}")
    return getattr(transformers, f"{name}Config")(**settings)


def module(config: str, home: str, name: str, prefix: str, *more: Any, **settings: Any) -> Callable[[], nn.Module]:
    """One module of a model by itself, under the name that it has there; `more` it is told beside the config."""

    def make() -> nn.Module:
        made = of(config, **settings)
        model: nn.Module = getattr(pytest.importorskip(f"transformers.models.{home}"), name)(made, *more)
        for word in reversed(prefix.split(".")):
            model = nn.ModuleDict({word: model})
        model.config, model.prefix = made, prefix  # type: ignore[assignment]
        return model

    return make


def model(config: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = of(config, **settings)
        if not hasattr(transformers, name):
            pytest.skip(f"transformers {transformers.__version__} doesn't have {name}")
        built: nn.Module = getattr(transformers, name)(made)
        return built

    return make


def save(model: nn.Module, folder: Path) -> None:
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)


def save_as(model: nn.Module, prefix: str, config: dict[str, Any], folder: Path) -> None:
    """A module's weights under the names that they have in a model of this config.json."""
    weights = {f"{prefix}{name}": value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
