"""Bases and adapters that name or lay out the same numbers in other ways; several adapters; the live model."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import AdaLoraConfig, BOFTConfig, LoraConfig
from peft_cases import (
    ConvNet,
    assert_equal,
    bert,
    check,
    dinov2,
    gpt2,
    llama,
    make_case,
    merge,
    mixtral,
    neox,
    qwen3_moe,
    randomise,
    refs_of,
    relative,
    roberta,
    state_of,
    tied_t5,
    used_by,
    vit,
    whisper,
)
from safetensors.torch import load_file, save_file
from torch import nn

from shardesd.adapters import apply, base_name, plan_merge
from shardesd.adapters.load import Adapter, adapter_from_tensors, adapters_from_peft, load_adapter
from shardesd.checkpoint import open_live
from shardesd.errors import AdapterError
from shardesd.source import open_source

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def plan_and_merge(adapter: Adapter, base: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, np.ndarray]:
    with adapter:
        return merge(plan_merge([adapter], refs_of(base), config), base)


def saved(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """A model's tensors as transformers writes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("build", [mixtral, qwen3_moe])
def test_a_base_that_stores_every_expert_by_itself(build: Any, tmp_path: Path) -> None:
    model = build()
    case = make_case(model, LoraConfig(r=3, lora_alpha=5, target_parameters=EXPERTS), tmp_path / "a")
    base = saved(model, tmp_path / "base")
    assert any(re.search(r"experts\.2\.", name) for name in base)
    assert_equal(plan_and_merge(case.adapter, base, case.config), saved(case.model, tmp_path / "merged"))


def test_experts_that_were_trained_as_modules(tmp_path: Path) -> None:
    """transformers 4 had a module per expert; its adapters name them as the files do."""
    torch.manual_seed(0)
    names = [f"model.layers.0.block_sparse_moe.experts.{e}.w{w}" for e in range(2) for w in (1, 2, 3)]
    base = {f"{name}.weight": torch.randn((12, 16) if name[-1] != "2" else (16, 12)) for name in names}
    tensors, expected = {}, {}
    for name in names:
        W = base[f"{name}.weight"]
        A, B = torch.randn(2, W.shape[1]), torch.randn(W.shape[0], 2)
        tensors |= {f"base_model.model.{name}.lora_A.weight": A, f"base_model.model.{name}.lora_B.weight": B}
        expected[f"{name}.weight"] = W + 4 / 2 * B @ A
    adapter = adapter_from_tensors("a", {"peft_type": "LORA", "r": 2, "lora_alpha": 4}, tensors)
    assert_equal(plan_and_merge(adapter, base, {"model_type": "mixtral"}), expected)


@pytest.mark.parametrize(
    ("d1", "d2", "version", "model_type", "order"),
    [
        (8, 6, "0.18.0", "mixtral", "eri,ore->eio"),  # A runs over the stack's first axis
        (8, 6, "0.21.0", "gpt_oss", "eri,ore->eio"),
        (6, 6, "0.18.1", "mixtral", "eri,ore->eio"),
        (6, 6, None, "mixtral", "eri,ore->eio"),
        (6, 6, "0.19.0", "gpt_oss", "eri,ore->eio"),
        (6, 6, "0.19.0", "openai_privacy_filter", "eri,ore->eio"),
        (6, 6, "0.19.0", "aria_text", "eri,ore->eio"),
        (6, 6, "0.19.0", "llama4_text", "eri,ore->eoi"),
        (6, 6, "0.19.0", "mixtral", "eri,ore->eoi"),
        (6, 6, "0.21.2", "qwen3_moe", "eri,ore->eoi"),
    ],
)
def test_the_order_of_a_stacks_axes(d1: int, d2: int, version: str | None, model_type: str, order: str) -> None:
    """peft swapped A's and B's sides in 0.19; a square stack shows it only by the version."""
    torch.manual_seed(0)
    E, r, name = 3, 2, "model.layers.0.mlp.experts.down_proj"
    in_, out = (d1, d2) if order.endswith("eio") else (d2, d1)
    A, B = torch.randn(E * r, in_), torch.randn(out, E * r)
    base = {name: torch.randn(E, d1, d2)}
    delta = torch.einsum(order, A.reshape(E, r, in_), B.reshape(out, r, E)) * (8 / r)
    prefix = "base_model.model.model.layers.0.mlp.experts"
    config = {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": 8,
        "target_parameters": ["experts.down_proj"],
        "peft_version": version,
    }
    adapter = adapter_from_tensors("a", config, {f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B})
    assert_equal(plan_and_merge(adapter, base, {"model_type": model_type}), {name: base[name] + delta})


def test_replicated_layers(tmp_path: Path) -> None:
    config = LoraConfig(r=3, lora_alpha=5, target_modules=LLAMA, layer_replication=[[0, 2], [1, 3]])
    case = check_replicated(llama(layers=3), config, tmp_path)
    plan = plan_merge([case.adapter], refs_of(case.base), case.config)
    assert {v.why for v in plan.extra if "layers.2.mlp.up_proj" in v.name} == {
        "replicates model.layers.1.mlp.up_proj.weight"
    }
    assert "model.layers.2.mlp.up_proj.weight" in plan.dropped


def check_replicated(model: nn.Module, config: Any, folder: Path) -> Any:
    case = make_case(model, config, folder)
    # The replicated modules share their untouched weights, so nothing may be left out as tied.
    theirs = {name: value.detach().clone() for name, value in case.model.state_dict().items()}
    ours = plan_and_merge(case.adapter, case.base, case.config)
    assert_equal(ours, theirs)
    return case


def test_a_tied_head_gets_a_copy(tmp_path: Path) -> None:
    """Both matrices are there; peft's merge writes into the shared weight, so only the head's numbers are its."""
    case = make_case(llama(tied=True), LoraConfig(r=3, target_modules=["lm_head"]), tmp_path)
    assert "lm_head.weight" not in case.base
    with case.adapter:
        plan = plan_merge([case.adapter], refs_of(case.base), case.config)
        (head,) = plan.extra
        assert (head.name, head.why) == ("lm_head.weight", "tied to model.embed_tokens.weight")
        merged = merge(plan, case.base)
    assert relative(merged["lm_head.weight"], case.merged["model.embed_tokens.weight"]) <= 1e-6
    np.testing.assert_array_equal(merged["model.embed_tokens.weight"], case.base["model.embed_tokens.weight"].numpy())


def test_an_untied_head_is_never_taken_from_the_embedding(tmp_path: Path) -> None:
    case = make_case(llama(), LoraConfig(r=3, target_modules=["lm_head"]), tmp_path)
    del case.base["lm_head.weight"]
    with pytest.raises(Exception, match=r"lm_head.*finds no tensor lm_head.weight"):
        plan_merge([case.adapter], refs_of(case.base), case.config)


def test_a_resized_embedding_and_head(tmp_path: Path) -> None:
    model = llama()
    base = state_of(model)
    model.resize_token_embeddings(29)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(model), LoraConfig(r=3, target_modules=["embed_tokens", "lm_head"]))
        randomise(wrapped)
        wrapped.save_pretrained(str(tmp_path), save_embedding_layers=True)
        merged = wrapped.merge_and_unload(safe_merge=True)
    adapter = load_adapter(open_source(tmp_path))
    plan = plan_merge([adapter], refs_of(base), model.config.to_dict())
    assert plan.shapes == {"model.embed_tokens.weight": (29, 16), "lm_head.weight": (29, 16)}
    assert_equal(plan_and_merge(adapter, base, model.config.to_dict()), state_of(merged))


def renamed(state: dict[str, torch.Tensor], *pairs: tuple[str, str]) -> dict[str, torch.Tensor]:
    for pattern, replacement in pairs:
        state = {re.sub(pattern, replacement, name): value for name, value in state.items()}
    return state


@pytest.mark.parametrize(
    "pairs",
    [
        [(r"^transformer\.", "")],  # the files of openai-community/gpt2
        [(r"^transformer\.", "model.transformer.")],
        [(r"^transformer\.", "something.else.")],
    ],
)
def test_prefixes_of_gpt2(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    case = make_case(gpt2(), LoraConfig(r=3, target_modules=["c_attn", "c_proj", "wte"]), tmp_path)
    ours = plan_and_merge(case.adapter, renamed(case.base, *pairs), case.config)
    assert_equal(ours, renamed(case.merged, *pairs))


@pytest.mark.parametrize(
    "pairs",
    [
        [(r"^model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head")],
        [(r"^model\.", "model.language_model.")],
        [(r"^model\.", "")],
    ],
)
def test_a_language_model_inside_another(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    case = make_case(llama(), LoraConfig(r=3, target_modules=[*LLAMA, "lm_head"]), tmp_path)
    vision = {"vision_tower.layers.0.mlp.up_proj.weight": torch.randn(7, 5)}
    ours = plan_and_merge(case.adapter, renamed(case.base, *pairs) | vision, case.config)
    assert_equal(ours, renamed(case.merged, *pairs) | vision)


@pytest.mark.parametrize("build", [vit, dinov2, whisper, roberta, neox, tied_t5])
def test_names_on_disk_of_other_models(build: Any, tmp_path: Path) -> None:
    """The files that transformers writes, for classes that rename, prefix or tie."""
    model, targets = build()
    case = make_case(model, LoraConfig(r=2, target_modules=targets), tmp_path / "a")
    base, theirs = saved(model, tmp_path / "base"), saved(case.model, tmp_path / "merged")
    plan = plan_merge([case.adapter], refs_of(base), case.config)
    assert used_by(plan) == {tensor.name for tensor in case.adapter.tensors}
    assert_equal(plan_and_merge(case.adapter, base, case.config), theirs)


def test_old_names_of_layer_norms(tmp_path: Path) -> None:
    pairs = [(r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta")]
    case = make_case(bert(), LoraConfig(r=3, target_modules=["query"], bias="all"), tmp_path)
    assert_equal(plan_and_merge(case.adapter, renamed(case.base, *pairs), case.config), renamed(case.merged, *pairs))


def test_an_adapter_name_left_in_the_keys(tmp_path: Path) -> None:
    case = make_case(llama(), LoraConfig(r=3, target_modules=LLAMA, use_dora=True), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors = renamed(tensors, (r"\.(lora_[AB])\.weight", r".\1.default.weight"))
    tensors = renamed(tensors, (r"\.lora_magnitude_vector$", ".lora_magnitude_vector.default.weight"))
    adapter = adapter_from_tensors("a", case.adapter.config, tensors)
    assert_equal(plan_and_merge(adapter, case.base, case.config), case.merged)


def as_kohya(tensors: dict[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """peft's names as kohya's sd-scripts writes them, α beside every module."""
    out = {}
    for name, value in tensors.items():
        module, _, leaf = name.removeprefix("base_model.model.").partition(".lora_")
        flat = f"lora_unet_{module.replace('.', '_')}"
        role = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight", "magnitude_vector": "dora_scale"}[leaf]
        out[f"{flat}.{role}"] = value.reshape(-1, *(1,) * 1) if role == "dora_scale" else value
        out[f"{flat}.alpha"] = torch.tensor(alpha)
    return out


@pytest.mark.parametrize("dora", [False, True])
def test_kohya(dora: bool, tmp_path: Path) -> None:
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["stem", "point", "fc"], use_dora=dora)
    case = make_case(ConvNet(), config, tmp_path / "peft")
    tensors = as_kohya(load_file(tmp_path / "peft/adapter_model.safetensors"), 5.0)
    (tmp_path / "kohya").mkdir()
    save_file(tensors, tmp_path / "kohya/style.safetensors")
    adapter = load_adapter(open_source(tmp_path / "kohya"))
    assert_equal(plan_and_merge(adapter, case.base, {}), case.merged)
    file = load_adapter(open_source(tmp_path / "kohya/style.safetensors"))
    assert_equal(plan_and_merge(file, case.base, {}), case.merged)


def test_kohya_without_alpha_and_with_a_kernel_in_the_middle() -> None:
    torch.manual_seed(0)
    up, mid, down = torch.randn(8, 3, 1, 1), torch.randn(3, 3, 3, 3), torch.randn(3, 5, 1, 1)
    base = {"down_blocks.0.conv_in.weight": torch.randn(8, 5, 3, 3)}
    names = {"lora_up.weight": up, "lora_mid.weight": mid, "lora_down.weight": down}
    adapter = adapter_from_tensors(
        "a", {"peft_type": "LORA"}, {f"lora_unet_down_blocks_0_conv_in.{k}": v for k, v in names.items()}
    )
    delta = torch.einsum("or,rshw,si->oihw", up[..., 0, 0], mid, down[..., 0, 0])
    assert_equal(plan_and_merge(adapter, base, {}), {name: W + delta for name, W in base.items()})


@pytest.mark.parametrize("style", ["new", "metadata", "old", "processor"])
def test_diffusers(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {f"down_blocks.0.attn1.{part}.weight": torch.randn(6, 6) for part in ("to_q", "to_out.0")}
    tensors, expected = {}, {}
    scale = 2.5 if style == "metadata" else 1.0
    for name, W in base.items():
        A, B = torch.randn(2, 6), torch.randn(6, 2)
        module = name.removesuffix(".weight")
        expected[name] = W + scale * B @ A
        a, b = (f"unet.{module}.lora_{side}.weight" for side in "AB")
        if style == "old":
            a, b = (f"unet.{module}.lora.{side}.weight" for side in ("down", "up"))
        if style == "processor":
            stem = module.replace(".attn1.", ".attn1.processor.").removesuffix(".0")
            a, b = (f"unet.{stem}_lora.{side}.weight" for side in ("down", "up"))
        tensors |= {a: A, b: B}
    metadata = {"lora_adapter_metadata": json.dumps({"unet.r": 2, "unet.lora_alpha": 5})} if style == "metadata" else {}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors", metadata=metadata)
    assert_equal(plan_and_merge(load_adapter(open_source(tmp_path)), base, {}), expected)


@pytest.mark.parametrize("dora", [False, True])
def test_mlx(dora: bool, tmp_path: Path) -> None:
    """mlx-lm stores a (in, r) and b (r, out), and a scale that is used as it stands."""
    targets = ["q_proj", "o_proj", "up_proj"]
    config = LoraConfig(r=4, lora_alpha=10, target_modules=targets, use_dora=dora)
    case = make_case(llama(), config, tmp_path / "peft")
    tensors = {}
    for name, value in load_file(tmp_path / "peft/adapter_model.safetensors").items():
        module, _, leaf = name.removeprefix("base_model.model.").partition(".lora_")
        key = {"A.weight": "lora_a", "B.weight": "lora_b", "magnitude_vector": "m"}[leaf]
        tensors[f"{module}.{key}"] = value.T.contiguous() if value.ndim == 2 else value
    save_file(tensors, tmp_path / "adapters.safetensors")
    described = {
        "fine_tune_type": "dora" if dora else "lora",
        "model": "org/base",
        "lora_parameters": {"rank": 4, "scale": 2.5, "alpha": 99, "dropout": 0.0},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    adapter = load_adapter(open_source(tmp_path))
    assert adapter.config.base_model == "org/base"
    assert_equal(plan_and_merge(adapter, case.base, case.config), case.merged)


def test_mlx_embedding() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(11, 2), torch.randn(2, 6)
    base = {"model.embed_tokens.weight": torch.randn(11, 6)}
    adapter = adapter_from_tensors(
        "a", {"lora_parameters": {"scale": 3.0}}, {"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}
    )
    assert_equal(plan_and_merge(adapter, base, {}), {name: W + 3 * a @ b for name, W in base.items()})


@pytest.mark.parametrize(
    "configs",
    [
        [LoraConfig(r=3, target_modules=LLAMA), LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"])],
        [LoraConfig(r=3, target_modules=LLAMA, use_dora=True), LoraConfig(r=2, target_modules=LLAMA, use_dora=True)],
        [LoraConfig(r=3, target_modules=LLAMA), LoraConfig(r=2, target_modules=LLAMA, use_dora=True)],
        [peft.HiraConfig(r=3, target_modules=LLAMA), peft.HiraConfig(r=2, target_modules=LLAMA)],
        [
            peft.OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA),
            peft.OFTConfig(r=2, oft_block_size=0, target_modules=LLAMA),
        ],
    ],
    ids=["lora", "dora", "lora-dora", "hira", "oft"],
)
def test_several_adapters_in_order(configs: list[Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(model), configs[0], adapter_name="one")
        wrapped.add_adapter("two", configs[1])
        for name in ("one", "two"):
            randomise(wrapped, name)
        wrapped.save_pretrained(str(tmp_path))
        merged = wrapped.merge_and_unload(safe_merge=True, adapter_names=["one", "two"])
    adapters = [load_adapter(open_source(tmp_path / name)) for name in ("one", "two")]
    base = state_of(model)
    ours = merge(plan_merge(adapters, refs_of(base), model.config.to_dict()), base)
    for adapter in adapters:
        adapter.close()
    assert_equal(ours, state_of(merged))


def test_butterfly_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft makes more than one factor only with its CUDA kernel; a block-diagonal of torch's stands in for it."""
    from peft.tuners.boft import layer

    class Blocks:
        @staticmethod
        def apply(blocks: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.block_diag(*one) for one in blocks])

    monkeypatch.setattr(layer, "get_fbd_cuda", lambda: object())
    monkeypatch.setattr(layer, "FastBlockDiag", Blocks)
    check(
        llama(),
        BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, target_modules=["q_proj", "up_proj"]),
        tmp_path,
    )


def test_adalora_that_has_pruned_ranks(tmp_path: Path) -> None:
    """The scale stays lora_alpha/(init_r + 1e-5), whatever rank is left; a module may be gone."""
    model = llama()
    config = AdaLoraConfig(init_r=4, lora_alpha=7, total_step=10, target_modules=["q_proj", "v_proj"])
    case = make_case(model, config, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    keep = {"q_proj": [True, False, True, False], "v_proj": [False] * 4}
    pruned, expected = {}, dict(case.base)
    for name, value in tensors.items():
        kind = "q_proj" if "q_proj" in name else "v_proj"
        pruned[name] = value[:, keep[kind]] if "lora_B" in name else value[keep[kind]]
    for layer in (0, 1):
        module = f"model.layers.{layer}.self_attn.q_proj"
        A, B, E = (pruned[f"base_model.model.{module}.lora_{part}"] for part in "ABE")
        expected[f"{module}.weight"] = case.base[f"{module}.weight"] + B @ (A * E) * (7 / (4 + 1e-5))
    adapter = adapter_from_tensors("a", case.adapter.config, pruned)
    assert_equal(plan_and_merge(adapter, case.base, case.config), expected)


def test_delora_whose_factors_are_nearly_nothing() -> None:
    """Norms below 1e-4 count as 1e-4, so that an unused rank divides nothing by zero."""
    torch.manual_seed(0)
    A, B = torch.randn(3, 4), torch.randn(6, 3)
    A[0], A[1] = 0, A[1] * 1e-6
    base, norms = {"q.weight": torch.randn(6, 4)}, torch.rand(4)
    tensors = {"q.delora_A": A, "q.delora_B": B, "q.delora_lambda": torch.tensor([5.0]), "q.delora_w_norm": norms}
    adapter = adapter_from_tensors("a", {"peft_type": "DELORA", "r": 3}, tensors)
    expected = peft.tuners.delora.layer.DeloraLayer._compute_delta(A, B, torch.tensor([5.0]), 3, norms)
    assert_equal(plan_and_merge(adapter, base, {}), {"q.weight": base["q.weight"] + expected})


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=3, target_modules=[*LLAMA, "embed_tokens"]),
        LoraConfig(r=3, target_modules=LLAMA, use_dora=True),
        peft.LoHaConfig(r=3, target_modules=LLAMA),
        peft.IA3Config(target_modules=LLAMA, feedforward_modules=["down_proj"]),
        peft.HiraConfig(r=3, target_modules=LLAMA),
        peft.DeloraConfig(r=3, target_modules=LLAMA),
        peft.OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA),
        peft.VeraConfig(r=3, target_modules=["q_proj"]),
    ],
    ids=lambda config: f"{config.peft_type.value}{'-dora' if getattr(config, 'use_dora', False) else ''}",
)
def test_rounding_to_the_bases_dtype(config: Any, tmp_path: Path) -> None:
    """As peft merges into bfloat16: all but a few elements, that lie between two numbers, are the same bit for bit."""
    case = make_case(llama(), config, tmp_path, dtype=torch.bfloat16)
    with case.adapter:
        plan = plan_merge([case.adapter], refs_of(case.base), case.config)
        exact, ours = merge(plan, case.base), merge(plan, case.base, round_to="BF16")
    wrong = total = unrounded = 0
    for name, theirs in case.merged.items():
        if plan.for_tensor(name):
            wrong += int((ours[name] != theirs.float().numpy()).sum())
            unrounded += int((exact[name] != theirs.float().numpy()).sum())
            total += theirs.numel()
    assert wrong <= total * 0.005
    assert unrounded > total * 0.5


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (bert, LoraConfig(r=3, target_modules=["query", "dense"], task_type="SEQ_CLS", bias="all")),
        (gpt2, LoraConfig(r=3, target_modules=["c_attn", "c_proj"], trainable_token_indices={"wte": [1, 4]})),
        (mixtral, LoraConfig(r=3, target_modules=["q_proj"], target_parameters=EXPERTS)),
        (llama, LoraConfig(r=3, target_modules=LLAMA, init_lora_weights="pissa")),
        (llama, peft.VeraConfig(r=3, target_modules=["q_proj"])),
        (llama, peft.OFTConfig(r=0, oft_block_size=4, target_modules=LLAMA)),
    ],
    ids=["bert", "gpt2-tokens", "experts", "pissa", "vera", "oft"],
)
def test_a_live_model_with_its_adapter(build: Any, config: Any) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(build(), config)
        randomise(wrapped)
        adapters = adapters_from_peft(wrapped)
    base = {
        new: value.clone() for name, value in state_of(wrapped.get_base_model()).items() if (new := base_name(name))
    }
    hints = {new: kind for name, kind in open_live(wrapped.get_base_model()).hints.items() if (new := base_name(name))}
    described = wrapped.config.to_dict()
    ours = merge(plan_merge(adapters, refs_of(base), described, hints=hints), base)
    merged = wrapped.merge_and_unload(safe_merge=True)
    assert_equal(ours, state_of(merged))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_live_model_that_is_merged_already() -> None:
    wrapped = peft.get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj"]))
    wrapped.merge_adapter()
    with pytest.raises(AdapterError, match="q_proj holds its adapter merged already"):
        adapters_from_peft(wrapped)


def test_an_untouched_array_stays_and_a_merge_is_in_place(tmp_path: Path) -> None:
    case = make_case(llama(), LoraConfig(r=3, target_modules=["q_proj"]), tmp_path)
    with case.adapter:
        plan = plan_merge([case.adapter], refs_of(case.base), case.config)
        name = "model.layers.0.self_attn.q_proj.weight"
        W = case.base[name].numpy().copy()
        assert np.shares_memory(apply(plan.for_tensor(name), W), W)
        assert plan.for_tensor("model.norm.weight") == ()
