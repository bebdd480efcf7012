"""No two tensors share a longname."""

from __future__ import annotations

import itertools

import pytest

from shardesd.matrices.unique import renamed


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m.a", "m.a.weight"], {"m.a.weight": "m.a.weight"}),
        (
            ["m.a", "m.a.weight", "m.a.weight.weight"],
            {"m.a.weight": "m.a.weight", "m.a.weight.weight": "m.a.weight.weight"},
        ),
        (["h.c_attn.weight", "h.c_attn_q.weight"], {"h.c_attn_q.weight": "h.c_attn_q.weight"}),
        (["h.c_attn.weight", "h.c_attn_q"], {"h.c_attn_q": "h.c_attn_q#2"}),
        (["z.experts.w", "z.experts.w.experts.1"], {"z.experts.w.experts.1": "z.experts.w.experts.1#2"}),
        (["z.experts.w.weight", "z.experts.w.experts.1"], {"z.experts.w.weight": "z.experts.w.weight"}),
        (
            ["z.experts.w", "z.experts.w.experts.1.weight"],
            {"z.experts.w.experts.1.weight": "z.experts.w.experts.1.weight"},
        ),
    ],
)
def test_the_later_one_keeps_its_full_name(names: list[str], expected: dict[str, str]) -> None:
    for order in itertools.permutations(names):
        assert renamed(order) == expected


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["m.a.weight", "m.a.bias", "m.b.weight", "m.b_q.weight"],
        # gpt-oss
        ["mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales", "mlp.experts.gate_up_proj_bias"],
        ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"],
        # DeepSeek, GPT-2, Mixtral
        ["attn.kv_a_proj_with_mqa.weight", "attn.kv_b_proj.weight", "attn.kv_a_layernorm.weight"],
        [
            "h.0.attn.c_attn.weight",
            "h.0.attn.c_attn.bias",
            "h.0.attn.c_proj.weight",
            "h.0.crossattention.q_attn.weight",
        ],
        [f"block_sparse_moe.experts.{i}.w{j}.weight" for i in range(12) for j in (1, 2, 3)],
        ["linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.in_proj_a.weight"],
    ],
    ids=lambda names: names[0] if names else "none",
)
def test_names_that_do_not_meet_are_left_alone(names: list[str]) -> None:
    assert renamed(names) == {}
