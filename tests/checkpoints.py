"""Small checkpoints for tests, and a way to run the command line in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import typer.testing
from safetensors.numpy import save_file

from shardesd.cli import app
from shardesd.demo import minilm

Tensors = dict[str, np.ndarray]


def random_weights(layers: int = 2, size: int = 24, seed: int = 0, dtype: type = np.float32) -> Tensors:
    """A tiny Llama: per layer two square and one oblong matrix, a norm, and embeddings outside the layers."""
    rng = np.random.default_rng(seed)

    def W(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    tensors = {"model.embed_tokens.weight": W(4 * size, size), "model.norm.weight": W(size)}
    for i in range(layers):
        tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = W(size, size)
        tensors[f"model.layers.{i}.self_attn.o_proj.weight"] = W(size, size)
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = W(size, 2 * size)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = W(size)
    return tensors


def one_file(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def sharded(folder: Path, tensors: Tensors, count: int = 3, *, index: bool = True) -> Path:
    """Tensors dealt in order to `count` shards, with an index or without."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        members = names[len(names) * number // count : len(names) * (number + 1) // count]
        save_file({name: tensors[name] for name in members}, folder / file)
        weight_map |= dict.fromkeys(members, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def minilm_weights() -> Tensors:
    from safetensors.numpy import load_file

    return load_file(minilm() / "model.safetensors")


def cli(*arguments: object) -> typer.testing.Result:
    """`shardesd ARGUMENTS` in this process."""
    return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "shardesd", *map(str, arguments)]


def process(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """`shardesd ARGUMENTS` in a process of its own."""
    return subprocess.run(
        command(*arguments), env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )
