"""The merged tensors equal peft's own merge, to 1e-6 of the largest element, for every type and option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    TrainableTokensConfig,
    VeraConfig,
)
from peft_cases import ConvNet, bert, check, gpt2, gpt_oss, llama, mixtral, qwen3_moe, square_experts, t5
from torch import nn

BERT = ["query", "value", "dense"]
GPT2 = ["c_attn", "c_proj", "c_fc"]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
T5 = ["q", "v", "o", "wi", "wo"]
CONV = ["stem", "point", "line", "cube", "fc"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 5, **options})


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "lora-bert": (bert, lora(target_modules=BERT)),
    "lora-gpt2": (gpt2, lora(target_modules=GPT2)),
    "lora-gpt2-square": (gpt2, lora(target_modules=["attn.c_proj"])),
    "lora-llama": (llama, lora(target_modules=LLAMA)),
    "lora-llama-head": (llama, lora(target_modules=["lm_head", "embed_tokens"])),
    "lora-t5": (t5, lora(target_modules=T5)),
    "lora-conv": (ConvNet, lora(target_modules=CONV)),
    "lora-attention": (ConvNet, lora(target_modules=["attention"])),
    "lora-embedding": (ConvNet, lora(target_modules=["table"])),
    "lora-rslora": (llama, lora(target_modules=LLAMA, use_rslora=True)),
    "lora-patterns": (
        llama,
        lora(
            target_modules=LLAMA,
            rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 4},
            alpha_pattern={"up_pro": 99, "model.layers.0.self_attn.q_proj": 11, "v_proj": 2},
        ),
    ),
    "lora-bias": (bert, lora(target_modules=["query", "value"], lora_bias=True)),
    "lora-bias-all": (bert, lora(target_modules=["query"], bias="all")),
    "lora-bias-all-classifier": (bert, lora(target_modules=["query"], bias="all", task_type="SEQ_CLS")),
    "lora-bias-only": (bert, lora(target_modules=["query"], bias="lora_only")),
    "lora-modules-to-save": (llama, lora(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "lora-batch-norm": (ConvNet, lora(target_modules=["stem"], modules_to_save=["norm"])),
    "lora-classifier": (bert, lora(target_modules=["query"], task_type="SEQ_CLS")),
    "lora-tokens": (llama, lora(target_modules=["q_proj"], trainable_token_indices=[3, 0, 7])),
    "lora-tokens-named": (llama, lora(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 1]})),
    "lora-gpt2-tokens": (gpt2, lora(target_modules=["c_fc"], trainable_token_indices={"wte": [2]})),
    "lora-bdlora": (
        llama,
        lora(
            r=4,
            target_modules=LLAMA,
            use_bdlora=peft.tuners.lora.config.BdLoraConfig(
                target_modules_bd_a=["q_proj"],
                target_modules_bd_b=["up_proj", "down_proj"],
                nblocks=2,
                match_strict=False,
            ),
        ),
    ),
    "dora-bert": (bert, lora(target_modules=BERT, use_dora=True)),
    "dora-gpt2": (gpt2, lora(target_modules=GPT2, use_dora=True)),
    "dora-llama": (llama, lora(target_modules=[*LLAMA, "embed_tokens"], use_dora=True)),
    "dora-conv": (ConvNet, lora(target_modules=[*CONV, "table"], use_dora=True)),
    "experts-mixtral": (mixtral, lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "experts-mixtral-square": (lambda: mixtral(square=True), lora(target_modules=[], target_parameters=EXPERTS)),
    "experts-down-only": (mixtral, lora(target_modules=["q_proj"], target_parameters=EXPERTS[1:])),
    "experts-patterns": (
        mixtral,
        lora(
            target_modules=["q_proj"],
            target_parameters=EXPERTS,
            rank_pattern={"experts.down_proj": 2},
            alpha_pattern={"experts.gate_up_proj": 7},
        ),
    ),
    "experts-qwen3": (qwen3_moe, lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "experts-gpt-oss": (gpt_oss, lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "experts-gpt-oss-square": (lambda: gpt_oss(square=True), lora(target_modules=[], target_parameters=EXPERTS)),
    "experts-privacy-filter-square": (
        lambda: square_experts("OpenAIPrivacyFilter", "OpenAIPrivacyFilterModel"),
        lora(target_modules=[], target_parameters=EXPERTS),
    ),
    "experts-llama4-square": (
        lambda: square_experts(
            "Llama4Text", "Llama4ForCausalLM", interleave_moe_layer_step=1, intermediate_size_mlp=16
        ),
        lora(target_modules=[], target_parameters=[word.replace("mlp", "feed_forward") for word in EXPERTS]),
    ),
    "experts-aria-square": (
        lambda: square_experts("AriaText", "AriaTextForCausalLM", moe_num_experts=3, moe_topk=2),
        lora(target_modules=[], target_parameters=EXPERTS),
    ),
    "experts-gpt-oss-bias": (
        gpt_oss,
        lora(target_modules=[], target_parameters=[*EXPERTS, "mlp.experts.down_proj_bias", "router.weight"]),
    ),
    "parameter-linear": (llama, lora(target_modules=["k_proj"], target_parameters=["q_proj.weight"])),
    "adalora-bert": (bert, AdaLoraConfig(init_r=4, target_r=2, lora_alpha=7, total_step=10, target_modules=BERT)),
    "adalora-gpt2": (gpt2, AdaLoraConfig(init_r=4, lora_alpha=7, total_step=10, target_modules=GPT2)),
    "adalora-conv": (ConvNet, AdaLoraConfig(init_r=4, lora_alpha=7, total_step=10, target_modules=["stem", "fc"])),
    "loha-llama": (llama, LoHaConfig(r=3, alpha=5, target_modules=LLAMA)),
    "loha-conv": (ConvNet, LoHaConfig(r=3, alpha=5, target_modules=["stem", "point", "line", "grouped", "fc"])),
    "loha-conv-cp": (
        ConvNet,
        LoHaConfig(r=3, alpha=5, target_modules=["stem", "point", "line", "fc"], use_effective_conv2d=True),
    ),
    "loha-patterns": (
        llama,
        LoHaConfig(r=3, target_modules=LLAMA, rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 3}),
    ),
    "lokr-llama": (llama, LoKrConfig(r=1, alpha=5, target_modules=LLAMA)),
    "lokr-whole": (llama, LoKrConfig(r=8, alpha=5, target_modules=LLAMA)),
    "lokr-both": (llama, LoKrConfig(r=1, alpha=5, target_modules=LLAMA, decompose_both=True)),
    "lokr-factor": (llama, LoKrConfig(r=2, alpha=5, target_modules=LLAMA, decompose_factor=2)),
    "lokr-conv": (ConvNet, LoKrConfig(r=1, alpha=5, target_modules=["stem", "point", "line", "fc"])),
    "lokr-conv-whole": (ConvNet, LoKrConfig(r=8, alpha=5, target_modules=["stem", "point", "line", "grouped", "fc"])),
    "lokr-conv-cp": (ConvNet, LoKrConfig(r=1, alpha=5, target_modules=["stem", "fc"], use_effective_conv2d=True)),
    "ia3-bert": (
        bert,
        IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    ),
    "ia3-gpt2": (gpt2, IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])),
    "ia3-gpt2-square": (gpt2, IA3Config(target_modules=["attn.c_proj"], feedforward_modules=[])),
    "ia3-conv": (
        ConvNet,
        IA3Config(target_modules=["stem", "point", "cube", "grouped"], feedforward_modules=["point", "grouped"]),
    ),
    "oft-llama": (llama, OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA)),
    "oft-cayley": (llama, OFTConfig(r=2, oft_block_size=0, target_modules=LLAMA, use_cayley_neumann=False)),
    "oft-terms": (llama, OFTConfig(r=2, oft_block_size=0, target_modules=LLAMA, num_cayley_neumann_terms=7)),
    "oft-share": (llama, OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA, block_share=True)),
    "oft-coft": (llama, OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA, coft=True, eps=1e-1)),
    "oft-conv": (ConvNet, OFTConfig(r=0, oft_block_size=3, target_modules=["stem", "fc"])),
    "oft-embedding": (ConvNet, OFTConfig(r=0, oft_block_size=4, target_modules=["table"])),
    "boft-llama": (llama, BOFTConfig(boft_block_size=4, target_modules=LLAMA)),
    "boft-conv": (ConvNet, BOFTConfig(boft_block_size=3, target_modules=["stem"])),
    "vera-llama": (llama, VeraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])),
    "vera-gpt2": (gpt2, VeraConfig(r=4, target_modules=GPT2)),
    "hira-llama": (llama, peft.HiraConfig(r=3, target_modules=[*LLAMA, "embed_tokens"])),
    "hira-gpt2": (gpt2, peft.HiraConfig(r=3, target_modules=GPT2)),
    "hira-conv": (ConvNet, peft.HiraConfig(r=3, target_modules=["stem", "point", "line", "cube"])),
    "delora-llama": (llama, peft.DeloraConfig(r=3, delora_lambda=9, target_modules=LLAMA)),
    "delora-t5": (t5, peft.DeloraConfig(r=3, delora_lambda=9, target_modules=T5)),
    "ln-tuning": (llama, LNTuningConfig(target_modules=["input_layernorm", "norm"])),
    "tokens-llama": (llama, TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[4, 9, 2])),
    "tokens-tied": (lambda: llama(tied=True), TrainableTokensConfig(token_indices=[4, 9])),
}


def test_equals_peft_for_a_conv1d_in_cp_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft's merge of this one fails in torch.kron, on strides only; numpy's is the same product."""

    def kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.kron(a.detach().numpy(), b.detach().numpy()))

    monkeypatch.setattr(torch, "kron", kron)
    check(ConvNet(), LoKrConfig(r=1, alpha=5, target_modules=["line"], use_effective_conv2d=True), tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    model, config = CASES[case]
    check(model(), config, tmp_path)
