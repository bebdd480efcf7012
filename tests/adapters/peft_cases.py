"""Tiny random models, and peft's own merge of an adapter with random non-zero factors: the reference of these tests."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from shardesd.adapters import MergePlan, Merger, apply, plan_merge
from shardesd.adapters.load import Adapter, load_adapter
from shardesd.records import TensorRef
from shardesd.source import open_source

TOLERANCE = 1e-6
WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        **options,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=23, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama(tied: bool = False, layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=True,
        max_position_embeddings=12,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=23, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=3, tie_word_embeddings=False
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral(square: bool = False) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16 if square else 12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=12,
    )
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=12,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def square_experts(config: str, name: str, **options: Any) -> nn.Module:
    """A mixture whose down_proj is square, of a class that may mark its stacks as transposed."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} doesn't have {name}")
    sizes = {
        **{"vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 3},
        **{"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    made = getattr(transformers, f"{config}Config")(**{**sizes, **options})
    model: nn.Module = getattr(transformers, name)(made)
    return model


def gpt_oss(square: bool = False) -> nn.Module:
    config = transformers.GptOssConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16 if square else 12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=12,
    )
    return transformers.GptOssForCausalLM(config)


def vit() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config), "all-linear"


def dinov2() -> tuple[nn.Module, Any]:
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return transformers.Dinov2Model(config), "all-linear"


def whisper() -> tuple[nn.Module, Any]:
    config = transformers.WhisperConfig(
        vocab_size=23,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=10,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.WhisperForConditionalGeneration(config), "all-linear"


def roberta() -> tuple[nn.Module, Any]:
    config = transformers.RobertaConfig(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    return transformers.RobertaForSequenceClassification(config), ["query", "value"]


def neox() -> tuple[nn.Module, Any]:
    config = transformers.GPTNeoXConfig(
        vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    return transformers.GPTNeoXForCausalLM(config), ["query_key_value", "lm_head", "embed_out", "embed_in"]


def tied_t5() -> tuple[nn.Module, Any]:
    config = transformers.T5Config(vocab_size=23, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=3)
    return transformers.T5ForConditionalGeneration(config), ["q", "v", "wi", "wo"]


class ConvNet(nn.Module):
    """Convolutions of one, two and three dimensions, grouped ones, an embedding, and attention with a joint weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.point = nn.Conv2d(8, 12, 1)
        self.line = nn.Conv1d(8, 6, 3)
        self.cube = nn.Conv3d(2, 4, (1, 2, 3))
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.table = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.fc = nn.Linear(8, 5)


@dataclass(kw_only=True)
class Case:
    """A base, an adapter on disk, and what peft makes of the two."""

    base: dict[str, torch.Tensor]
    config: dict[str, Any]
    adapter: Adapter
    folder: Path
    merged: dict[str, torch.Tensor]
    model: nn.Module
    """The merged model."""


def make_case(
    model: nn.Module, config: Any, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Case:
    """Give `model` an adapter with random factors, save it as peft does, and merge it as peft does."""
    import peft

    torch.manual_seed(seed)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    base = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(model), config)
        randomise(wrapped)
        wrapped.save_pretrained(str(folder))
        if getattr(config, "layer_replication", None):
            _unshare(wrapped)
        merged = wrapped.merge_and_unload(safe_merge=True)
    described = model.config.to_dict() if hasattr(model, "config") else {}
    adapter = load_adapter(open_source(folder))
    return Case(base=base, config=described, adapter=adapter, folder=folder, merged=state_of(merged), model=merged)


def _unshare(wrapped: nn.Module) -> None:
    """peft's replicated layers share their weights, and its merge adds every layer's delta to the shared one."""
    for module in wrapped.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.weight = nn.Parameter(module.base_layer.weight.detach().clone())


def randomise(wrapped: nn.Module, adapter: str = "default") -> None:
    """Random numbers, far from zero, in every parameter that the adapter would save."""
    import peft

    saved = {name.replace(".weight", "") for name in peft.get_peft_model_state_dict(wrapped, adapter_name=adapter)}
    bare = lambda name: name.replace(f".{adapter}", "").replace(".modules_to_save", "").replace(".weight", "")  # noqa: E731
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if bare(name) not in saved:
                continue
            if ".base_layer." in name and not name.endswith(".bias") and "lora_" not in name and "modules" not in name:
                continue
            values = torch.randn(parameter.shape) * 0.3
            if "ia3" in name or "magnitude" in name or "boft_s" in name:
                values = 1 + values
            if "oft_R" in name or "oft_embedding_R" in name:
                values = values * 0.3
            parameter.copy_(values)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict without tied names: what a file would hold."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name not in tied}


def refs_of(state: dict[str, torch.Tensor]) -> dict[str, TensorRef]:
    return {
        name: TensorRef(name=name, dtype=WORDS[value.dtype], shape=tuple(value.shape), shard="live")
        for name, value in state.items()
    }


def merge(plan: MergePlan, base: dict[str, torch.Tensor], *, round_to: str | None = None) -> dict[str, np.ndarray]:
    """Every tensor of the merged model; merges by rows are also done block by block, which must change no bit."""
    merged = {}
    for name, value in base.items():
        if name not in plan.dropped:
            merged[name] = _merge_one(plan.for_tensor(name), value, round_to)
    for virtual in plan.extra:
        start = base[virtual.base.name] if virtual.base else torch.zeros(virtual.shape)
        merged[virtual.name] = _merge_one(virtual.edits, start, round_to)
        assert merged[virtual.name].shape == virtual.shape
    return merged


def _merge_one(edits: Any, value: torch.Tensor, round_to: str | None) -> np.ndarray:
    if not edits:
        return value.numpy() if value.dtype in (torch.float32, torch.int64) else value.float().numpy()
    whole = apply(edits, value.float().numpy().copy(), round_to=round_to)
    if whole.ndim and whole.shape == tuple(value.shape):
        merger = Merger(edits, whole.shape, round_to=round_to)
        if merger.by_rows:
            blocks = value.float().numpy().copy()
            for start in range(0, len(blocks), 3):
                stop = min(start + 3, len(blocks))
                blocks[start:stop] = merger.rows(blocks[start:stop], start, stop)
            np.testing.assert_allclose(blocks, whole, rtol=2e-6, atol=2e-6)
    return whole


def used_by(plan: MergePlan) -> set[str]:
    """The adapter tensors that the plan's edits read."""
    edits = [*plan.edits.values(), *(virtual.edits for virtual in plan.extra)]
    return {ref.name for found in edits for edit in found for ref in edit.refs}


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert set(ours) == set(theirs), sorted(set(ours) ^ set(theirs))
    for name, value in theirs.items():
        difference = relative(ours[name], value)
        assert difference <= tolerance, f"{name}: differs by {difference:.1e} from peft's merge"


def relative(ours: np.ndarray, theirs: torch.Tensor) -> float:
    reference = theirs.double().numpy()
    assert ours.shape == reference.shape
    scale = np.abs(reference).max(initial=0.0)
    return float(np.abs(ours - reference).max(initial=0.0) / scale) if scale else float(np.abs(ours).max(initial=0.0))


def check(model: nn.Module, config: Any, folder: Path) -> Case:
    """Our merge equals peft's for every tensor of the model, and the adapter did change something."""
    case = make_case(model, config, folder)
    with case.adapter:
        plan = plan_merge([case.adapter], refs_of(case.base), case.config)
        assert_equal(merge(plan, case.base), case.merged)
    twice = ("lm_head.trainable_tokens_delta", ".modules_to_save.bias", ".original_module.bias")
    saved = {tensor.name for tensor in case.adapter.tensors}
    assert {name for name in saved - used_by(plan) if not name.endswith(twice)} == set()
    changed = [
        name
        for name, value in case.merged.items()
        if name not in case.base or value.shape != case.base[name].shape or not torch.equal(value, case.base[name])
    ]
    assert changed
    return case
