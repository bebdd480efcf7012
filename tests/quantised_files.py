"""Quantised checkpoints in files, and what is decoded from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from shardesd.checkpoint import StoredCheckpoint, open_checkpoint
from shardesd.source import open_source

Weights = Mapping[str, torch.Tensor]


def store(folder: Path, *shards: Weights, quantization: Any = None, index: bool = True, **config: Any) -> Path:
    """A folder of one shard or several, with an index, and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file({name: value.contiguous() for name, value in shards[0].items()}, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: value.contiguous() for name, value in shard.items()}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def opened(folder: Path) -> StoredCheckpoint:
    return open_checkpoint(open_source(folder))


def decoded(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint that can be read, by name, as a scan sees it (BF16 as float32)."""
    checkpoint = opened(folder)
    found = {}
    for ref in checkpoint.shards:
        with checkpoint.open(ref, folder / ref.name) as shard:
            for tensor in shard.tensors:
                if not tensor.problem:
                    with shard.read(tensor) as raw:
                        found[tensor.name] = np.array(raw)
    return found


def labels(folder: Path) -> dict[str, str]:
    return {tensor.name: tensor.label for tensor in opened(folder).tensors()}


def problems(folder: Path) -> dict[str, str]:
    return {tensor.name: tensor.problem for tensor in opened(folder).tensors() if tensor.problem}


def same(ours: np.ndarray, theirs: torch.Tensor) -> bool:
    """Whether our float32 are a library's numbers, once rounded to its type."""
    assert ours.dtype == np.float32
    assert ours.shape == tuple(theirs.shape)
    rounded = torch.from_numpy(np.array(ours)).to(theirs.dtype)
    return torch.equal(torch.nan_to_num(rounded.float(), 7e9), torch.nan_to_num(theirs.float(), 7e9))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
