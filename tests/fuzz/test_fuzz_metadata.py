"""12,000 mutated headers, configs, indexes, adapters' configs and pieces of quantisation metadata: an error line or a
right shape.

Never a traceback, a hang, or more memory than what lies in the file accounts for. Each example is a seed: `mutated`
makes the same file of it every time.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from shardesd import matrices
from shardesd.checkpoint import open_checkpoint
from shardesd.checkpoint.header import DTYPE_BITS
from shardesd.errors import Offline, ShardesdError
from shardesd.opening import What, open_what
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef
from shardesd.source import open_source

SEEDS = st.integers(0, 2**32)
ODD = [
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    16,
    31,
    32,
    33,
    64,
    128,
    2**31,
    2**40,
    2**63,
    2**64,
    10**30,
    1.5,
    "",
    "x",
    None,
    True,
    [],
    {},
]
WORDS = ["", "gptq", "awq", "fp8", "gemm", "gptq_v2", "marlin", "int", "float", "nf4", "4", "\ud800", "\0", "../x"]

Entry = tuple[str, tuple[int, ...], bytes]


def quick(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


def noise(dtype: str, *shape: int) -> Entry:
    size = prod(shape) * DTYPE_BITS[dtype] // 8
    return dtype, shape, np.random.default_rng(size).integers(0, 100, size, dtype=np.uint8).tobytes()


def exact(dtype: str, *values: int) -> Entry:
    kind = {"I64": "q", "I32": "i", "U8": "B"}[dtype]
    return dtype, (len(values),), struct.pack(f"<{len(values)}{kind}", *values)


STATE = json.dumps(
    {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [16, 64]}
    | {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
).encode()
COMFY = b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}'
FAMILIES: dict[str, tuple[dict[str, Entry], dict[str, Any]]] = {
    "fp8": (
        {"a.weight": noise("F8_E4M3", 40, 24), "a.weight_scale_inv": noise("F32", 3, 2)},
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ),
    "experts": (
        {"experts.up_proj": noise("F8_E5M2", 3, 8, 12), "experts.up_proj_scale": noise("BF16", 3, 8, 1)},
        {"quant_method": "fp8"},
    ),
    "mxfp4": (
        {"experts.x_proj_blocks": noise("U8", 2, 8, 2, 16), "experts.x_proj_scales": noise("U8", 2, 8, 2)},
        {"quant_method": "mxfp4"},
    ),
    "nvfp4": (
        {
            "a.weight_packed": noise("U8", 8, 16),
            "a.weight_scale": noise("F8_E4M3", 8, 2),
            "a.weight_global_scale": noise("F32", 1),
        },
        {"quant_method": "compressed-tensors"},
    ),
    "modelopt": (
        {
            "a.weight": noise("U8", 8, 16),
            "a.weight_scale": noise("F8_E4M3", 8, 2),
            "a.weight_scale_2": noise("F32"),
        },
        {"quant_method": "modelopt"},
    ),
    "packed": (
        {
            "a.weight_packed": noise("I32", 16, 8),
            "a.weight_scale": noise("BF16", 16, 2),
            "a.weight_zero_point": noise("I32", 2, 2),
            "a.weight_shape": exact("I64", 16, 64),
            "a.weight_g_idx": exact("I32", *([0, 1] * 32)),
        },
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
    ),
    "gptq": (
        {
            "a.qweight": noise("I32", 8, 16),
            "a.qzeros": noise("I32", 2, 2),
            "a.scales": noise("F16", 2, 16),
            "a.g_idx": exact("I32", *([0, 1] * 32)),
        },
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
    ),
    "awq": (
        {"a.qweight": noise("I32", 32, 2), "a.qzeros": noise("I32", 2, 2), "a.scales": noise("F16", 2, 16)},
        {"quant_method": "awq", "version": "gemm"},
    ),
    "nf4": (
        {
            "a.weight": noise("U8", 512, 1),
            "a.weight.absmax": noise("U8", 16),
            "a.weight.quant_map": noise("F32", 16),
            "a.weight.nested_absmax": noise("F32", 1),
            "a.weight.nested_quant_map": noise("F32", 256),
            "a.weight.quant_state.bitsandbytes__nf4": ("U8", (len(STATE),), STATE),
        },
        {"quant_method": "bitsandbytes"},
    ),
    "int8": (
        {"a.weight": noise("I8", 8, 16), "a.SCB": noise("F32", 8), "a.weight_format": exact("U8", 0)},
        {"quant_method": "bitsandbytes"},
    ),
    "torchao": (
        {
            "a._weight_qdata": noise("I8", 8, 16),
            "a._weight_scale": noise("F32", 8, 1),
            "a._weight_zero_point": noise("I8", 8, 1),
        },
        {},
    ),
    "comfy": (
        {
            "a.weight": noise("F8_E4M3", 16, 24),
            "a.weight_scale": noise("F32"),
            "a.comfy_quant": ("U8", (len(COMFY),), COMFY),
        },
        {},
    ),
    "transforms": (
        {
            "a.weight": noise("I8", 8, 16),
            "a.weight_scale": noise("F32", 8, 1),
            "a.R_input.weight": noise("F32", 16, 16),
        },
        {
            "quant_method": "compressed-tensors",
            "transform_config": {
                "config_groups": {
                    "R": {
                        "type": "hadamard",
                        "head_dim": 16,
                        "apply": [
                            {"targets": ["a"], "location": "weight_input"},
                            {"targets": ["a"], "location": "input"},
                        ],
                    }
                }
            },
        },
    ),
}


def write(path: Path, entries: dict[str, Entry]) -> None:
    """A safetensors file, well formed."""
    comfy = '{"layers": {"b": {"format": "nvfp4"}}}'
    header: dict[str, Any] = {"__metadata__": {"a.weight": '{"_type": "Int8Tensor"}', "_quantization_metadata": comfy}}
    data = b""
    for name, (dtype, shape, content) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every place in a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from walk(inner, (*path, key))


def mutated(value: Any, rng: random.Random) -> Any:
    """JSON with a few places changed, dropped, renamed or taken from elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(walk(value))
        if not places:
            break
        *way, key = rng.choice(places)
        inner = value
        for step in way:
            inner = inner[step]
        kind = rng.random()
        if kind < 0.2:
            del inner[key]
        elif kind < 0.35 and isinstance(inner, dict) and isinstance(key, str):
            inner[rng.choice([*WORDS, key + "s", key[:-1], key.upper()])] = inner.pop(key)
        elif kind < 0.6 and type(inner[key]) is int:
            inner[key] += rng.choice([-inner[key], -2, -1, 1, 2, 2**32, inner[key]])
        else:
            inner[key] = copy.deepcopy(rng.choice([*ODD, *WORDS, value]))
    return value


def check(folder: Path) -> None:
    """What a scan does up to the eigensolve."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    try:
        checkpoint = open_checkpoint(open_source(folder), allow_pickle=True)
        context = matrices.Context(config=checkpoint.config, names=checkpoint.names)
        for ref in checkpoint.shards:
            with checkpoint.open(ref, folder / ref.name) as shard:
                for tensor in shard.tensors:
                    # One bit an element is the least that any format takes.
                    assert tensor.problem or tensor.numel <= 8 * size, tensor
                    assert "\n" not in tensor.problem
                    matrices.plan(tensor, context)
                    if tensor.encoding is not None:
                        with shard.read(tensor) as raw:
                            assert raw.shape == tensor.shape
                            assert raw.dtype == np.float32
                    for item in matrices.plan(tensor, context):
                        if isinstance(item, MatrixRef):
                            with shard.read(item.tensor) as raw:
                                assert all(part.shape == (item.M, item.N) for part in matrices.slices(item, raw))
    except ShardesdError as error:
        message = str(error)
    else:
        message = "all is well"
    assert message
    assert "\n" not in message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def emptied(folder: Path) -> Path:
    for file in folder.iterdir():
        file.unlink()
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unchanged_ones_decode(tmp_path: Path, family: str) -> None:
    entries, quantization = FAMILIES[family]
    write(tmp_path / "model.safetensors", entries)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    checkpoint = open_checkpoint(open_source(tmp_path))
    (tensor,) = checkpoint.tensors()
    # That a transform's matrix is a part is known by config.json, and names are counted without it.
    assert checkpoint.names is not None
    assert checkpoint.names - {"a.R_input.weight"} == {tensor.name}
    assert tensor.encoding is not None
    assert tensor.problem == ""
    check(tmp_path)


@quick(4000)
@given(seed=SEEDS)
def test_quantised_parts(folder: Path, seed: int) -> None:
    """Types, shapes, names and contents of a module's parts."""
    rng = random.Random(seed)
    entries, quantization = FAMILIES[rng.choice(list(FAMILIES))]
    entries = dict(entries)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(entries))
        dtype, shape, content = entries[name]
        sides = list(shape)
        kind = rng.random()
        if kind < 0.15 and len(entries) > 1:
            del entries[name]
            continue
        if kind < 0.3:
            entries[rng.choice(["a.weight", "a.scales", "a.qweight", "a.weight_scale", name + "_scale"])] = entries[
                name
            ]
            continue
        if kind < 0.5:
            dtype = rng.choice([word for word, bits in DTYPE_BITS.items() if bits % 8 == 0])
        elif kind < 0.7 and sides:
            sides[rng.randrange(len(sides))] = rng.choice([0, 1, 2, 3, 5, 8, 16, 17, 33])
        elif kind < 0.8:
            sides = rng.choice([[], [1], sides[::-1], [1, *sides], [*sides, 1], sides[:-1], [prod(sides)]])
        else:
            mixed = bytearray(content)
            for _ in range(rng.randint(1, 8) if mixed else 0):
                mixed[rng.randrange(len(mixed))] = rng.choice([0, 255, rng.randrange(256)])
            content = bytes(mixed)
        size = prod(sides) * DTYPE_BITS[dtype] // 8
        entries[name] = dtype, tuple(sides), (content * (size // max(1, len(content)) + 1))[:size].ljust(size, b"\1")
    emptied(folder)
    write(folder / "model.safetensors", entries)
    if rng.random() < 0.5:
        quantization = mutated(quantization, rng)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    check(folder)


@quick(1500)
@given(seed=SEEDS)
def test_configs(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    entries, quantization = FAMILIES[rng.choice(list(FAMILIES))]
    emptied(folder)
    write(folder / "model.safetensors", entries)
    config = mutated({"model_type": "llama", "hidden_size": 64, "quantization_config": quantization}, rng)
    if rng.random() < 0.2:
        (folder / "quantize_config.json").write_text(json.dumps(mutated(quantization, rng)))
    text = json.dumps(mutated(config, rng) if isinstance(config, dict) else config)
    if rng.random() < 0.2:
        text = text[: rng.randrange(len(text) + 1)]
    (folder / "config.json").write_text(text)
    check(folder)


@quick(1500)
@given(seed=SEEDS)
def test_headers(folder: Path, seed: int) -> None:
    """The JSON, and single bytes of the file."""
    rng = random.Random(seed)
    entries, _ = FAMILIES[rng.choice(list(FAMILIES))]
    emptied(folder)
    path = folder / "model.safetensors"
    write(path, entries)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:
        raw = json.dumps(mutated(json.loads(data[8 : 8 + length]), rng)).encode()
        data = struct.pack("<Q", len(raw)) + raw + data[8 + length :]
    else:
        data = scrambled(data, rng, length + 8)
    path.write_bytes(data)
    check(folder)


@quick(1000)
@given(seed=SEEDS)
def test_indexes(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    entries, quantization = FAMILIES[rng.choice(list(FAMILIES))]
    emptied(folder)
    names = list(entries)
    cut = rng.randint(1, len(names) - 1)
    shards = {"m-1-of-2.safetensors": names[:cut], "m-2-of-2.safetensors": names[cut:]}
    for file, members in shards.items():
        write(folder / file, {name: entries[name] for name in members})
    index = {"metadata": {}, "weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(mutated(index, rng)))
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    check(folder)


def scrambled(data: bytes, rng: random.Random, upto: int) -> bytes:
    mixed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(min(upto, len(mixed)))
        kind = rng.random()
        if kind < 0.6:
            mixed[at] = rng.choice([0, 1, 255, rng.randrange(256)])
        elif kind < 0.8:
            mixed[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        else:
            del mixed[at : at + rng.randint(1, 9)]
    return bytes(mixed)[: rng.choice([len(mixed), len(mixed), len(mixed), rng.randrange(len(mixed))])]


@pytest.fixture(scope="module")
def gguf_bytes(folder: Path) -> bytes:
    gguf = pytest.importorskip("gguf")
    path = folder / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    rng = np.random.default_rng(0)
    for name, kind in (("attn_q", "Q8_0"), ("attn_k", "Q4_K"), ("ffn_up", "F16")):
        writer.add_tensor(
            f"blk.0.{name}.weight",
            gguf.quants.quantize(rng.standard_normal((8, 256)).astype(np.float32), gguf.GGMLQuantizationType[kind])
            if kind != "Q4_K"
            else rng.integers(0, 256, (8, 144), dtype=np.uint8),
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@quick(1500)
@given(seed=SEEDS)
def test_gguf(folder: Path, gguf_bytes: bytes, seed: int) -> None:
    emptied(folder)
    (folder / "x.gguf").write_bytes(scrambled(gguf_bytes, random.Random(seed), 500))
    check(folder)


@pytest.fixture(scope="module")
def pickled_bytes(folder: Path) -> bytes:
    path = folder / "pytorch_model.bin"
    W = torch.arange(96.0).reshape(8, 12)
    torch.save({"a.weight": W, "b.weight": W.T, "c.bias": W[0].half()}, path)
    return path.read_bytes()


@quick(500)
@given(seed=SEEDS)
def test_pickled(folder: Path, pickled_bytes: bytes, seed: int) -> None:
    rng = random.Random(seed)
    emptied(folder)
    upto = rng.choice([700, len(pickled_bytes)])
    (folder / "pytorch_model.bin").write_bytes(scrambled(pickled_bytes, rng, upto))
    check(folder)


ODD_IN_ADAPTERS = [
    *ODD,
    *(10**400, 1e308, -1e308, float("nan"), float("inf"), "a" * 5000, "~\0", "/a/b", "org/x", "("),
    *(
        "((x|[a-z_.0-9])*)*!",
        "(a|a)*" * 20 + "!",
        "((((){1000}){1000}){1000}){1000}",
        "(?=.*){9}" * 99,
        ".*" * 99 + "!",
    ),
    *([1], ["x"], [-1], [1.5], [[0, 1]], [[0, 1], [0, 10**9]], [[0, 2]] * 6000, [0, 1], {"x": 1}, {"x": "1"}),
    *({"": [1]}, {"q_proj": 10**400}, {"q_proj": 2}, {"q_proj": None}, {"q_proj": [True, False]}, {"nblocks": -1}),
]
DEEP = "\ue000"
"""Stands for lists in lists, which `json.dumps` would not write."""


class Net(nn.Module):
    """Two layers with what adapters change: a matrix, a norm, a stack; and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))

    @staticmethod
    def layer() -> nn.Module:
        layer = nn.Module()
        layer.q_proj = nn.Linear(8, 12)
        layer.norm = nn.LayerNorm(8)
        layer.experts = nn.Module()
        layer.experts.down_proj = nn.Parameter(torch.ones(3, 8, 12))
        return layer


def kinds() -> dict[str, Any]:
    """A config of each kind of adapter, as peft has it."""
    import peft

    q = {"target_modules": ["q_proj"]}
    return {
        "lora": peft.LoraConfig(
            r=2, rank_pattern={r"layers\.(0|1)\.q_proj": 2}, alpha_pattern={"q_proj": 3}, modules_to_save=["norm"], **q
        ),
        "dora": peft.LoraConfig(r=2, use_dora=True, use_rslora=True, **q),
        "tokens": peft.LoraConfig(r=2, trainable_token_indices={"table": [1, 2]}, **q),
        "stack": peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"]),
        "adalora": peft.AdaLoraConfig(init_r=2, total_step=9, **q),
        "loha": peft.LoHaConfig(r=2, **q),
        "lokr": peft.LoKrConfig(r=20, **q),
        "ia3": peft.IA3Config(feedforward_modules=r".*\.q_proj", **q),
        "oft": peft.OFTConfig(r=0, oft_block_size=4, coft=True, **q),
        "boft": peft.BOFTConfig(boft_block_size=4, **q),
        "vera": peft.VeraConfig(r=2, **q),
        "norms": peft.LNTuningConfig(target_modules=["norm"]),
        "rows": peft.TrainableTokensConfig(target_modules=["table"], token_indices=[1, 2]),
    }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, dict[str, Any]]]:
    """Kind → (folder, its file of weights, its config). The base is "base", beside them."""
    peft = pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for kind, config in kinds().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft.get_peft_model(Net(), config).save_pretrained(root / kind)
        found[kind] = (
            root / kind,
            "adapter_model.safetensors",
            json.loads((root / kind / "adapter_config.json").read_text()),
        )
    (root / "base").mkdir()
    save_file(Net().state_dict(), root / "base" / "model.safetensors")
    (root / "mlx").mkdir()
    pair = {"layers.0.q_proj.lora_a": torch.ones(8, 2), "layers.0.q_proj.lora_b": torch.ones(2, 12)}
    save_file(pair, root / "mlx" / "adapters.safetensors")
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["q_proj"]}
    told = {"model": "org/x", "fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    found["mlx"] = root / "mlx", "adapters.safetensors", told
    (root / "diffusers").mkdir()
    pair = load_file(root / "lora" / "adapter_model.safetensors")
    pair = {name.replace("base_model.model.", "transformer."): W for name, W in pair.items() if "lora_" in name}
    save_file(pair, root / "diffusers" / "pytorch_lora_weights.safetensors")
    told = {f"transformer.{key}": value for key, value in found["lora"][2].items() if key != "peft_type"}
    found["diffusers"] = root / "diffusers", "pytorch_lora_weights.safetensors", told
    return found


def merged(folder: Path, base: Path | None) -> str:
    """The error line, or nothing where all that the adapter changes comes out in its shape."""
    try:
        checkpoint: Any = open_what(What(model=folder, base=base), ScanOptions()).checkpoint
        for ref in checkpoint.shards:
            with checkpoint.open(ref, checkpoint.source.path(ref.name)) as shard:
                for tensor in shard.tensors:
                    with shard.read(tensor) as raw:
                        assert raw.shape == tensor.shape
        checkpoint.close()
    except ShardesdError as error:
        return str(error)
    return ""


def say(folder: Path, weights: str, text: str) -> None:
    if folder.name == "diffusers":
        save_file(load_file(folder / weights), folder / weights, metadata={"lora_adapter_metadata": text})
    else:
        (folder / "adapter_config.json").write_text(text)


@quick(1500)
@given(seed=SEEDS)
def test_adapters(
    adapters: dict[str, tuple[Path, str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each key of a config with a value of another kind."""

    def offline(address: object) -> None:
        raise Offline("no network")

    monkeypatch.setattr("shardesd.source.hub.open_hub", offline)
    rng = random.Random(seed)
    folder, weights, config = adapters[rng.choice(list(adapters))]
    if rng.random() < 0.2:
        config = mutated(config, rng)
    else:
        config = copy.deepcopy(config)
        *way, key = rng.choice(list(walk(config)))
        inner: Any = config
        for step in way:
            inner = inner[step]
        inner[key] = rng.choice([*ODD_IN_ADAPTERS, DEEP])
    depth = rng.choice([50, 400, 900, 970, 5000])
    say(folder, weights, json.dumps(config).replace(json.dumps(DEEP), "[" * depth + "]" * depth))
    assert "\n" not in merged(folder, rng.choice([None, folder.parent / "base", folder.parent / "base"]))


def test_the_unchanged_adapters_merge(adapters: dict[str, tuple[Path, str, dict[str, Any]]]) -> None:
    for folder, weights, config in adapters.values():
        say(folder, weights, json.dumps(config))
        assert merged(folder, folder.parent / "base") == ""
