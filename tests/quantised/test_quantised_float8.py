"""FP8 in all its scales, against torch's own float8 arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quantised_files import decoded, labels, opened, problems, random, same, store

import shardesd
from shardesd.checkpoint.quantised.codes import FLOAT8, exponent_table, float8_table

E4M3 = torch.float8_e4m3fn
NAME = "model.layers.0.mlp.up_proj.weight"


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return random(*shape, seed=sum(shape)).to(dtype)


def expand(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Each scale over its block, then cropped."""
    wide = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]


@pytest.mark.parametrize("word", FLOAT8)
def test_every_code_is_torchs_number(word: str) -> None:
    dtype = getattr(torch, {"F8_E4M3": "float8_e4m3fn"}.get(word, "float8_" + word[3:].lower()))
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(float8_table(word), theirs)


def test_powers_of_two_are_torchs() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(exponent_table(), theirs)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("scale", "block", "label"),
    [
        (torch.tensor(0.25), (40, 72), "tensor"),
        (torch.tensor([0.3]), (40, 72), "tensor"),
        (random(40, 1), (1, 72), "channel"),
        (random(40), (1, 72), "channel"),
        (random(40, 1).bfloat16(), (1, 72), "channel"),
        (random(40, 3), (1, 24), "g24"),
    ],
    ids=str,
)
def test_per_tensor_channel_and_group(
    tmp_path: Path, dtype: torch.dtype, scale: torch.Tensor, block: tuple[int, int], label: str
) -> None:
    W = codes(40, 72, dtype=dtype)
    store(tmp_path, {NAME: W, NAME + "_scale": scale})
    expected = W.float() * expand(scale.reshape(-1, scale.shape[-1] if scale.ndim == 2 else 1), block, (40, 72))
    assert same(decoded(tmp_path)[NAME], expected)
    assert labels(tmp_path) == {NAME: f"fp8_{'e4m3' if dtype == E4M3 else 'e5m2'}[{label}]"}


@pytest.mark.parametrize("shape", [(256, 384), (576, 200), (1, 129), (130, 128)])
@pytest.mark.parametrize("configured", [True, False])
def test_blocks_are_multiplied_expanded_and_cropped(tmp_path: Path, shape: tuple[int, int], configured: bool) -> None:
    """DeepSeek's kv_a_proj_with_mqa has 576 rows in blocks of 128."""
    scale = random(-(-shape[0] // 128), -(-shape[1] // 128)).abs()
    W = codes(*shape)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]} if configured else None
    store(tmp_path, {NAME: W, NAME + "_scale_inv": scale}, quantization=config)
    assert same(decoded(tmp_path)[NAME], W.float() * expand(scale, (128, 128), shape))


def test_other_blocks_need_the_config(tmp_path: Path) -> None:
    W, scale = codes(96, 160), random(2, 3)
    store(tmp_path / "a", {NAME: W, NAME + "_scale_inv": scale}, quantization={"weight_block_size": [64, 64]})
    assert same(decoded(tmp_path / "a")[NAME], W.float() * expand(scale, (64, 64), (96, 160)))
    assert labels(tmp_path / "a") == {NAME: "fp8_e4m3[64x64]"}
    store(tmp_path / "b", {NAME: W, NAME + "_scale_inv": scale})
    assert "block size" in problems(tmp_path / "b")[NAME]


@pytest.mark.parametrize(
    ("shape", "grid", "block"),
    [
        ((200, 130), (2, 1), None),  # of two parts, say: no block of 128 columns spans them
        ((200, 130), (2,), None),
        ((200, 130), (2, 1), [64, 64]),
        ((200, 130), (2, 2), [64, 64]),
        ((2, 129), (1, 3), None),  # 64x64 that nothing speaks of
        ((300, 256), (1, 2), None),
        ((96, 160), (96, 2), [1, 64]),
    ],
    ids=str,
)
def test_a_block_that_neither_config_nor_shapes_tell_is_refused(
    tmp_path: Path, shape: tuple[int, int], grid: tuple[int, ...], block: list[int] | None
) -> None:
    config = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    store(tmp_path, {NAME: codes(*shape), NAME + "_scale": random(*grid)}, quantization=config)
    assert "config" in problems(tmp_path)[NAME]
    assert "block" in problems(tmp_path)[NAME]


@pytest.mark.parametrize("grid", [(1,), (1, 1), (40,), (40, 1), (1, 72), (40, 3)])
def test_scales_that_are_of_no_block_of_the_configs(tmp_path: Path, grid: tuple[int, ...]) -> None:
    """A model's other weights may be in blocks: shapes with one answer need none."""
    W, scale = codes(40, 72), random(*grid)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    store(tmp_path, {NAME: W, NAME + "_scale": scale}, quantization=config)
    wide = scale.reshape(-1, 1) if scale.ndim < 2 else scale.repeat_interleave(24, 1) if grid == (40, 3) else scale
    assert same(decoded(tmp_path)[NAME], W.float() * wide)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_integer_scales_are_powers_of_two(tmp_path: Path, dtype: torch.dtype) -> None:
    W = codes(64, 96)
    exponents = torch.randint(100, 140, (64, 3), dtype=torch.uint8)
    store(tmp_path, {NAME: W, NAME + "_scale": exponents.view(dtype)})
    scale = torch.exp2(exponents.float() - 127)
    assert same(decoded(tmp_path)[NAME], W.float() * expand(scale, (1, 32), (64, 96)))


@pytest.mark.parametrize("grid", [(), (1,), (3, 1, 1), (3,), (3, 40), (3, 40, 1), (3, 1, 30)])
def test_stacks_of_experts(tmp_path: Path, grid: tuple[int, ...]) -> None:
    W, scale = codes(3, 40, 30), random(*grid) if grid else torch.tensor(0.5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    store(tmp_path, {name: W, name + "_scale": scale})
    wide = scale if scale.ndim == 3 else scale.reshape(3, -1, 1) if scale.numel() > 1 else scale
    assert same(decoded(tmp_path)[name], W.float() * wide)


def test_modelopts_stacks(tmp_path: Path) -> None:
    """Beside X: X_weight_scale."""
    W, scale = codes(3, 40, 30), random(3).abs()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: W, name + "_weight_scale": scale, name + "_input_scale": random(3)}
    store(tmp_path, tensors, quantization={"quant_method": "modelopt", "quant_algo": "FP8"})
    assert same(decoded(tmp_path)[name], W.float() * scale[:, None, None])
    store(tmp_path, tensors | {name + "_scale": scale.clone()})
    assert "isn't known" in problems(tmp_path)[name]


def test_stacks_in_blocks(tmp_path: Path) -> None:
    W, scale = codes(3, 200, 130), random(3, 2, 2)
    name = "model.layers.0.mlp.experts.down_proj"
    store(tmp_path, {name: W, name + "_scale_inv": scale})
    assert same(decoded(tmp_path)[name], W.float() * expand(scale, (128, 128), (3, 200, 130)))


def test_a_cast_without_scales_is_the_weight(tmp_path: Path) -> None:
    W, kernel, norm = codes(24, 16), codes(4, 3, 2, 2), codes(9)
    store(tmp_path, {NAME: W, "conv.weight": kernel, "norm.weight": norm})
    found = decoded(tmp_path)
    assert same(found[NAME], W.float())
    assert same(found["conv.weight"], kernel.float())
    assert same(found["norm.weight"], norm.float())
    assert set(labels(tmp_path).values()) == {"fp8_e4m3"}


@pytest.mark.parametrize("index", [True, False])
def test_vectors_that_were_merely_cast_are_numbers(tmp_path: Path, index: bool) -> None:
    """Norms and biases, unless a scale of theirs is there, wherever it lies; empty ones say that others are scaled."""
    W, bias, norm = codes(24, 16), codes(24), codes(9)
    first = {NAME: W, f"{NAME[:-6]}bias": bias, "norm.weight": norm, "scaled_fp8": codes(0)}
    store(tmp_path / "a", first, {"x": random(3)}, index=index)
    found = decoded(tmp_path / "a")
    assert same(found[f"{NAME[:-6]}bias"], bias.float())
    assert same(found["norm.weight"], norm.float())
    assert labels(tmp_path / "a")["scaled_fp8"] == "F8_E4M3"
    stats = shardesd.scan(tmp_path / "a", device="cpu", cache=False, stats=True).stats
    assert stats is not None
    means = dict(zip(stats["tensor"], stats["mean"], strict=True))
    assert means["norm.weight"] == pytest.approx(norm.float().mean().item())
    later = {f"{NAME[:-6]}bias_scale": random(1), "norm.weight_scale": random(1)}
    store(tmp_path / "b", first, later, index=index)
    assert labels(tmp_path / "b")["norm.weight"] == labels(tmp_path / "b")[f"{NAME[:-6]}bias"] == "F8_E4M3"
    store(tmp_path / "c", {"norm.weight": norm}, quantization={"quant_method": "fp8"})
    assert labels(tmp_path / "c") == {"norm.weight": "F8_E4M3"}


@pytest.mark.parametrize("scale", [random(4), random(4, 1, 1, 1), torch.tensor(0.3)])
def test_kernels_of_convolutions(tmp_path: Path, scale: torch.Tensor) -> None:
    kernel = codes(4, 3, 2, 2)
    store(tmp_path, {"conv.weight": kernel, "conv.weight_scale": scale})
    wide = scale.reshape(-1, 1, 1, 1) if scale.numel() > 1 else scale
    assert same(decoded(tmp_path)["conv.weight"], kernel.float() * wide)


def test_codes_without_their_scales_are_refused(tmp_path: Path) -> None:
    store(tmp_path, {NAME: codes(24, 16)}, quantization={"quant_method": "fp8"})
    assert "without scales" in problems(tmp_path)[NAME]


@pytest.mark.parametrize("scale", [random(3), random(7, 1), torch.ones(40, 72, dtype=torch.int32), torch.ones(0)])
def test_scales_that_dont_fit_are_refused(tmp_path: Path, scale: torch.Tensor) -> None:
    store(tmp_path, {NAME: codes(40, 72), NAME + "_scale": scale})
    assert problems(tmp_path)[NAME].startswith("quantised weight can't be decoded: ")


def test_int8_with_power_of_two_scales_could_be_anything(tmp_path: Path) -> None:
    tensors = {NAME: torch.ones(32, 32, dtype=torch.int8), NAME + "_scale": torch.ones(32, 2, dtype=torch.uint8)}
    store(tmp_path, tensors)
    assert "pairs of 4-bit floats" in problems(tmp_path)[NAME]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_scales_in_another_shard(tmp_path: Path, index: bool, order: int) -> None:
    W, scale = codes(256, 128), random(2, 1)
    shards = [{"model.norm.weight": random(4), NAME: W}, {NAME + "_scale_inv": scale}][::order]
    store(tmp_path, *shards, index=index)
    assert same(decoded(tmp_path)[NAME], W.float() * expand(scale, (128, 128), (256, 128)))
    assert {tensor.name for tensor in opened(tmp_path).tensors()} == {NAME, "model.norm.weight"}
    assert opened(tmp_path).names == {NAME, "model.norm.weight"}


def test_any_byte_range_is_decoded_alone(tmp_path: Path) -> None:
    from dataclasses import replace

    W, scale = codes(3, 200, 130), random(3, 2, 2)
    name = "model.layers.0.mlp.experts.down_proj"
    store(tmp_path, {name: W, name + "_scale_inv": scale})
    checkpoint = opened(tmp_path)
    (tensor,) = checkpoint.tensors()
    whole = np.ascontiguousarray(decoded(tmp_path)[name]).reshape(-1).view(np.uint8)
    with checkpoint.open(checkpoint.shards[0], tmp_path / "model.safetensors") as shard:
        for start, end in [(0, 1), (519, 521), (104_000, 208_000), (4 * 130 * 150 + 3, 4 * 130 * 410 - 1)]:
            part = replace(tensor, dtype="U8", shape=(end - start,), start=start, end=end)
            with shard.read(part) as raw:
                np.testing.assert_array_equal(raw, whole[start:end])


@pytest.mark.parametrize(
    ("scale", "block"),
    [(torch.tensor(40.0), (200, 256)), (random(200).abs() + 9, (1, 256)), (random(2, 2).abs() + 9, (128, 128))],
)
def test_gptqmodels_inverse_scales_divide(tmp_path: Path, scale: torch.Tensor, block: tuple[int, int]) -> None:
    """`weight_scale_inv` is there what its name says: gptqmodel's reference is codes / scales in float32."""
    W = codes(200, 256)
    config = {"quant_method": "fp8", "format": "float8_e4m3fn", "checkpoint_format": "fp8"}
    config |= {"weight_block_size": list(block) if scale.ndim == 2 else None}
    store(tmp_path, {NAME: W, NAME + "_scale_inv": scale}, quantization={**config, "weight_scale_semantics": "inverse"})
    wide = expand(scale.reshape(-1, scale.shape[-1] if scale.ndim == 2 else 1), block, (200, 256))
    assert same(decoded(tmp_path)[NAME], W.float() / wide)
    store(tmp_path, {NAME: W, NAME + "_scale_inv": scale}, quantization={**config, "weight_scale_semantics": "log"})
    assert "weight_scale_semantics 'log' is not supported" in problems(tmp_path)[NAME]


@pytest.mark.parametrize("shape", [(256, 512), (128, 4096), (32, 4096), (130, 300)])
def test_modelopts_blocks_keep_axes_of_one(tmp_path: Path, shape: tuple[int, int]) -> None:
    """(rows, 1, columns, 1): its columns are no rows, however many they are."""
    W = codes(*shape)
    scale = random(-(-shape[0] // 128), 1, -(-shape[1] // 128), 1).abs()
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "weight_block_size": [128, 128]}
    store(tmp_path, {NAME: W, NAME + "_scale": scale}, quantization=config)
    assert same(decoded(tmp_path)[NAME], W.float() * expand(scale[:, 0, :, 0], (128, 128), shape))
    store(tmp_path, {NAME: W, NAME + "_scale": random(1, 1, shape[0], 1, 1)})
    assert "doesn't fit" in problems(tmp_path)[NAME]


def test_chatglms_own_4_bits_are_no_int8(tmp_path: Path) -> None:
    """Two codes a byte, in int8 of half the columns; only quantization_bit tells."""
    W, scale = torch.randint(-127, 128, (40, 72), dtype=torch.int8), random(40).abs()
    store(tmp_path, {NAME: W, NAME + "_scale": scale}, model_type="chatglm", quantization_bit=4)
    assert "ChatGLM's own 4 bits" in problems(tmp_path)[NAME]
    for bits in (8, 0):
        store(tmp_path, {NAME: W, NAME + "_scale": scale}, model_type="chatglm", quantization_bit=bits)
        assert same(decoded(tmp_path)[NAME], W.float() * scale[:, None])
