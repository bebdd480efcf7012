"""Whatever a checkpoint's matrices are made of, a GPU is sent what a CPU sees: through a CPU in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from checkpoints import one_file
from gpu_on_cpu import pretend
from polars.testing import assert_frame_equal
from quantised_files import store
from safetensors.torch import save_file
from test_scan_adapters import lora

import shardesd
from shardesd.spectra import staging, upload

H = 32
SHAPES = {"self_attn.q_proj": (H, H), "self_attn.o_proj": (H, H), "mlp.up_proj": (48, H), "mlp.down_proj": (H, 48)}
SHAPES |= {"mlp.gate_proj": (300, H)}  # does not fit into one buffer


def weights(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.{name}.weight": torch.randn(shape, generator=generator).to(dtype)
        for i in range(4)
        for name, shape in SHAPES.items()
    }


def saved(folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    folder.mkdir(parents=True)
    save_file(weights(seed, dtype), folder / "model.safetensors")
    return folder


def plain(folder: Path) -> dict[str, Any]:
    return {"model": saved(folder / "plain")}


def single(folder: Path) -> dict[str, Any]:
    return {"model": saved(folder / "float32", dtype=torch.float32)}


def adapted(folder: Path) -> dict[str, Any]:
    modules = {f"model.layers.{i}.{name}": shape for i in (0, 2, 3) for name, shape in SHAPES.items()}
    lora(folder / "adapter", saved(folder / "base"), modules)
    return {"model": folder / "adapter"}


def delta(folder: Path) -> dict[str, Any]:
    return {**adapted(folder), "delta": True}


def minus(folder: Path) -> dict[str, Any]:
    return {"model": saved(folder / "one"), "minus": saved(folder / "other", 1)}


def quantised(folder: Path) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    for name, W in weights(0, torch.float32).items():
        tensors |= {
            name: W.to(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.rand(-(-W.shape[0] // 16), W.shape[1] // 16) + 0.5,
        }
    return {
        "model": store(folder / "fp8", tensors, quantization={"quant_method": "fp8", "weight_block_size": [16, 16]})
    }


def fused(folder: Path) -> dict[str, Any]:
    """Halves of a tensor, whose blocks would be longer than a buffer if their rows were rounded up."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.layers.{i}.mlp.gate_up_proj.weight": torch.randn(512, 80, generator=generator) for i in range(8)}
    return {"model": store(folder / "phi3", tensors, model_type="phi3", hidden_size=80, num_attention_heads=4)}


def stacked(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{i}.mlp.experts.{name}": rng.standard_normal((12, *shape)).astype(np.float32)
        for i in range(2)
        for name, shape in (("gate_up_proj", (2 * H, H)), ("down_proj", (H, H)))
    }
    return {"model": one_file(folder / "stacked", tensors)}


KINDS = [plain, single, adapted, delta, minus, quantised, stacked, fused]


def assert_same(found: shardesd.Result, expected: shardesd.Result) -> None:
    assert len(expected.layers) >= 12
    assert not len(expected.failed)
    assert not len(found.failed), found.failed["reason"].to_list()
    assert found.layers["longname"].to_list() == expected.layers["longname"].to_list()
    for longname, eigs in expected.spectra.items():
        assert np.allclose(found.spectra[longname], eigs, rtol=0, atol=1e-12 * eigs[-1])
    assert (found.stats is None) == (expected.stats is None)
    if found.stats is not None and expected.stats is not None:
        assert_frame_equal(found.stats, expected.stats, rel_tol=1e-9, abs_tol=1e-12)


@pytest.fixture(
    params=[(made, stats) for made in KINDS for stats in (False, True)], ids=lambda p: f"{p[0].__name__}-{p[1]}"
)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], shardesd.Result]:
    """A scan's arguments, and what a CPU sees."""
    made, stats = request.param
    how = {**made(tmp_path), "cache": False, "stats": stats}
    return how, shardesd.scan(**how, device="cpu")


def test_a_gpu_is_sent_what_a_cpu_sees(
    case: tuple[dict[str, Any], shardesd.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    how, expected = case
    pretend(monkeypatch, 1 << 14)
    assert_same(shardesd.scan(**how), expected)


@pytest.mark.gpu
def test_on_a_gpu(case: tuple[dict[str, Any], shardesd.Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """With buffers as small, through pinned memory."""
    how, expected = case
    for module in (upload, staging):
        monkeypatch.setattr(module, "UPLOAD_BYTES", 1 << 14)
    monkeypatch.setattr(staging, "_stagings", WeakValueDictionary())
    monkeypatch.setattr(upload, "PACKED_BYTES", 1 << 12)
    found = shardesd.scan(**how, device="cuda:0")
    assert_same(found, expected)
    assert set(found.layers["device"]) <= {"cuda:0", "cpu"}
