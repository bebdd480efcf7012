"""A list of thirty tiny models on a local hub, of every kind that a batch meets."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from checkpoints import Tensors, one_file, random_weights, sharded
from hub_server import HubServer
from safetensors.numpy import save

ADAPTERS = 4


def lora(seed: int, size: int = 16) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(2):
        for name in ("q_proj", "o_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((2, size)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((size, 2)).astype(np.float32)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/plain0"}
    return {"adapter_model.safetensors": save(tensors), "adapter_config.json": json.dumps(config).encode()}


def fill(hub: HubServer) -> str:
    """Puts the models on the hub; gives the list as CSV: 30 models, and two lines that say again what others say."""
    lines = ["full_name,source_model,base_model_relation,revision,likes"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for i in range(12):
            hub.add(f"org/plain{i}", one_file(folder / f"p{i}", random_weights(size=16, seed=i)))
            lines.append(f"org/plain{i},,base,,{i}")
        for i in range(6):
            hub.add(f"org/sharded{i}", sharded(folder / f"s{i}", random_weights(layers=3, size=16, seed=50 + i)))
            lines.append(f"org/sharded{i},,,,{100 + i}")
        for i in range(ADAPTERS):
            hub.add(f"org/adapter{i}", lora(i))
            lines.append(f"org/adapter{i},org/plain0,lora,,{200 + i}")
        for i in range(3):
            other = one_file(folder / f"r{i}", random_weights(size=16, seed=70 + i))
            hub.add(f"org/plain{i}", other, branch="v1")
            lines.append(f"org/plain{i},,,v1,{300 + i}")
        broken = random_weights(size=16, seed=90)
        broken["model.layers.0.self_attn.q_proj.weight"][0, 0] = np.nan
        hub.add("org/nan", one_file(folder / "nan", broken))
        whole = (one_file(folder / "t", random_weights(size=16, seed=91)) / "model.safetensors").read_bytes()
        hub.add("org/truncated", {"model.safetensors": whole[:-100]})
    hub.add("org/gated", {"model.safetensors": whole, "config.json": b"{}"}, gated=True)
    hub.add("org/pickled", {"pytorch_model.bin": b"x", "config.json": b"{}"})
    for name in ("nan", "truncated", "gated", "pickled", "missing"):
        lines.append(f"org/{name},,,,")
    assert len(lines) == 31
    return "\n".join([*lines, "org/plain3,,base,,3", "org/sharded1,,,,101"]) + "\n"
