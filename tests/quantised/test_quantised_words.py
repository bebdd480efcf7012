"""GPTQ and AWQ in all their variants, against encoders written here from the formats' descriptions. The codes, zero
points and scales are drawn at random, so what must come out is known without any decoder. What the libraries themselves
pack: test_quantised_golden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_files import decoded, labels, problems, same, store

from shardesd.checkpoint import open_checkpoint
from shardesd.source import open_source

BASE = "model.layers.3.self_attn.q_proj"
NAME = f"{BASE}.weight"


def bits_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Along the last axis: the lowest bit first."""
    return ((values[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(*values.shape[:-1], -1)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers (rows, n) → int32 words (rows, n · bits / 32): a stream of bits, the lowest first."""
    stream = bits_of(values, bits)
    assert stream.shape[1] % 32 == 0
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)


def gptq(
    rng: np.random.Generator, outputs: int, inputs: int, groups: int, bits: int, *, order: bool, v2: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A GPTQ module, and its weight in float16 arithmetic."""
    q = rng.integers(0, 2**bits, (inputs, outputs))
    zero = rng.integers(0, 2**bits, (groups, outputs))
    ones = np.uint32(sum(1 << at for at in range(0, 32, bits)))
    # gptq, as gptqmodel writes it: 1 is taken off whole words, and a 0 borrows from the code above it.
    zeros = (
        pack(zero, bits) if v2 else pack((zero - 1) % 8, 3) if bits == 3 else pack(zero, bits).view(np.uint32) - ones
    )
    scale = rng.standard_normal((groups, outputs)).astype(np.float16)
    g_idx = np.arange(inputs) // (inputs // groups)
    if order:
        rng.shuffle(g_idx)
    W = scale[g_idx] * (q - zero[g_idx]).astype(np.float16)
    tensors = {
        f"{BASE}.qweight": pack(q.T, bits).T,
        f"{BASE}.qzeros": zeros.view(np.int32),
        f"{BASE}.scales": scale,
        f"{BASE}.g_idx": g_idx.astype(np.int32),
    }
    stored = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}
    return stored, torch.from_numpy(np.ascontiguousarray(W.T))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_gptq(tmp_path: Path, bits: int, order: bool, v2: bool) -> None:
    tensors, W = gptq(np.random.default_rng(bits), 96, 128, 4, bits, order=order, v2=v2)
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    store(tmp_path, tensors, quantization=config)
    assert same(decoded(tmp_path)[NAME], W)
    assert labels(tmp_path) == {NAME: f"gptq{bits}[g32]"}


def test_three_bits_cross_words_as_gptq_lays_them_out() -> None:
    """AutoGPTQ's own order: ten values in word 0 and two bits of the 11th, whose third is bit 0 of word 1 …"""
    q = np.random.default_rng(0).integers(0, 8, 32).astype(np.uint32)
    words = np.zeros(3, np.uint32)
    for i in range(10):
        words[0] |= q[i] << np.uint32(3 * i)
        words[1] |= q[11 + i] << np.uint32(3 * i + 1)
        words[2] |= q[22 + i] << np.uint32(3 * i + 2)
    words[0] |= q[10] << np.uint32(30)
    words[1] |= (q[10] >> np.uint32(2)) & np.uint32(1) | q[21] << np.uint32(31)
    words[2] |= (q[21] >> np.uint32(1)) & np.uint32(3)
    np.testing.assert_array_equal(pack(q[None], 3)[0].view(np.uint32), words)


def test_gptq_without_g_idx_and_config_and_with_one_group(tmp_path: Path) -> None:
    tensors, W = gptq(np.random.default_rng(5), 64, 160, 1, 4, order=False, v2=False)
    del tensors[f"{BASE}.g_idx"]
    store(tmp_path, tensors)
    assert same(decoded(tmp_path)[NAME], W)
    assert labels(tmp_path) == {NAME: "gptq4[channel]"}


def awq(
    rng: np.random.Generator, outputs: int, inputs: int, groups: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    q = rng.integers(0, 16, (inputs, outputs))
    zero = rng.integers(0, 16, (groups, outputs))
    scale = rng.standard_normal((groups, outputs)).astype(np.float16)

    def words(values: np.ndarray) -> torch.Tensor:
        """AutoAWQ's packing: the nibble i of a word is of the column order[i] of eight."""
        packed = np.zeros((len(values), outputs // 8), np.uint32)
        for column in range(outputs // 8):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, column] |= (values[:, 8 * column + place] << (4 * i)).astype(np.uint32)
        return torch.from_numpy(packed.view(np.int32))

    spread = np.arange(inputs) // (inputs // groups)
    W = (q - zero[spread]).astype(np.float16) * scale[spread]
    tensors = {
        f"{BASE}.qweight": words(q),
        f"{BASE}.qzeros": words(zero),
        f"{BASE}.scales": torch.from_numpy(scale),
    }
    return tensors, torch.from_numpy(np.ascontiguousarray(W.T))


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
def test_awq(tmp_path: Path, configured: bool, shape: tuple[int, int]) -> None:
    tensors, W = awq(np.random.default_rng(1), *shape, 2)
    store(tmp_path, tensors, quantization={"quant_method": "awq", "version": "gemm"} if configured else None)
    assert same(decoded(tmp_path)[NAME], W)
    assert labels(tmp_path) == {NAME: f"awq4[g{shape[1] // 2}]"}


def test_layouts_of_other_kernels_are_refused(tmp_path: Path) -> None:
    tensors, _ = awq(np.random.default_rng(1), 64, 64, 2)
    store(tmp_path / "a", tensors, quantization={"quant_method": "awq", "version": "gemv"})
    assert "'gemv' layout" in problems(tmp_path / "a")[NAME]
    tensors, _ = gptq(np.random.default_rng(1), 64, 64, 2, 4, order=False, v2=False)
    store(tmp_path / "b", tensors, quantization={"quant_method": "gptq", "checkpoint_format": "marlin"})
    assert "'marlin' layout" in problems(tmp_path / "b")[NAME]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_last_group_may_be_shorter(tmp_path: Path, indexed: bool) -> None:
    """96 inputs in groups of 64, of which the config tells where there is no g_idx."""
    tensors, _ = gptq(np.random.default_rng(1), 64, 96, 2, 4, order=False, v2=True)
    config = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "group_size": 64}
    tensors[f"{BASE}.g_idx"] = (torch.arange(96) // 64).int()
    whole = decoded(store(tmp_path / "a", tensors, quantization={**config, "group_size": -1}))[NAME]
    if not indexed:
        del tensors[f"{BASE}.g_idx"]
    found = decoded(store(tmp_path / "b", tensors, quantization=config))[NAME]
    np.testing.assert_array_equal(found, whole)
    assert labels(tmp_path / "b") == {NAME: "gptq4[g64]"}


def test_without_a_config_a_shorter_last_group_hides_how_long_the_others_are(tmp_path: Path) -> None:
    tensors, _ = gptq(np.random.default_rng(1), 64, 192, 3, 4, order=False, v2=False)
    tensors[f"{BASE}.qweight"] = tensors[f"{BASE}.qweight"][:20]
    tensors[f"{BASE}.g_idx"] = (torch.arange(160) // 64).int()
    assert labels(store(tmp_path, tensors)) == {NAME: "gptq4[3 groups]"}
    assert labels(store(tmp_path, tensors, quantization={"group_size": 64})) == {NAME: "gptq4[g64]"}


def test_what_the_config_says_never_turns_one_format_into_another(tmp_path: Path) -> None:
    one, _ = gptq(np.random.default_rng(1), 64, 128, 2, 4, order=False, v2=False)
    two, _ = awq(np.random.default_rng(1), 64, 128, 2)
    store(tmp_path / "a", one, quantization={"quant_method": "awq", "version": "gemm"})
    store(tmp_path / "b", two, quantization={"quant_method": "gptq", "bits": 4})
    assert "are not 4-bit gemm's" in problems(tmp_path / "a")[NAME]
    assert "don't fit together" in problems(tmp_path / "b")[NAME]
    store(tmp_path / "c", {NAME: torch.ones(8, 8)}, quantization={"quant_method": "gptq", "bits": 4})
    assert problems(tmp_path / "c") == {}
    three, W = gptq(np.random.default_rng(1), 64, 128, 2, 3, order=True, v2=False)
    store(tmp_path / "d", three, quantization={"quant_method": "gptq", "bits": 4})  # bits may differ by layer
    assert same(decoded(tmp_path / "d")[NAME], W)


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_planar_bits_are_refused_by_name(tmp_path: Path, bits: int) -> None:
    tensors, _ = gptq(np.random.default_rng(1), 64, 64, 2, bits, order=False, v2=True)
    store(tmp_path / "a", tensors, quantization={"quant_method": "gptq", "checkpoint_format": "gptq_v2"})
    assert f"GPTQ at {bits} bits is not supported" in problems(tmp_path / "a")[NAME]
    tensors, _ = gptq(np.random.default_rng(1), 64, 64, 2, 3, order=False, v2=True)
    store(tmp_path / "b", tensors, quantization={"quant_method": "gptq", "checkpoint_format": "gptq_p"})
    assert "'gptq_p' layout" in problems(tmp_path / "b")[NAME]


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_a_missing_part_is_named(tmp_path: Path, missing: str) -> None:
    tensors, _ = awq(np.random.default_rng(1), 64, 64, 2)
    del tensors[f"{BASE}.{missing}"]
    store(tmp_path, tensors)
    assert problems(tmp_path)[NAME] == f"quantised weight can't be decoded: its {missing} is missing"


def test_a_g_idx_out_of_range_costs_its_own_matrix(tmp_path: Path) -> None:
    import shardesd

    tensors, _ = gptq(np.random.default_rng(1), 64, 64, 2, 4, order=True, v2=False)
    tensors[f"{BASE}.g_idx"][7] = 2
    store(tmp_path, tensors)
    (row,) = shardesd.stream(tmp_path)
    assert (row.longname, row.status, row.quantised) == (BASE, "failed", True)
    assert "names groups from 0 to 2, of 2" in row.reason


def test_shards_part_a_module_anywhere(tmp_path: Path) -> None:
    tensors, W = gptq(np.random.default_rng(3), 64, 64, 2, 4, order=True, v2=False)
    for number, names in enumerate([[0], [1, 2], [3], [0, 3]]):
        first = {name: value for i, (name, value) in enumerate(tensors.items()) if i in names}
        second = {name: value for name, value in tensors.items() if name not in first}
        folder = store(tmp_path / str(number), first, second)
        assert same(decoded(folder)[NAME], W)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq", "format": "gptq_v2"}},
        {"quantization_config": {"quant_method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2"}},
        {"thinker_config": {"text_config": {"quantization_config": {"checkpoint_format": "gptq_v2"}}}},
        *({place: {"quantization_config": {"checkpoint_format": "gptq_v2"}}} for place in ("llm_config", "any_config")),
        {"model_type": "llama"},
    ],
)
def test_wherever_the_config_says_how_zero_points_are_stored(tmp_path: Path, config: dict[str, Any]) -> None:
    """Where config.json says nothing, gptqmodel's quantize_config.json does, for a file that is named too."""
    tensors, W = gptq(np.random.default_rng(1), 64, 128, 2, 4, order=False, v2=True)
    store(tmp_path, tensors, **config)
    if "model_type" in config:
        (tmp_path / "quantize_config.json").write_text(json.dumps({"checkpoint_format": "gptq_v2"}))
        checkpoint = open_checkpoint(open_source(tmp_path / "model.safetensors"))
        assert checkpoint.config["quantization_config"] == {"checkpoint_format": "gptq_v2"}
    assert same(decoded(tmp_path)[NAME], W)


def test_configs_that_differ_decide_nothing(tmp_path: Path) -> None:
    tensors, _ = gptq(np.random.default_rng(1), 64, 128, 2, 4, order=False, v2=True)
    one, two = ({"quantization_config": {"checkpoint_format": layout}} for layout in ("gptq", "gptq_v2"))
    store(tmp_path / "a", tensors, thinker_config=one, talker_config=two)
    assert "'several that differ'" in problems(tmp_path / "a")[NAME]
    store(
        tmp_path / "b", tensors, quantization={"quant_method": "gptq", "format": "gptq", **two["quantization_config"]}
    )
    assert "'gptq and gptq_v2' layout" in problems(tmp_path / "b")[NAME]
