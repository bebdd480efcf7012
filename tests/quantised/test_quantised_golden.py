"""GPTQ, AWQ, NVFP4 and MXFP4 as auto-gptq, gptqmodel, autoawq and NVIDIA's modelopt packed them, and what these make of
them: tensors in tests/golden, made by the script beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from quantised_files import decoded, labels, same, store
from safetensors import safe_open

GOLDEN = Path(__file__).parent.parent / "golden" / "quantised.safetensors"
BASE = "model.layers.0.self_attn.q_proj"

with safe_open(GOLDEN, "pt") as _file:
    CASES = {name: json.loads(text) for name, text in _file.metadata().items()}


@pytest.mark.parametrize("case", sorted(CASES))  # safetensors gives them in any order
def test_what_a_library_packed_is_what_it_makes_of_it(tmp_path: Path, case: str) -> None:
    with safe_open(GOLDEN, "pt") as file:
        parts = {name.partition("|")[2]: file.get_tensor(name) for name in file.keys() if name.startswith(f"{case}|")}  # noqa: SIM118
    expected: torch.Tensor = parts.pop("expected")
    assert len(np.unique(expected.float())) > 10  # no trivial one
    store(tmp_path, {f"{BASE}.{name}": value for name, value in parts.items()}, quantization=CASES[case]["config"])
    assert same(decoded(tmp_path)[f"{BASE}.weight"], expected)
    assert labels(tmp_path) == {f"{BASE}.weight": CASES[case]["label"]}
