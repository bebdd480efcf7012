from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardesd.checkpoint import LiveCheckpoint, StoredMatrix, open_checkpoint, open_live
from shardesd.errors import MatrixError, NotFound, NoWeights, OptionError
from shardesd.records import TensorRef


class Conv1D(nn.Module):
    """Stands for the linear layer of that name in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Config:
    name_or_path = "org/tiny"

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "gpt2", "n_embd": 4}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.wte = nn.Embedding(10, 4)
        self.attn = Conv1D()
        self.norm = RMSNorm()
        self.conv = nn.Conv2d(2, 3, 3)
        self.stem = nn.Conv1d(2, 3, 3)
        self.half = nn.Linear(4, 6).to(torch.bfloat16)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.lm_head.weight = self.wte.weight
        self.config = Config()


def named(checkpoint: LiveCheckpoint, name: str) -> TensorRef:
    return next(tensor for tensor in checkpoint.tensors() if tensor.name == name)


def raw(checkpoint: LiveCheckpoint, tensor: TensorRef) -> np.ndarray:
    shard = checkpoint.shards[0]
    path = checkpoint.source.local(shard.name)
    assert path is not None
    with checkpoint.open(shard, path) as opened, opened.read(tensor) as elements:
        return elements.copy()


def test_a_module() -> None:
    model = Model()
    checkpoint = open_live(model)
    assert checkpoint.source.model_id == "org/tiny"
    assert checkpoint.config == {"model_type": "gpt2", "n_embd": 4}
    assert checkpoint.names == set(model.state_dict())
    assert checkpoint.ties == {"lm_head.weight": "wte.weight"}
    assert checkpoint.hints == {
        "wte.weight": "embedding",
        "attn.weight": "conv1d",
        "norm.scale": "norm",
        "conv.weight": "conv",
        "conv.bias": "conv",
        "stem.weight": "conv1d",
        "stem.bias": "conv1d",
    }
    assert checkpoint.complete
    state = model.state_dict()
    for tensor in checkpoint.tensors():
        assert tensor.shape == tuple(state[tensor.name].shape)
        assert tensor.nbytes == state[tensor.name].nbytes
        expected = state[tensor.name].view(torch.int16) if tensor.dtype == "BF16" else state[tensor.name]
        np.testing.assert_array_equal(raw(checkpoint, tensor).view(expected.numpy().dtype), expected.numpy())
    assert {tensor.name: tensor.dtype for tensor in checkpoint.tensors()}["half.weight"] == "BF16"
    unique = {tensor.start for tensor in checkpoint.tensors()}
    assert len(unique) == len(state) - 1
    assert checkpoint.shards[0].size == sum(value.nbytes for value in state.values()) - state["wte.weight"].nbytes


def test_nothing_is_copied() -> None:
    weight = torch.randn(50, 40)
    checkpoint = open_live({"w": weight})
    shard = checkpoint.open(checkpoint.shards[0], Path("memory"))
    with shard.read(shard.tensors[0]) as elements:
        assert elements.ctypes.data == weight.data_ptr()
        assert StoredMatrix(elements, "F32").rows(0, len(elements)).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (torch.float64, "F64"),
        (torch.float16, "F16"),
        (torch.int8, "I8"),
        (torch.uint16, "U16"),
        (torch.int64, "I64"),
        (torch.complex64, "C64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
    ],
)
def test_dtypes_are_the_words_of_files(tmp_path: Path, source: Any, dtype: torch.dtype, word: str) -> None:
    from safetensors.torch import save_file

    value = torch.arange(1, 7, dtype=torch.float32).to(dtype)
    live = open_live({"w": value})
    save_file({"w": value}, tmp_path / "model.safetensors")
    src = source({})
    stored = open_checkpoint(src)
    for (tensor,) in (live.tensors(), stored.tensors()):
        parts = (tensor,) if tensor.encoding is None else tensor.encoding.parts  # FP8 is decoded
        assert [part.dtype for part in parts] == [word]
    with stored.open(stored.shards[0], tmp_path / "model.safetensors") as shard, shard.read(shard.tensors[0]) as data:
        np.testing.assert_array_equal(raw(live, live.tensors()[0]), data, strict=True)


def test_parts_and_views() -> None:
    stack = torch.randn(3, 4, 5)
    turned = torch.randn(6, 7).T
    checkpoint = open_live({"stack": stack, "turned": turned, "part": stack[1], "scalar": torch.tensor(2.0)})
    assert checkpoint.ties == {}
    whole = named(checkpoint, "stack")
    size = whole.nbytes // 3
    expert = replace(whole, shape=(4, 5), start=whole.start + size, end=whole.start + 2 * size)
    np.testing.assert_array_equal(raw(checkpoint, expert), stack[1].numpy())
    some = replace(whole, dtype="U8", shape=(7,), start=whole.start + 3, end=whole.start + 10)
    assert raw(checkpoint, some).tobytes() == stack.numpy().tobytes()[3:10]
    np.testing.assert_array_equal(raw(checkpoint, named(checkpoint, "turned")), turned.numpy())
    assert raw(checkpoint, named(checkpoint, "scalar")) == 2.0


class Wrapped(torch.Tensor):
    """A subclass whose elements are elsewhere, as those of quantised tensors are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_plain_elements_costs_only_itself() -> None:
    state = {
        "meta": torch.empty(2, 3, device="meta"),
        "wrapped": Wrapped(torch.randn(2, 3)),
        "quantised": torch.quantize_per_tensor(torch.randn(2, 3), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "wide": torch.zeros(2, 2, dtype=torch.complex128),
        "good": torch.ones(2, 3),
    }
    checkpoint = open_live(state)
    checkpoint.identity()
    expected = {
        "meta": "meta device",
        "wrapped": "a Wrapped is not plain memory",
        "quantised": "quantised (torch.qint8)",
        "sparse": "sparse",
        "wide": "elements of torch.complex128",
    }
    for tensor in checkpoint.tensors():
        if tensor.name == "good":
            np.testing.assert_array_equal(raw(checkpoint, tensor), np.ones((2, 3), np.float32))
            continue
        with pytest.raises(MatrixError) as caught:
            raw(checkpoint, tensor)
        assert f"tensor '{tensor.name}': " in str(caught.value)
        assert expected[tensor.name] in str(caught.value)


def test_names() -> None:
    assert open_live(nn.Linear(2, 2)).source.model_id == "Linear"
    assert open_live({"w": torch.ones(1)}).source.model_id == "state_dict"
    assert open_live(nn.Linear(2, 2), "mine").source.model_id == "mine"
    model = Model()
    model.config.name_or_path = "/models/llama"
    assert open_live(model).source.model_id == "llama"


def test_what_is_no_tensor_is_said() -> None:
    lazy: Any = nn.LazyLinear(3)
    checkpoint = open_live({"w": torch.ones(1), "step": 3, "lazy": lazy.weight})
    assert checkpoint.names == {"w"}
    assert checkpoint.notes == ("ignored 'step': no tensor", "ignored 'lazy': not initialised")


def test_refuses_what_is_no_model() -> None:
    with pytest.raises(OptionError, match=r"torch\.nn\.Module or a state dict, not list"):
        open_live([1])  # type: ignore[arg-type]
    with pytest.raises(NoWeights, match="holds no tensors"):
        open_live({})
    with pytest.raises(NotFound):
        open_live({"w": torch.ones(1)}).source.path("config.json")


def test_identity_changes_with_a_training_step() -> None:
    model = Model()
    before = open_live(model).identity()
    assert json.loads(json.dumps(before)) == before == open_live(model).identity()
    with torch.no_grad():
        model.conv.weight += 0.5
    assert open_live(model).identity() != before


@pytest.mark.gpu
def test_cuda() -> None:
    weight = torch.randn(30, 20, device="cuda", dtype=torch.bfloat16)
    checkpoint = open_live({"w": weight, "again": weight})
    assert checkpoint.ties == {"again": "w"}
    expected = weight.cpu().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(raw(checkpoint, named(checkpoint, "w")), expected)
    checkpoint.identity()


def test_4_bit_weights_that_ran_on_the_cpu_are_refused_and_left_alone() -> None:
    """bitsandbytes packs them anew for AVX512-BF16, and its state_dict() unpacks them wrongly for good."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional
    from bitsandbytes import nn as quantised

    model = nn.Sequential(quantised.Linear4bit(256, 128, bias=False, compute_dtype=torch.bfloat16)).to("cpu")
    weight = model[0].weight
    open_live(model)
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    before = weight.data.clone()
    with pytest.raises(OptionError, match=r"'0\.weight' was packed anew .* load it anew"):
        open_live(model)
    assert torch.equal(weight.data, before)
    assert weight.quant_state.packing_format_for_cpu
