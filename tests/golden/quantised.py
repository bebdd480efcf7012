"""Makes quantised.safetensors: small weights packed by the formats' own libraries, and what these make of them.

    pip download --no-deps auto-gptq==0.7.1 gptqmodel==7.7.0 autoawq==0.2.9 nvidia-modelopt==0.47.0
    python tests/golden/quantised.py FOLDER     # where they are unpacked: ag/, gptqmodel-7.7.0/, autoawq-0.2.9/, mo/

On CPUs, without their kernels. Of each case the stored tensors are called ``case|name``, and the library's own
dequantised weight (outputs × inputs, in its type) ``case|expected``; the header's metadata holds, by case, the
quantization_config that such a checkpoint has and the row's dtype. gptqmodel needs device-smi, logbar, tokenicer,
pypcre, defuser, accelerate, datasets, pyarrow, pillow, dill; modelopt needs omegaconf, requests.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Case = tuple[str, dict[str, torch.Tensor], torch.Tensor, dict[str, Any], str]
INPUTS, OUTPUTS, GROUP = 64, 32, 32


def load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(bits: int, order: bool, least: int, group: int = GROUP) -> tuple[Any, ...]:
    """A half-precision layer whose weight lies on a grid, its scales and zero points (outputs, groups), and g_idx."""
    generator = torch.Generator().manual_seed(bits)
    groups = INPUTS // group
    g_idx = torch.arange(INPUTS) // group
    if order:
        g_idx = g_idx[torch.randperm(INPUTS, generator=generator)]
    scale = (torch.rand(OUTPUTS, groups, generator=generator) / 8 + 0.01).half().float()
    zero = torch.randint(least, 2**bits, (OUTPUTS, groups), generator=generator).float()
    q = torch.randint(0, 2**bits, (OUTPUTS, INPUTS), generator=generator)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = ((q - zero[:, g_idx]) * scale[:, g_idx]).half()
    return linear.half(), scale, zero, g_idx.int()


def stored(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().contiguous() for name, value in module.state_dict().items()}


def auto_gptq(folder: Path) -> Iterator[Case]:
    """Its forward pass, which dequantises, on an identity. Zero points of 0 overflow its packing: none are there."""
    layer = load(folder / "ag/auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda").QuantLinear
    for bits in (2, 3, 4, 8):
        for order in (False, True):
            linear, scale, zero, g_idx = problem(bits, order, 1)
            module = layer(bits, GROUP, INPUTS, OUTPUTS, False)
            module.pack(linear, scale, zero, g_idx)
            config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": order}
            name = f"auto-gptq {bits} bits{', act-order' if order else ''}"
            yield name, stored(module), module(torch.eye(INPUTS).half()).T, config, f"gptq{bits}[g{GROUP}]"


def gptqmodel(folder: Path) -> Iterator[Case]:
    """Zero points of 0 too: checkpoint_format gptq takes 1 off whole words, which borrows from the next code."""
    sys.path.insert(0, str(folder / "gptqmodel-7.7.0"))
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits in (2, 3, 4, 8):
        for order, group in ((False, GROUP), (True, GROUP), (False, -1)):
            linear, scale, zero, g_idx = problem(bits, order, 0, INPUTS if group < 0 else group)
            module = TorchLinear(bits, group, False, order, INPUTS, OUTPUTS, register_buffers=True)
            module.pack_original(linear, scale, zero, g_idx)
            module.eval()
            expected = module.dequantize_weight().T
            name = f"gptqmodel {bits} bits, {'act-order' if order else f'group {group}'}"
            config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order}
            label = f"gptq{bits}[{'channel' if group < 0 else f'g{group}'}]"
            yield f"{name}, v2", stored(module), expected, {**config, "checkpoint_format": "gptq_v2"}, label
            convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits, group_size=group))
            yield f"{name}, v1", stored(module), expected, {**config, "checkpoint_format": "gptq"}, label


def autoawq(folder: Path) -> Iterator[Case]:
    root = folder / "autoawq-0.2.9" / "awq"
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear", "awq.modules.triton"):
        module = sys.modules[package] = types.ModuleType(package)
        module.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for group in (32, 64):
        linear, scale, zero, _ = problem(4, False, 0, group)
        packed = WQLinear_GEMM.from_linear(linear, 4, group, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group).T
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        label = "awq4[channel]" if group == INPUTS else f"awq4[g{group}]"
        yield f"autoawq group {group}", stored(packed), expected, config, label


def modelopt(folder: Path) -> Iterator[Case]:
    sys.path.insert(0, str(folder / "mo"))
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    packed, scale, factor = NVFP4QTensor.quantize(weight, 16)
    expected = packed.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    parts = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": factor}
    yield "modelopt NVFP4", parts, expected, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4[g16]"
    packed, scale = MXFP4QTensor.quantize(weight, 32)
    expected = packed.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    parts = {"weight": packed._quantized_data, "weight_scale": scale.reshape(OUTPUTS, -1)}
    yield "modelopt MXFP4", parts, expected, {"quant_method": "modelopt", "quant_algo": "MXFP4"}, "mxfp4[g32]"


def main() -> None:
    folder = Path(sys.argv[1])
    tensors: dict[str, torch.Tensor] = {}
    metadata = {}
    for library in (auto_gptq, gptqmodel, autoawq, modelopt):
        for name, parts, expected, config, label in library(folder):
            assert expected.shape == (OUTPUTS, INPUTS)
            tensors |= {f"{name}|{part}": value.contiguous() for part, value in parts.items()}
            tensors[f"{name}|expected"] = expected.detach().contiguous()
            metadata[name] = json.dumps({"config": config, "label": label})
    save_file(tensors, Path(__file__).with_suffix(".safetensors"), metadata=metadata)


if __name__ == "__main__":
    main()
