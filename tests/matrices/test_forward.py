"""Every matrix that a scan emits is one that the model multiplies by: proved on the models' own forward passes.

Tiny random models are made, saved and scanned. What q, k, v, gate, up … really are is found by running the saved
model's modules on the rows of an identity (and on zeros, for the biases) and catching what attention, activations and
convolutions are given; at position 0 rotary embeddings do nothing. No rule of how tensors are cut is repeated here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emitted import Emitted, emitted
from safetensors.torch import save_file
from torch import nn

import shardesd

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")

Truth = dict[str, np.ndarray]
H, MLP = 32, 16  # H = 2·MLP: nothing can be told from shapes
TEXT = {
    **{"vocab_size": 64, "hidden_size": H, "intermediate_size": MLP, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
GPT = {"vocab_size": 64, "n_embd": H, "n_layer": 1, "n_head": 4, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
MOE = {**GROUPED, "num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": MLP, "num_experts_per_tok": 2}
IMAGE = {
    **{"hidden_size": H, "intermediate_size": MLP, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"image_size": 8, "patch_size": 4},
}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def linear(run: Callable[[torch.Tensor], torch.Tensor], inputs: int) -> np.ndarray:
    """The matrix (outputs, inputs) of an affine map on rows."""
    with torch.no_grad():
        eye = torch.eye(inputs, dtype=torch.float64)
        out = run(eye) - run(torch.zeros_like(eye))
    return out.reshape(inputs, -1).T.numpy().copy()


# What attention is given


@contextmanager
def caught(attention: nn.Module) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """The q, k, v (batch, heads, 1, head size) that reach the attention function of a module."""
    found: list[tuple[torch.Tensor, ...]] = []
    home = sys.modules[type(attention).__module__]

    def catch(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        found.append((q, k, v))
        raise StopIteration

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        q = found[-1][0] if found and len(found[-1]) == 2 else None
        if q is None:
            found.append((a, b.transpose(-1, -2)))
            return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        found[-1] = (*found[-1], b)
        raise StopIteration

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        return catch(None, q, k, v)

    if hasattr(home, "eager_attention_forward"):
        with replaced(home, "eager_attention_forward", catch):
            yield found
    elif hasattr(attention, "_attn"):  # CodeGen, in transformers for Python 3.10
        with replaced(attention, "_attn", partial(catch, None)):
            yield found
    elif hasattr(attention, "_reshape"):  # Bloom
        own = attention._reshape
        with replaced(attention, "_reshape", lambda fused: catch(None, *own(fused))):
            yield found
    elif type(attention).__name__ in ("MptAttention", "DisentangledSelfAttention"):
        with replaced(torch, "matmul", product):
            yield found
    else:
        with replaced(nn.functional, "scaled_dot_product_attention", whole):
            yield found


def attention_inputs(model: nn.Module, path: str, inputs: int = H) -> tuple[np.ndarray, ...]:
    """The matrices of q, k, v of the attention module at `path`, from a run of the whole model."""
    attention = model.get_submodule(path)
    runs = []
    for norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
        if hasattr(attention, norm):
            setattr(attention, norm, nn.Identity())
    for rows in (torch.eye(inputs, dtype=torch.float64), torch.zeros(inputs, inputs, dtype=torch.float64)):

        def feed(module: Any, args: Any, kwargs: Any, rows: torch.Tensor = rows) -> Any:
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": rows[:, None]}
            return (rows[:, None], *args[1:]), kwargs

        handle = attention.register_forward_pre_hook(feed, with_kwargs=True)
        with caught(attention) as found, torch.no_grad(), pytest.raises(StopIteration):
            model(input_ids=torch.ones(inputs, 1, dtype=torch.long))
        handle.remove()
        runs.append(found[0])
    return tuple(_by_head(a - b) for a, b in zip(*runs, strict=True))


def _by_head(x: torch.Tensor) -> np.ndarray:
    """(batch, heads, 1, size) → (heads·size, batch); heads that were repeated for several queries once."""
    once = torch.unique_consecutive(x[:, :, 0] if x.ndim == 4 else x, dim=1)
    return once.reshape(len(x), -1).T.numpy().copy()


def fused_qkv(fused: str) -> Probe:
    def probe(model: nn.Module) -> Truth:
        truth = {}
        for name, _ in model.named_modules():
            if name.endswith(f".{fused}"):
                attention = name.removesuffix(f".{fused}")
                for suffix, matrix in zip("qkv", attention_inputs(model, attention), strict=True):
                    truth[f"{name}_{suffix}"] = matrix
        return truth

    return probe


# What activations are given


class Recorder(nn.Module):
    """An activation that keeps what it is given, and gives ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x
        return torch.ones_like(x)


def deberta(model: nn.Module) -> Truth:
    """Its queries are scaled by 1/√(head size) before they meet the keys."""
    path = "deberta.encoder.layer.0.attention.self"
    q, k, v = attention_inputs(model, path)
    return {f"{path}.in_proj_q": q * np.sqrt(H / 4), f"{path}.in_proj_k": k, f"{path}.in_proj_v": v}


def torch_attention(model: nn.Module) -> Truth:
    """torch's own attention, which cuts its joint weight in one function."""
    truth = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found: list[tuple[torch.Tensor, ...]] = []
            own = nn.functional._in_projection_packed

            def keep(*args: Any, own: Any = own, found: Any = found) -> Any:
                found.append(own(*args))
                return found[-1]

            def part(i: int, module: Any = module, found: Any = found) -> Callable[[torch.Tensor], torch.Tensor]:
                return lambda x: (module(x[:, None], x[:, None], x[:, None]), found[-1][i])[1].reshape(len(x), -1)

            with replaced(nn.functional, "_in_projection_packed", keep), replaced(module, "training", True):
                for i, suffix in enumerate("qkv"):
                    truth[f"{name}.in_proj_weight_{suffix}"] = linear(part(i), module.embed_dim)
    return truth


def gated(fused: str, names: tuple[str, str], act: str, down: str) -> Probe:
    """A gated MLP: what its activation is given (`names[0]`), and what it is multiplied by (`names[1]`)."""

    def probe(model: nn.Module) -> Truth:
        truth = {}
        for name, _ in model.named_modules():
            if not name.endswith(f".{fused}"):
                continue
            mlp = model.get_submodule(name.rpartition(".")[0])
            record = Recorder()
            with replaced(mlp, act, record), replaced(mlp, down, nn.Identity()):
                truth[f"{name}_{names[1]}"] = linear(mlp, H)
                truth[f"{name}_{names[0]}"] = linear(lambda x, mlp=mlp, record=record: (mlp(x), record.given)[1], H)
        return truth

    return probe


def run_expert(experts: nn.Module, i: int, x: torch.Tensor, count: int) -> torch.Tensor:
    """What expert `i` makes of the rows of `x`."""
    if type(experts).__name__ == "Llama4TextExperts":
        return experts(x.repeat(count, 1)).view(count, len(x), -1)[i]
    index = torch.full((len(x), 1), i)
    return experts(x, index, torch.ones(len(x), 1, dtype=x.dtype)).reshape(len(x), -1)


def expert_matrices(experts: nn.Module, i: int, count: int, owner: nn.Module, act: str, down: str) -> list[np.ndarray]:
    """gate, up and down of one expert (outputs, inputs). For up, the down projections begin with an identity."""
    record = Recorder()
    original = getattr(owner, down)
    pass_on = torch.zeros_like(original.data).view(count, -1, original.shape[-1])
    for j in range(min(pass_on.shape[1:])):
        pass_on[:, j, j] = 1
    passing = nn.Parameter(pass_on.view_as(original))

    def gate_of(x: torch.Tensor) -> torch.Tensor:
        run_expert(experts, i, x, count)
        return (record.given[i] if record.given.ndim == 3 else record.given).clone()

    with replaced(owner, act, record):
        gate = linear(gate_of, H)
        with replaced(owner, down, passing):
            up = linear(lambda x: run_expert(experts, i, x, count)[:, : len(gate)], H)
        with torch.no_grad():
            out = run_expert(experts, i, torch.eye(H, dtype=torch.float64), count).numpy()
    return [gate, up, np.linalg.lstsq(up.T, out, rcond=None)[0].T]


def stacked(name: str, names: tuple[str, str, str], *, count: int = 3, act: str = "act_fn", mlp: str = "") -> Probe:
    """Experts of the module `name`; `names` are the longnames of expert {}'s gate, up and down on disk."""

    def probe(model: nn.Module) -> Truth:
        truth = {}
        for path, module in model.named_modules():
            if path.endswith(f".{name}"):
                owner = module.get_submodule(mlp) if mlp else module
                prefix = path.removesuffix(f".{name}")
                down = "down_proj" if hasattr(owner, "down_proj") else "w2"
                for i in range(count):
                    found = expert_matrices(module, i, count, owner, act, down)
                    for template, matrix in zip(names, found, strict=True):
                        truth[f"{prefix}.{template.format(i)}"] = matrix
        return truth

    return probe


def gpt_oss(model: nn.Module) -> Truth:
    """(up + 1)·gate·σ(α·gate), seen by σ."""
    truth = {}
    experts = model.get_submodule("model.layers.0.mlp.experts")
    seen: list[torch.Tensor] = []

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        seen.append(x / experts.alpha)
        return torch.ones_like(x)

    passing = torch.zeros_like(experts.down_proj.data)
    for j in range(MLP):
        passing[:, j, j] = 1
    for i in range(3):
        with replaced(torch, "sigmoid", sigmoid):

            def gate(x: torch.Tensor, i: int = i) -> torch.Tensor:
                run_expert(experts, i, x, 3)
                return seen[-1]

            def up(x: torch.Tensor, i: int = i) -> torch.Tensor:
                with replaced(experts, "down_proj", nn.Parameter(passing)):
                    out = run_expert(experts, i, x, 3)[:, :MLP] - experts.down_proj_bias[i, :MLP]
                return out / seen[-1] - 1

            def down(x: torch.Tensor, i: int = i) -> torch.Tensor:
                return run_expert(experts, i, x, 3)

            name = "model.layers.0.mlp.experts"
            truth[f"{name}.gate_up_proj.experts.{i}_gate"] = linear(gate, H)
            truth[f"{name}.gate_up_proj.experts.{i}_up"] = linear(up, H)
            with torch.no_grad():
                eye = torch.eye(H, dtype=torch.float64)
                z = (up(eye) + 1) * gate(eye)
                out = down(eye) - experts.down_proj_bias[i]
            truth[f"{name}.down_proj.experts.{i}"] = np.linalg.lstsq(z.numpy(), out.numpy(), rcond=None)[0].T
    return truth


# Latent, linear and state-space attention


def latent_attention(model: nn.Module) -> Truth:
    path = "model.layers.0.self_attn"
    attention = model.get_submodule(path)
    attention.kv_a_layernorm = nn.Identity()
    attention.q_a_layernorm = nn.Identity()
    seen: list[torch.Tensor] = []
    handle = attention.kv_a_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    _, keys, _ = attention_inputs(model, path)
    handle.remove()
    nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    # The rotary part is the same for all heads and permuted at position 0: put back by what the model's own permutation
    # does to known numbers.
    order = _rotary_order(model, path, rope)
    rotary = keys.reshape(-1, nope + rope, H)[0, nope:]
    latent = (seen[0] - seen[1]).reshape(H, -1).T.numpy()
    own = attention.kv_a_proj_with_mqa

    class Latent(nn.Module):
        def __init__(self, rows: torch.Tensor) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.rows, torch.zeros(len(self.rows), rope, dtype=x.dtype)], 1)[:, None]

    size = own.out_features - rope
    attention.kv_a_proj_with_mqa = Latent(torch.eye(size, dtype=torch.float64))
    with caught(attention) as found, torch.no_grad(), pytest.raises(StopIteration):
        model(input_ids=torch.ones(size, 1, dtype=torch.long))
    attention.kv_a_proj_with_mqa = own
    _, k, v = found[0]
    return {
        f"{path}.kv_a_proj_with_mqa_kv": latent,
        f"{path}.kv_a_proj_with_mqa_k_rope": rotary[order],
        f"{path}.kv_b_proj_k": _by_head(k[..., :nope]),
        f"{path}.kv_b_proj_v": _by_head(v),
    }


def _rotary_order(model: nn.Module, path: str, rope: int) -> np.ndarray:
    attention = model.get_submodule(path)
    own = attention.kv_a_proj_with_mqa

    class Numbers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            latent = torch.zeros(*x.shape[:-1], own.out_features - rope, dtype=x.dtype)
            return torch.cat([latent, torch.arange(rope, dtype=x.dtype).expand(*x.shape[:-1], rope)], -1)

    with (
        replaced(attention, "kv_a_proj_with_mqa", Numbers()),
        caught(attention) as found,
        torch.no_grad(),
        pytest.raises(StopIteration),
    ):
        model(input_ids=torch.ones(1, 1, dtype=torch.long))
    return np.argsort(found[0][1][0, 0, 0, -rope:].numpy())


def qwen3_next(model: nn.Module) -> Truth:
    truth = {}
    delta = model.get_submodule("model.layers.0.linear_attn")

    def part(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: delta.fix_query_key_value_ordering(
            delta.in_proj_qkvz(x[:, None]), delta.in_proj_ba(x[:, None])
        )[i].reshape(len(x), -1)

    for i, suffix in enumerate("qkvzba"):
        fused = "in_proj_qkvz" if suffix in "qkvz" else "in_proj_ba"
        truth[f"model.layers.0.linear_attn.{fused}_{suffix}"] = linear(part(i), H)
    path = "model.layers.1.self_attn"
    truth[f"{path}.q_proj_q"] = attention_inputs(model, path)[0]
    # With an attention that gives ones, the output projection is given σ(gate).
    attention = model.get_submodule(path)
    home = sys.modules[type(attention).__module__]
    seen: list[torch.Tensor] = []

    def ones(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.ones_like(q).transpose(1, 2), None

    def gate(x: torch.Tensor) -> torch.Tensor:
        def feed(module: Any, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "hidden_states": x[:, None]}

        with (
            replaced(home, "eager_attention_forward", ones),
            attention.register_forward_pre_hook(feed, with_kwargs=True),
        ):
            hook = attention.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
            model(input_ids=torch.ones(len(x), 1, dtype=torch.long))
            hook.remove()
        return torch.logit(seen[-1].reshape(len(x), -1))

    truth[f"{path}.q_proj_gate"] = linear(gate, H)
    return truth


def mamba(model: nn.Module) -> Truth:
    """x is what the convolution is given; z multiplies what comes out; x_proj's parts are what the scan is given."""
    mixer = model.get_submodule("backbone.layers.0.mixer")
    home = sys.modules[type(mixer).__module__]
    path, inner = "backbone.layers.0.mixer", mixer.intermediate_size
    conv: list[torch.Tensor] = []
    scan: list[tuple[Any, dict[str, Any]]] = []

    def convolution(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        conv.append(x)
        return x

    def selective(*args: Any, **kwargs: Any) -> Any:
        scan.append((args, kwargs))
        raise StopIteration

    def run(x: torch.Tensor) -> None:
        with (
            replaced(home, "causal_conv1d_fn", convolution),
            replaced(home, "mamba_selective_scan", selective),
            pytest.raises(StopIteration),
        ):
            mixer(x[:, None])

    def x_of(x: torch.Tensor) -> torch.Tensor:
        run(x)
        return conv[-1][..., 0]

    def z_of(x: torch.Tensor) -> torch.Tensor:
        run(x)
        return scan[-1][1]["z"][..., 0]

    truth = {f"{path}.in_proj_x": linear(x_of, H), f"{path}.in_proj_z": linear(z_of, H)}

    class Passing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.rows, self.rows], -1)[:, None]

    passing = Passing()
    steps = mixer.dt_proj.weight.detach().numpy()

    def given(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(x: torch.Tensor) -> torch.Tensor:
            passing.rows = x
            run(torch.zeros(len(x), H, dtype=torch.float64))
            return scan[-1][0][i][..., 0] if i == 1 else scan[-1][0][i].reshape(len(x), -1)

        return of

    with replaced(mixer, "in_proj", passing):
        stepped = linear(given(1), inner)
        truth[f"{path}.x_proj_dt"] = np.linalg.lstsq(steps, stepped, rcond=None)[0]
        truth[f"{path}.x_proj_B"] = linear(given(3), inner)
        truth[f"{path}.x_proj_C"] = linear(given(4), inner)
    return truth


def mamba2(model: nn.Module) -> Truth:
    mixer = model.get_submodule("backbone.layers.0.mixer")
    home = sys.modules[type(mixer).__module__]
    path = "backbone.layers.0.mixer"
    seen: dict[str, torch.Tensor] = {}

    def convolution(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen["xBC"] = x[..., 0]
        return x

    def scan(x: torch.Tensor, dt: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen["dt"] = dt
        return torch.ones_like(x)

    class Norm(nn.Module):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            seen["gate"] = gate
            return x

    def of(word: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with (
                replaced(home, "causal_conv1d_fn", convolution),
                replaced(home, "mamba2_chunk_scan", scan),
                replaced(mixer, "norm", Norm()),
            ):
                mixer(x[:, None])
            return seen[word].reshape(len(x), -1)

        return run

    return {f"{path}.in_proj_{word}": linear(of(word), H) for word in ("gate", "xBC", "dt")}


# Images


def patches(model: nn.Module) -> Truth:
    """One patch at a time: the convolution's output for every picture of one bright element."""
    truth = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.kernel_size == module.stride and "patch" in name:
            shape = module.weight.shape[1:]
            truth[name] = linear(lambda x, m=module, s=shape: m(x.reshape(-1, *s)), int(np.prod(shape)))
    return truth


def vision_qkv(path: str) -> Probe:
    """An attention that is called with no model around it, its rotary embedding at position 0."""

    def probe(model: nn.Module) -> Truth:
        attention = model.get_submodule(path)
        size = attention.head_dim

        def of(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def run(x: torch.Tensor) -> torch.Tensor:
                found = []
                home = sys.modules[type(attention).__module__]

                def catch(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
                    found.append((q, k, v))
                    return q.transpose(1, 2), None

                flat = torch.ones(len(x), size, dtype=x.dtype), torch.zeros(len(x), size, dtype=x.dtype)
                with replaced(home, "eager_attention_forward", catch):
                    attention(x, cu_seqlens=torch.tensor([0, len(x)]), position_embeddings=flat)
                return found[0][i][0].transpose(0, 1).reshape(len(x), -1)

            return run

        return {f"{path}.qkv_{suffix}": linear(of(i), H) for i, suffix in enumerate("qkv")}

    return probe


Probe = Callable[[nn.Module], Truth]


@dataclass(frozen=True)
class Case:
    config: str
    model: str
    settings: dict[str, Any]
    probes: list[Probe] = field(default_factory=list)


DISK_GATE_UP = (
    "experts.gate_up_proj.experts.{}_gate",
    "experts.gate_up_proj.experts.{}_up",
    "experts.down_proj.experts.{}",
)
PER_EXPERT = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
SPLIT_ATTENTION = fused_qkv("query_key_value")
QWEN_MOE = {**MOE, "decoder_sparse_step": 1, "norm_topk_prob": True, "shared_expert_intermediate_size": MLP}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
VL_TEXT = {
    **{key: MOE[key] for key in MOE if key not in ("pad_token_id", "bos_token_id", "eos_token_id")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    # transformers itself can't tell its disk's layout (inputs × outputs) from its modules' where H = 2I.
    "moe_intermediate_size": 24,
}
VL_VISION = {
    **{"depth": 1, "hidden_size": H, "intermediate_size": MLP, "num_heads": 4, "patch_size": 4, "out_hidden_size": H},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "temporal_patch_size": 2},
}

CASES: dict[str, Case] = {
    "gpt2": Case("GPT2", "GPT2LMHeadModel", GPT, [fused_qkv("c_attn")]),
    "gpt_neox": Case("GPTNeoX", "GPTNeoXForCausalLM", TEXT, [SPLIT_ATTENTION]),
    "bloom": Case("Bloom", "BloomForCausalLM", {**GPT, "hidden_size": H}, [SPLIT_ATTENTION]),
    "falcon-new": Case(
        "Falcon",
        "FalconForCausalLM",
        {**TEXT, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        [SPLIT_ATTENTION],
    ),
    "falcon-multi-query": Case(
        "Falcon",
        "FalconForCausalLM",
        {**TEXT, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
        [SPLIT_ATTENTION],
    ),
    "falcon-old": Case(
        "Falcon",
        "FalconForCausalLM",
        {**TEXT, "new_decoder_architecture": False, "multi_query": False, "alibi": False},
        [SPLIT_ATTENTION],
    ),
    "mpt": Case(
        "Mpt",
        "MptForCausalLM",
        {"vocab_size": 64, "d_model": H, "n_heads": 4, "n_layers": 1, "expansion_ratio": 1, "max_seq_len": 8},
        [fused_qkv("Wqkv")],
    ),
    "codegen": Case("CodeGen", "CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, [fused_qkv("qkv_proj")]),
    "persimmon": Case("Persimmon", "PersimmonForCausalLM", TEXT, [SPLIT_ATTENTION]),
    "bigcode-multi-query": Case("GPTBigCode", "GPTBigCodeForCausalLM", GPT, [fused_qkv("c_attn")]),
    "bigcode-old": Case("GPTBigCode", "GPTBigCodeForCausalLM", {**GPT, "multi_query": False}, [fused_qkv("c_attn")]),
    "phi3": Case(
        "Phi3",
        "Phi3ForCausalLM",
        {**TEXT, "num_key_value_heads": 2},
        [fused_qkv("qkv_proj"), gated("gate_up_proj", ("gate", "up"), "activation_fn", "down_proj")],
    ),
    "glm": Case(
        "Glm",
        "GlmForCausalLM",
        {**GROUPED, "head_dim": 16},
        [gated("gate_up_proj", ("gate", "up"), "activation_fn", "down_proj")],
    ),
    "dbrx": Case(
        "Dbrx",
        "DbrxForCausalLM",
        {
            **{"d_model": H, "n_heads": 4, "n_layers": 1, "max_seq_len": 8, "vocab_size": 64},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1e6, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": MLP, "moe_num_experts": 3, "moe_top_k": 2, "hidden_size": H},
        },
        [
            fused_qkv("Wqkv"),
            stacked(
                "experts",
                ("experts.mlp.w1.experts.{}", "experts.mlp.v1.experts.{}", "experts.mlp.w2.experts.{}"),
                act="activation_fn",
                mlp="mlp",
            ),
        ],
    ),
    "modernbert": Case(
        "ModernBert",
        "ModernBertForMaskedLM",
        {**TEXT, "sep_token_id": 2, "cls_token_id": 1, "attn_implementation": "eager"},
        [fused_qkv("Wqkv"), gated("Wi", ("input", "gate"), "act", "Wo")],
    ),
    "deberta": Case("Deberta", "DebertaForMaskedLM", {**TEXT, "relative_attention": False}, [deberta]),
    "qwen3_next": Case(
        "Qwen3Next",
        "Qwen3NextForCausalLM",
        {
            **{**QWEN_MOE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
            **{"linear_value_head_dim": 12, "partial_rotary_factor": 0.25},
        },
        [qwen3_next, stacked("mlp.experts", tuple(f"mlp.{name}" for name in PER_EXPERT))],
    ),
    "mixtral": Case(
        "Mixtral",
        "MixtralForCausalLM",
        MOE,
        [
            stacked(
                "mlp.experts",
                tuple(f"block_sparse_moe.experts.{{}}.{word}" for word in ("w1", "w3", "w2")),
            )
        ],
    ),
    "qwen2_moe": Case(
        "Qwen2Moe", "Qwen2MoeForCausalLM", QWEN_MOE, [stacked("mlp.experts", tuple(f"mlp.{n}" for n in PER_EXPERT))]
    ),
    "qwen3_moe": Case(
        "Qwen3Moe", "Qwen3MoeForCausalLM", QWEN_MOE, [stacked("mlp.experts", tuple(f"mlp.{n}" for n in PER_EXPERT))]
    ),
    "deepseek_v3": Case(
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        {**TEXT, **LATENT, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": MLP, "first_k_dense_replace": 0, "num_key_value_heads": 4},
        [latent_attention, stacked("mlp.experts", tuple(f"mlp.{name}" for name in PER_EXPERT))],
    ),
    "deepseek_v2": Case(
        "DeepseekV2",
        "DeepseekV2ForCausalLM",
        {**TEXT, **LATENT, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": MLP, "first_k_dense_replace": 0, "num_key_value_heads": 4, "n_shared_experts": 1}
        | {"topk_method": "greedy"},
        [latent_attention, stacked("mlp.experts", tuple(f"mlp.{name}" for name in PER_EXPERT))],
    ),
    "llama4": Case(
        "Llama4Text",
        "Llama4ForCausalLM",
        {**MOE, "interleave_moe_layer_step": 1, "intermediate_size_mlp": MLP, "moe_layers": [0]},
        [stacked("feed_forward.experts", tuple(f"feed_forward.{name}" for name in DISK_GATE_UP))],
    ),
    "gpt_oss": Case("GptOss", "GptOssForCausalLM", MOE, [gpt_oss]),
    "granitemoe": Case(
        "GraniteMoe",
        "GraniteMoeForCausalLM",
        {**TEXT, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2},
        [
            stacked(
                "block_sparse_moe.experts",
                (
                    "block_sparse_moe.input_linear.experts.{}_gate",
                    "block_sparse_moe.input_linear.experts.{}_up",
                    "block_sparse_moe.output_linear.experts.{}",
                ),
            )
        ],
    ),
    "mamba": Case("Mamba", "MambaForCausalLM", {**TEXT, "state_size": 4, "time_step_rank": 6}, [mamba]),
    "mamba2": Case(
        "Mamba2",
        "Mamba2ForCausalLM",
        {**TEXT, "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 2, "expand": 2, "chunk_size": 8},
        [mamba2],
    ),
    "vit": Case("ViT", "ViTForImageClassification", IMAGE, [patches]),
    "clip": Case("CLIP", "CLIPModel", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}, [patches]),
    "siglip": Case(
        "Siglip",
        "SiglipModel",
        {"text_config": {**TEXT, "projection_size": H}, "vision_config": IMAGE},
        [patches, torch_attention],
    ),
    "whisper": Case(
        "Whisper",
        "WhisperForConditionalGeneration",
        {
            **{"vocab_size": 64, "d_model": H, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": MLP},
            **{"decoder_ffn_dim": MLP, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "num_mel_bins": 8},
            **{"max_source_positions": 8, "max_target_positions": 8, "pad_token_id": 0, "decoder_start_token_id": 1},
            **{"bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "t5": Case(
        "T5",
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": H, "d_kv": 16, "d_ff": MLP, "num_layers": 1, "num_heads": 4}
        | {"feed_forward_proj": "gated-gelu"},
    ),
    "resnet": Case("ResNet", "ResNetModel", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}),
    "convnext": Case(
        "ConvNext", "ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}, [patches]
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoe",
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": VL_TEXT, "vision_config": VL_VISION},
        [
            patches,
            vision_qkv("model.visual.blocks.0.attn"),
            stacked("mlp.experts", tuple(f"mlp.{name}" for name in DISK_GATE_UP)),
        ],
    ),
}


RELATIVES = {
    **TEXT,
    **LATENT,
    **{
        "n_routed_experts": 3,
        "num_experts": 3,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    **{"moe_intermediate_size": MLP, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "num_key_value_heads": 4,
}
"""Of models with latent attention."""


def built(name: str) -> nn.Module:
    return made(CASES[name])


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.config}Config")(**case.settings)
    for part in (config, *(getattr(config, key) for key in getattr(config, "sub_configs", {}))):
        part._attn_implementation = "sdpa" if case.config == "Falcon" else "eager"
        part._experts_implementation = "eager"
    model = getattr(transformers, case.model)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def plain(model: nn.Module) -> Truth:
    """Whatever is one linear layer: by applying it."""
    truth: Truth = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            truth[name] = linear(lambda x, module=module: nn.Linear.forward(module, x), module.in_features)
        elif type(module).__name__ == "Conv1D":
            truth[name] = linear(module, module.weight.shape[0])
        elif type(module).__name__.endswith(("Router", "Gate")) and hasattr(module, "weight"):
            truth[name] = module.weight.detach().numpy()
    return truth


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Either way round; to float32, in which some models rotate."""
    return any(f.shape == expected.shape and np.allclose(f, expected, atol=1e-6) for f in (found, found.T))


def is_convolution(module: nn.Module, found: Emitted) -> bool:
    """Whether each slice maps one input position of the kernel's window to the output, as `module` does."""
    if not isinstance(module, nn.modules.conv._ConvNd) or int(np.prod(module.kernel_size)) != len(found.slices):
        return False
    if found.slices[0].shape != (module.out_channels, module.in_channels):
        return False
    size = [k + 2 * s for k, s in zip(module.kernel_size, module.stride, strict=True)]
    at = [-(-p // s) for p, s in zip(module.padding, module.stride, strict=True)]
    start = [a * s - p for a, s, p in zip(at, module.stride, module.padding, strict=True)]
    for k, position in enumerate(np.ndindex(module.kernel_size)):

        def run(x: torch.Tensor, position: Any = position) -> torch.Tensor:
            picture = torch.zeros(len(x), module.in_channels, *size, dtype=x.dtype)
            picture[(slice(None), slice(None), *(a + b for a, b in zip(start, position, strict=True)))] = x
            return module(picture)[(slice(None), slice(None), *at)]

        if not np.allclose(found.slices[k], linear(run, module.in_channels), atol=1e-9):
            return False
    return found.scale == 0.5


@pytest.mark.parametrize("name", CASES)
def test_every_emitted_matrix_is_what_the_model_multiplies_by(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    assert found
    truth = plain(model)
    for probe in CASES[name].probes:
        truth |= probe(model)
    for longname, matrix in found.items():
        assert not matrix.note, f"{longname}: {matrix.note}"
        if len(matrix.slices) > 1 or matrix.scale != 1:
            assert any(is_convolution(module, matrix) for module in model.modules()), longname
            continue
        (only,) = matrix.slices
        # Files call some modules otherwise than the running model does; a fused tensor's parts never.
        known = [truth[longname]] if longname in truth else list(truth.values())
        assert any(same(only, one) for one in known), longname


RUNNING = tuple(
    f"experts.{word}.experts.{{}}{end}" for word, end in (("gate_up_proj", "_gate"), ("gate_up_proj", "_up"))
)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "qwen3_vl_moe")
STACKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **dict.fromkeys(MIXTURES, ("mlp.experts", "mlp", (*RUNNING, "experts.down_proj.experts.{}"))),
    "llama4": ("feed_forward.experts", "feed_forward", (*RUNNING, "experts.down_proj.experts.{}")),
}


@pytest.mark.parametrize("name", STACKS)
def test_experts_that_are_stored_stacked_as_the_model_runs_them(name: str, tmp_path: Path) -> None:
    """What other tools save, and what a live model has: its own parameters, where transformers writes each expert."""
    model = built(name)
    state = {key: value.contiguous() for key, value in model.state_dict().items() if "experts." in key}
    save_file(state, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    found = {key: value for key, value in emitted(tmp_path).items() if "shared_expert" not in key}
    path, prefix, names = STACKS[name]
    truth = stacked(path, tuple(f"{prefix}.{word}" for word in names))(model)
    assert set(found) == set(truth)
    for longname, matrix in found.items():
        assert not matrix.note
        assert same(matrix.slices[0], truth[longname]), longname


@pytest.mark.parametrize(
    "name", ["AXK1", "AXK2", "DeepseekV32", "Glm4MoeLite", "HYV4", "MiniCPM3", "Mistral4", "Youtu"]
)
def test_latent_attention_of_deepseek_s_relatives(name: str, tmp_path: Path) -> None:
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} doesn't have it")
    model = made(Case(name, f"{name}ForCausalLM", RELATIVES))
    model.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    truth = latent_attention(model)
    assert len(truth) == 4
    for longname, matrix in truth.items():
        assert same(found[longname].slices[0], matrix), longname


def test_jetmoe_s_attention(tmp_path: Path) -> None:
    """Keys and values are fused; its queries are experts', which are not."""
    settings = {**TEXT, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = made(Case("JetMoe", "JetMoeForCausalLM", settings))
    model.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    path = "model.layers.0.self_attention"
    _, k, v = attention_inputs(model, path)
    assert same(found[f"{path}.kv_proj_k"].slices[0], k)
    assert same(found[f"{path}.kv_proj_v"].slices[0], v)
    experts = model.get_submodule(f"{path}.experts.input_linear").weight.detach().numpy()
    for i, expected in enumerate(experts):
        assert same(found[f"{path}.experts.input_linear.experts.{i}"].slices[0], expected)
    assert not [one.note for one in found.values() if one.note]


@pytest.mark.parametrize("name", ["gpt_neox", "falcon-new", "gpt_oss", "qwen3_vl_moe", "mamba2", "clip"])
def test_the_scan_s_spectra_are_those_of_these_matrices(name: str, tmp_path: Path) -> None:
    built(name).save_pretrained(tmp_path)
    found = emitted(tmp_path)
    result = shardesd.scan(tmp_path, max_aspect=0)
    assert sorted(result.spectra) == sorted(found)
    for longname, eigs in result.spectra.items():
        slices = [np.linalg.svd(one, compute_uv=False) ** 2 * found[longname].scale for one in found[longname].slices]
        np.testing.assert_allclose(eigs, np.sort(np.concatenate(slices)), rtol=1e-8, atol=1e-12)
