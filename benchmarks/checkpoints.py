"""Writes checkpoints of a wanted shape, one tensor at a time, so that making one needs no more memory than reading one.

python benchmarks/checkpoints.py llama OUT --hidden 2048 --mlp 5632 --layers 6
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np


def llama_shapes(hidden: int, mlp: int, layers: int, vocab: int, head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama checkpoint; `vocab` 0 leaves the embedding out, and `head` needs one."""
    if vocab:
        yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{layer}.self_attn.{name}.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (mlp, hidden)
        yield f"{layer}.mlp.up_proj.weight", (mlp, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, mlp)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if vocab and head:
        yield "lm_head.weight", (vocab, hidden)


def heavy_tailed(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """float32 elements whose rows have power-law scales, so that the ESD has a tail as trained layers' have."""
    W = generator.standard_normal(shape, dtype=np.float32)
    if len(shape) == 2:
        W *= (generator.random((shape[0], 1), dtype=np.float32) + 1e-3) ** np.float32(-0.3) / math.sqrt(shape[1])
    return W


def to_bf16(W: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = W.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write(
    folder: Path, tensors: list[tuple[str, tuple[int, ...]]], *, shard_bytes: int, config: dict[str, object]
) -> int:
    """Writes shards with an index, in bfloat16; returns the bytes of all shards."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensors:
        nbytes = 2 * math.prod(shape)
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor() as pool:  # numpy draws its numbers beside the interpreter's lock
        sizes = list(pool.map(write_shard, [folder / file for file in files], shards, range(len(shards))))
    total = sum(sizes)
    weight_map = {name: file for file, members in zip(files, shards, strict=True) for name, _ in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def write_shard(path: Path, members: list[tuple[str, tuple[int, ...]]], seed: int) -> int:
    """Writes one file; returns the bytes of its tensors."""
    header: dict[str, object] = {}
    offset = 0
    for name, shape in members:
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(seed)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, shape in members:
            to_bf16(heavy_tailed(shape, generator)).tofile(stream)
    return offset


def llama(
    folder: Path,
    *,
    hidden: int,
    mlp: int,
    layers: int,
    vocab: int = 0,
    head: bool = True,
    shard_bytes: int = 500_000_000,
) -> int:
    """A Llama-shaped checkpoint; returns its bytes."""
    config: dict[str, object] = {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers}
    shapes = list(llama_shapes(hidden, mlp, layers, vocab, head))
    return write(folder, shapes, shard_bytes=shard_bytes, config=config)


def experts(folder: Path, *, count: int) -> int:
    """Experts of 768 × 2048 in stacks of 128, beside one layer's attention; returns the bytes."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for i in range(max(1, count // 128)):
        shapes += [(f"model.layers.{i}.self_attn.{name}.weight", (2048, 2048)) for name in ("q_proj", "o_proj")]
        shapes.append((f"model.layers.{i}.mlp.experts.down_proj", (min(count, 128), 768, 2048)))
    return write(folder, shapes, shard_bytes=2_000_000_000, config={"model_type": "mixtral"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["llama", "experts"])
    parser.add_argument("--experts", type=int, default=512, help="how many, of 768 × 2048 each")
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--mlp", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--head", action=argparse.BooleanOptionalAction, default=True, help="an untied head")
    given = parser.parse_args()
    if given.kind == "experts":
        size = experts(given.out, count=given.experts)
    else:
        size = llama(
            given.out, hidden=given.hidden, mlp=given.mlp, layers=given.layers, vocab=given.vocab, head=given.head
        )
    print(f"{given.out}: {size / 1e9:.2f} GB")
