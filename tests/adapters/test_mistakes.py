"""Planted mistakes are caught: by the comparison with peft, or by the matching rules where they must be errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft_cases import Case, assert_equal, gpt2, llama, make_case, merge, refs_of
from safetensors.torch import load_file

from shardesd.adapters import plan_merge
from shardesd.adapters.load import adapter_from_tensors
from shardesd.errors import AdapterError

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def compare(case: Case, tensors: dict[str, torch.Tensor], changes: dict[str, Any] | None = None) -> None:
    adapter = adapter_from_tensors("planted", {**case.adapter.config.raw.data, **(changes or {})}, tensors)
    assert_equal(merge(plan_merge([adapter], refs_of(case.base), case.config), case.base), case.merged)


@pytest.fixture
def case(tmp_path: Path) -> tuple[Case, dict[str, torch.Tensor]]:
    made = make_case(llama(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    compare(made, tensors)
    return made, tensors


def test_wrong_alpha(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(AssertionError, match="differs by"):
        compare(*case, {"lora_alpha": 8.001})


def test_wrong_rslora(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(AssertionError, match="differs by"):
        compare(*case, {"use_rslora": True})


def test_wrong_rank(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(AdapterError, match=r"lora_A.weight has rank 4, but the config says r=8 for model.layers.0"):
        compare(*case, {"r": 8})


def test_transposed_a(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    made, tensors = case
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"].T.contiguous()
    with pytest.raises(AdapterError, match=r"lora_A.weight \[16, 4\] and .*lora_B.weight \[16, 4\] don't fit"):
        compare(made, tensors)


def test_transposed_square_a(tmp_path: Path) -> None:
    made = make_case(llama(), LoraConfig(r=16, target_modules=["q_proj"]), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"].T.contiguous()
    with pytest.raises(AssertionError, match=r"q_proj.weight: differs"):
        compare(made, tensors)


def test_missing_module(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    made, tensors = case
    kept = {name: value for name, value in tensors.items() if not name.startswith(Q)}
    with pytest.raises(AssertionError, match=r"layers.0.self_attn.q_proj.weight: differs"):
        compare(made, kept)


def test_half_a_module(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    made, tensors = case
    del tensors[f"{Q}.lora_B.weight"]
    with pytest.raises(AdapterError, match=r"layers.0.self_attn.q_proj has lora_A but no lora_B"):
        compare(made, tensors)


def test_extra_module(case: tuple[Case, dict[str, torch.Tensor]]) -> None:
    made, tensors = case
    extra = {name.replace("layers.0", "layers.7"): value for name, value in tensors.items() if name.startswith(Q)}
    with pytest.raises(
        AdapterError, match=r"layers.7.self_attn.q_proj.lora_A.weight finds no tensor model.layers.7"
    ) as error:
        compare(made, tensors | extra)
    assert "nearest: model.layers." in str(error.value)
    assert "\n" not in str(error.value)


def test_square_matrix_with_the_wrong_fan_in_fan_out(tmp_path: Path) -> None:
    """The class of the model decides, as in peft; only without one does the flag, and then a wrong one shows."""
    made = make_case(gpt2(), LoraConfig(r=3, target_modules=["attn.c_proj"]), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    compare(made, tensors, {"fan_in_fan_out": False})
    made.config.pop("model_type")
    compare(made, tensors, {"fan_in_fan_out": True})
    with pytest.raises(AssertionError, match=r"c_proj.weight: differs"):
        compare(made, tensors, {"fan_in_fan_out": False})


def test_hints_of_a_live_model_decide_for_square_matrices(tmp_path: Path) -> None:
    made = make_case(gpt2(), LoraConfig(r=3, target_modules=["attn.c_proj"]), tmp_path)
    with made.adapter:
        hints = {name: "conv1d" for name in made.base if "c_proj.weight" in name}
        plan = plan_merge([made.adapter], refs_of(made.base), {}, hints=hints)
        assert_equal(merge(plan, made.base), made.merged)
        plan = plan_merge([made.adapter], refs_of(made.base), {}, hints={"transformer.wte.weight": "embedding"})
        with pytest.raises(AssertionError, match="differs"):
            assert_equal(merge(plan, made.base), made.merged)
