"""The built-in rows: which stored tensors are fused or stacked, by ``model_type``, and how.

Every row follows the forward pass of the model's own code; tests/matrices/test_forward.py holds them to it. The first
row that fits decides.
"""

from __future__ import annotations

from shardesd import conv1d
from shardesd.matrices.layouts import BLOCK_TYPE_OF_SUFFIX, Layout, Part, Table
from shardesd.matrices.models import (
    GATED_Q,
    GLU_CONV,
    MLA,
    PATCHED,
    SOUND,
    STACKED_GATE_UP,
    TIMM_SWIGLU,
    VISION_THIRDS,
    words,
)
from shardesd.matrices.userfile import read_layouts

DIFFUSERS_FF = r"ff(?:_\w+)?\.net\.0\.proj"
MODULATIONS = "shifts, scales and gates analysed together"


def parts(*words: str, **heads: str) -> tuple[Part, ...]:
    """Parts from ``"q: heads * head_dim"`` or, with an equal share, ``"k"``; `heads` are `Part.heads` by suffix."""
    found = []
    for word in words:
        suffix, _, size = (piece.strip() for piece in word.partition(":"))
        kind = BLOCK_TYPE_OF_SUFFIX.get(suffix, "other")
        found.append(Part(suffix=suffix, block_type=kind, size=size, heads=heads.get(suffix, "")))
    return tuple(found)


QKV = parts("q", "k", "v")
Q_THEN_KV = parts("q: heads * head_dim", "k", "v")
GATE_UP = parts("gate", "up")
UP_GATE = parts("up", "gate")
KEY_VALUE = parts("k", "v")
ALL_ONE_KEY = parts("q", "k: head_dim", "v: head_dim", k="1", v="1")
OWN_HEADS = parts("q", "k", "v", k="heads", v="heads")
BY_GROUP = parts("q", "k: head_dim", "v: head_dim")

ATTENTION_QKV: tuple[Layout, ...] = (
    # GPT-2: q, k, v side by side in the columns. Columns = 3 rows rules out other models' nn.Linear.
    Layout(names=r"crossattention\.c_attn", models=("gpt_bigcode",), note="fused kv analysed whole"),
    Layout(names="c_attn", models=("gpt_bigcode",), when="not multi_query", groups="heads", parts=OWN_HEADS),
    Layout(
        names="c_attn",
        models=("gpt_bigcode",),
        when="multi_query",
        parts=parts("q: heads * head_dim", "k", "v", k="1", v="1"),
    ),
    Layout(names="c_attn", models=("qwen",), parts=QKV),
    Layout(names=r"crossattention\.c_attn", transposed=True, when="columns == 2 * rows", parts=KEY_VALUE),
    Layout(names="c_attn", transposed=True, when="columns == 3 * rows", parts=QKV),
    Layout(names=r"(?:attn|attention)\.c_proj", models=conv1d.MODELS, transposed=True),
    Layout(names=r"q_attn", models=conv1d.MODELS, transposed=True),
    # Heads side by side, each with its q, k, v.
    Layout(
        names="query_key_value",
        models=("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon"),
        groups="heads",
        parts=OWN_HEADS,
    ),
    Layout(names="qkv_proj", models=("minimax",), groups="heads", parts=OWN_HEADS),
    Layout(names=r"attention\.self\.in_proj", models=("deberta",), groups="heads", parts=OWN_HEADS),
    # Falcon: with new_decoder_architecture each key has its group of queries; one key for all; or as GPT-NeoX.
    Layout(
        names="query_key_value",
        models=("falcon", "RefinedWeb*"),
        when="new_decoder_architecture",
        groups="kv_heads",
        parts=BY_GROUP,
    ),
    Layout(names="query_key_value", models=("falcon", "RefinedWeb*"), when="multi_query", parts=ALL_ONE_KEY),
    Layout(
        names="query_key_value",
        models=("falcon", "RefinedWeb*"),
        when="not multi_query",
        groups="heads",
        parts=OWN_HEADS,
    ),
    Layout(names="wqkv", models=("internlm2*",), groups="kv_heads", parts=BY_GROUP),
    # CodeGen: as laid out for four TPU cores, each with its q, v, k.
    Layout(names=r"attn\.qkv_proj", models=("codegen",), groups="4", parts=parts("q", "v", "k")),
    # All queries, then all keys, then all values.
    Layout(names="Wqkv", models=("mpt", "dbrx"), parts=Q_THEN_KV),
    Layout(names="qkv_proj", models=("phi3*", "phi4*"), parts=Q_THEN_KV),
    Layout(names="query_key_value", models=("chatglm",), when="multi_query_attention", parts=Q_THEN_KV),
    Layout(names="query_key_value", models=("chatglm",), groups="heads", parts=OWN_HEADS),
    Layout(names="Wqkv", models=("modernbert*", "nomic_bert", "jina_embeddings_v3"), parts=QKV),
    Layout(names=r"attention\.qkv_proj", models=("gte", "new"), parts=QKV),
    Layout(names=r"attn\.gqkv_proj", models=("hrm_text",), parts=parts("gate", "q", "k", "v")),
    Layout(names=r"qkv_proj\.convolution", models=("mobilevitv2",), conv=True, parts=parts("q: 1", "k", "v")),
    Layout(names="W_pack", models=("baichuan",), parts=QKV),
    Layout(names="att_proj", models=("bark", "semantic", "coarse_acoustics", "fine_acoustics"), parts=QKV),
    Layout(names="qkv_linear", models=("layoutlmv2",), parts=QKV),
    Layout(names=r"attn\.qkv", models=("exaone4_5*",), parts=Q_THEN_KV),
    Layout(names=r"(?:attn|attention|self_attn)\.qkv", models=VISION_THIRDS, parts=QKV),
    # timm's models, whose config.json names an architecture of its own.
    Layout(names=r"attn\.qkv", when="architecture and rows == 3 * columns", parts=QKV),
    # torch.nn.MultiheadAttention.
    Layout(names="in_proj_weight", when="rows == 3 * columns", parts=QKV),
    # Multi-head latent attention: a latent and the keys' rotary part; from the latent, keys and values by head.
    Layout(
        names="w?kv_a(?:_proj)?_with_mqa",
        models=MLA,
        parts=parts("kv: kv_lora_rank", "k_rope: qk_rope_head_dim", k_rope="1"),
    ),
    Layout(
        names="kv_b_proj|wkv_b",
        models=MLA,
        groups="heads",
        parts=parts("k: qk_nope_head_dim", "v: v_head_dim", k="heads", v="heads"),
    ),
    Layout(names="kv_b_proj_[kv]", when="columns == kv_lora_rank", heads="heads"),  # GGUF has the two apart
    Layout(names="kv_b_proj_[kv]", note="analysed as stored: its shape doesn't tell how the heads lie"),
    Layout(
        names="q_b_proj|q_proj|wq_b|wq",
        models=MLA,
        when="rows == heads * (qk_nope_head_dim + qk_rope_head_dim)",
        heads="heads",
    ),
    Layout(names="o_proj|attention.wo", models=MLA, when="columns == heads * v_head_dim", heads="heads"),
    # Heads of their own number, or none.
    Layout(
        names=r"t2u_model\.model\.encoder\.layers\.\d+\.self_attn\.(?:[qkv]|out)_proj",
        models=("seamless_m4t*",),
        heads="t2u_encoder_attention_heads",
    ),
    Layout(
        names=r"t2u_model\.model\.decoder\.layers\.\d+\.(?:self_attn|cross_attention)\.(?:[qkv]|out)_proj",
        models=("seamless_m4t*",),
        heads="t2u_decoder_attention_heads",
    ),
    Layout(names=r"downsample\.assign\.[qkv]_proj", models=("groupvit*",), heads="1"),
    Layout(names="q_a_proj|wq_a", heads="1"),
    Layout(
        names="q_gate_proj|q_b_proj",  # in the running model, and on disk
        models=("axk2",),
        groups="heads",
        parts=parts("q: qk_nope_head_dim + qk_rope_head_dim", "gate: v_head_dim", q="heads"),
    ),
    # A group of heads has a projection of its own, of its own inputs.
    Layout(names=r"attn\.wo_a|self_attn\.o_a_proj", models=("deepseek_v4*",), experts="o_groups"),
    # Key and value are the same.
    Layout(names=r"attn\.wkv|compressor\.(?:indexer\.(?:compressor\.)?)?wkv|kv_proj", models=("deepseek_v4*",)),
    # Keys, then values.
    Layout(names="to_kv", models=("granite_speech*", "evolla*"), parts=KEY_VALUE),
    Layout(names="kv_proj", models=("jetmoe",), parts=KEY_VALUE),
    Layout(
        names="q_proj",
        models=GATED_Q,
        when="rows == 2 * heads * head_dim",
        groups="heads",
        parts=parts("q", "gate"),
    ),
)

LINEAR_ATTENTION: tuple[Layout, ...] = (
    Layout(
        names="in_proj_qkvz",
        models=("qwen3_next",),
        groups="linear_num_key_heads",
        parts=parts(
            *("q: linear_key_head_dim", "k: linear_key_head_dim", "v", "z"),
            **{"q": "linear_num_key_heads", "k": "linear_num_key_heads", "v": "linear_num_value_heads"},
        ),
    ),
    Layout(names="in_proj_ba", models=("qwen3_next",), groups="linear_num_key_heads", parts=parts("b", "a")),
    Layout(
        names="in_proj_qkv",
        models=(*GATED_Q, "lara_mini"),
        parts=parts(
            "q: linear_num_key_heads * linear_key_head_dim",
            "k: linear_num_key_heads * linear_key_head_dim",
            "v: linear_num_value_heads * linear_value_head_dim",
            **{"q": "linear_num_key_heads", "k": "linear_num_key_heads", "v": "linear_num_value_heads"},
        ),
    ),
    Layout(names="in_proj_qkvz_[qk]", heads="linear_num_key_heads"),  # GGUF has them apart
    Layout(names="in_proj_qkvz_v", heads="linear_num_value_heads"),
    # Gated delta nets: values and outputs by value heads, queries and keys by key heads.
    *(
        Layout(names=rf"linear_attn\.{names}", when=f"{side} == {heads} * {width}", heads=heads)
        for names, side, heads, width in (
            ("[qk]_proj", "rows", "linear_num_key_heads", "linear_key_head_dim"),
            ("v_proj", "rows", "linear_num_value_heads", "linear_value_head_dim"),
            ("(?:out|o)_proj", "columns", "linear_num_value_heads", "linear_value_head_dim"),
        )
    ),
    # Mamba: what goes through the convolution, and the gate. Zamba has them row by row.
    Layout(names=r"(?:mixer|mamba)\.in_proj", models=("mamba", "falcon_mamba", "jamba"), parts=parts("x", "z")),
    Layout(names=r"mamba\.in_proj", models=("zamba",), groups="rows / 2", parts=parts("x", "z")),
    Layout(
        names=r"mixer\.x_proj",
        models=("mamba", "falcon_mamba"),
        parts=parts("dt: time_step_rank", "B: state_size", "C: state_size"),
    ),
    Layout(
        names=r"mamba\.x_proj",
        models=("jamba",),
        parts=parts("dt: mamba_dt_rank", "B: mamba_d_state", "C: mamba_d_state"),
    ),
    # Zamba's and RecurrentGemma's heads have weights of their own.
    Layout(
        names=r"mamba\.x_proj_weight",
        models=("zamba",),
        experts="n_mamba_heads",
        parts=parts("dt: mamba_dt_rank", "B: mamba_d_state", "C: mamba_d_state"),
    ),
    Layout(names=r"mamba\.dt_proj_weight", models=("zamba",), experts="n_mamba_heads"),
    Layout(names=r"rg_lru\.(?:input|recurrent)_gate_weight", models=("recurrent_gemma",), experts="heads"),
    # Mamba 2: the gate, x with B and C (one convolution runs over all three), the time steps.
    *(
        Layout(
            names=r"(?:mixer|mamba|mamba_\w+)\.in_proj",
            models=models,
            parts=parts(f"gate: {inner}", "xBC", f"dt: {heads}"),
        )
        for models, inner, heads in (
            (("mamba2",), "num_heads * head_dim", "num_heads"),
            (("bamba", "granitemoehybrid"), "mamba_n_heads * mamba_d_head", "mamba_n_heads"),
            (("falcon_h1",), "mamba_d_ssm", "mamba_n_heads"),
            (("falcon_h1",), "mamba_expand * hidden", "mamba_n_heads"),  # where that is null
            (("nemotron_h",), "mamba_num_heads * mamba_head_dim", "mamba_num_heads"),
            (("zamba2",), "n_mamba_heads * mamba_headdim", "n_mamba_heads"),
        )
    ),
    Layout(names=r"conv\.in_proj", models=("lfm2*", "lfm3*"), parts=parts("B", "C", "x")),
    Layout(names=r"(?:mixer|mamba)\.in_proj", note="fused in_proj analysed whole"),
    Layout(names=r"(?:mixer|mamba)\.x_proj", note="fused x_proj analysed whole"),
    Layout(names=r"mixer\.bcdt_proj", note="fused bcdt_proj analysed whole"),  # PLaMo 2's
)

MLP: tuple[Layout, ...] = (
    Layout(names=r"mlp\.gate_up_proj", models=("phi4_multimodal_audio",), parts=UP_GATE),
    Layout(
        names="gate_up_proj",
        models=words("phi3* phi4* glm* dia* minimax_m3_vl* dots3_note* zamba2 esmc esmfold2 hrm_text"),
        parts=GATE_UP,
    ),
    Layout(names=r"gate_up_proj_adapter_list\.\d+\.1", models=("zamba2",), parts=GATE_UP),
    Layout(names=r"mlp\.up_gate_proj", models=("gte", "new"), parts=UP_GATE),
    Layout(names=r"mlp\.w13_dn", models=("inkling*",), groups="rows / 2", parts=GATE_UP),
    Layout(names=r"ffn\.proj_1", models=("openelm",), when="ffn_with_glu", parts=GATE_UP),
    Layout(names=r"mlp\.Wi", models=("modernbert*",), parts=parts("input", "gate")),
    # ChatGLM 2 and 3; the first has no gate, and another word for the width.
    Layout(names="dense_h_to_4h", models=("chatglm",), when="rows == 2 * ffn_hidden_size", parts=GATE_UP),
    Layout(names="dense_h_to_4h", models=("chatglm",), when="rows == inner_hidden_size"),
    Layout(names="dense_h_to_4h", models=("chatglm",), note="analysed whole: config.json doesn't tell of a gate"),
    Layout(names="shared_mlp.input_linear", models=("granitemoe*",), parts=GATE_UP),
    Layout(names="input_linear", models=("granite_speech*",)),
    Layout(names="fc1", models=("moonshine*",), when="rows == 2 * intermediate_size", parts=UP_GATE),
    Layout(names=r"mlp\.fc1", models=("moshi*", "kyutai_speech_to_text*"), when="rows == ffn_dim", parts=GATE_UP),
    # timm's models with a packed SwiGLU.
    *(Layout(names=r"mlp\.fc1", when=f"architecture == '{name}'", parts=GATE_UP) for name in TIMM_SWIGLU),
    # diffusers' and latent diffusion's GEGLU and SwiGLU: plain layers of the same name are half as wide.
    Layout(names=DIFFUSERS_FF, when="rows == 8 * columns", parts=UP_GATE),
    Layout(names=DIFFUSERS_FF, when="rows == 4 * columns"),
    Layout(names=DIFFUSERS_FF, note="analysed whole: its shape doesn't tell of a gate"),
    Layout(names=r"mlp\.weights_in", models=("dinov2*",), parts=GATE_UP),
    # Jina's and Mosaic's BERTs, whose config.json says bert.
    Layout(names=r"mlp\.gated_layers", when="rows == 2 * intermediate_size", parts=GATE_UP),
    Layout(names=r"mlp\.up_gated_layer", when="rows == 2 * intermediate_size", parts=UP_GATE),
    Layout(names=r"(?:mlp|ffn)\.w12", models=("tipsv2*", "sapiens2*"), parts=GATE_UP),
    Layout(names=r"conv\.pointwise_lin1", models=("granite_speech5*",), parts=UP_GATE),
    Layout(names=r"multi_modal_projector\.linear_1", models=("aya_vision", "cohere2_vision"), parts=UP_GATE),
    Layout(names=r"lconv1d\.linear_start(?:\.linear)?", models=("gemma3n*", "gemma4*"), parts=UP_GATE),
    Layout(names=r"mlp\.fc1\.proj", models=("clvp*",), parts=UP_GATE),
    # Convolutions with a gated linear unit.
    Layout(names=r"pointwise_conv1", models=GLU_CONV, conv=True, parts=UP_GATE),
    Layout(names=r"adapter\.layers\.\d+\.(?:(?:residual|self_attn)_)?conv", models=GLU_CONV, conv=True, parts=UP_GATE),
    Layout(names=r"conv\.up_conv", models=("granite_speech*",), conv=True, parts=UP_GATE),
    Layout(names=r"conv\.conv_layers\.\d+", models=("speech_to_text",), conv=True, parts=UP_GATE),
    Layout(names=r"glu\.ext_pw_conv_1d", models=("phi4_multimodal*",), conv=True, parts=UP_GATE),
)

SEVERAL = (
    Layout(
        names=r"modulation\.projection_in", models=("focalnet",), parts=parts("q: columns", "ctx: columns", "gates")
    ),
    Layout(names=r"text_encoder\.project", models=("vits",), conv=True, parts=parts("mean", "log_variance")),
    Layout(names=r"gateway\.gate", models=("d_fine*", "deimv2*"), parts=parts("gate1", "gate2")),
    # Modulations of adaptive norms.
    Layout(
        names=r"(?:attn_|ff_)?norm\d*(?:_context|_out|_x|_y)?\.linear|adaln_single\.linear",
        when="rows == 2 * columns or rows == 3 * columns or rows == 4 * columns or rows == 6 * columns"
        " or rows == 9 * columns or rows == 12 * columns",
        note=MODULATIONS,
    ),
    Layout(names=r"adaln_proj|adaLN_modulation\.\d+|(?:img_|txt_)?mod(?:ulation)?\.lin", note=MODULATIONS),
    # VibeVoice's, which lies beside the towers that config.json tells of.
    Layout(names=r"diffusion_head\.(?:layers\.\d+\.linear|final_layer\.linear_1)", note=MODULATIONS),
    Layout(names=r"head\.linear", models=("wavtokenizer", "xcodec2", "neucodec"), parts=parts("magnitude", "phase")),
)

RECURRENT = (
    Layout(
        names=r"weight_[ih]h(?:_l\d+(?:_reverse)?)?",
        note="gates of a recurrent layer, where it has any, analysed together",
    ),
)

EXPERTS: tuple[Layout, ...] = (
    # Inputs × outputs in each expert. gpt-oss has gate and up in turns.
    Layout(names=r"experts\.gate_up_proj", models=("gpt_oss",), transposed=True, groups="columns / 2", parts=GATE_UP),
    Layout(names=r"experts\.gate_up_proj", models=("llama4*", "openai_privacy_filter"), transposed=True, parts=GATE_UP),
    Layout(names=r"experts\.(?:gate_up_proj|fc1)", models=("aria*",), transposed=True, parts=GATE_UP),
    # On disk inputs × outputs, in the running model outputs × inputs; where these are equal, as on disk.
    Layout(
        names=r"experts\.gate_up_proj",
        models=("qwen3_vl_moe*",),
        transposed=True,
        when="columns == 2 * moe_intermediate_size and rows == hidden",
        parts=GATE_UP,
    ),
    Layout(names=r"experts\.w13_weight", models=("inkling*",), groups="rows / 2", parts=GATE_UP),
    Layout(
        names=r"shared_experts\.shared_w13_weight",
        models=("inkling*",),
        experts="n_shared_experts",
        groups="rows / 2",
        parts=GATE_UP,
    ),
    Layout(names=r"shared_experts\.shared_w2_weight", models=("inkling*",), experts="n_shared_experts"),
    Layout(names=r"experts\.gate_up_proj", models=STACKED_GATE_UP, parts=GATE_UP),
    Layout(names=r"block_sparse_moe\.input_linear", models=("granitemoe*",), parts=GATE_UP),
    Layout(names=r"(?:mlp|moe)\.input_linear", models=("jetmoe",), parts=GATE_UP),
    Layout(names=r"self_attention\.experts\.input_linear", models=("jetmoe",)),  # of queries
    Layout(names=r"experts\.mlp\.(?:w1|v1|w2)", models=("dbrx",), experts="experts"),
    Layout(names=r"experts\.mlp\.(?:w1|v1|w2)", note="stacked experts analysed whole"),
)

FLAT: tuple[Layout, ...] = (
    # Inputs × heads × head size; of XLNet's o, outputs first.
    Layout(names=r"rel_attn\.[qkvor]", models=("xlnet",), flatten=True),
    Layout(names=r"self_attn\.r_kernel|attention\.r_kernel", models=("funnel",), flatten=True),
)

PATCHES: tuple[Layout, ...] = (
    Layout(
        names=r"patch_embed(?:ding|dings|der)?(?:\.(?:proj|projection|patch_embeddings))?|patch_conv"
        r"|embeddings\.(?:proj|projection)|embed_patches\.proj|(?:visual|vision_model)\.conv1",
        models=PATCHED,
        when="kernel == patch_size",
        flatten=True,
    ),
    # Their kernel is their stride, which config.json gives side by side.
    Layout(names=r"patch_embeddings\.projection", models=("vivit", "videoprism*"), flatten=True),
    Layout(
        names=r"feature_(?:extractor|encoder)\.conv_layers\.0\.conv", models=SOUND, when="channels == 1", flatten=True
    ),
)

BUILT_IN = Table(
    (*ATTENTION_QKV, *LINEAR_ATTENTION, *MLP, *SEVERAL, *RECURRENT, *EXPERTS, *FLAT, *PATCHES), numbers=False
)


def user_table(path: str) -> Table:
    """The built-in rows, after those of a user's file where `path` names one. Raises `OptionError`."""
    if not path:
        return BUILT_IN
    own = read_layouts(path)
    return Table((*own, *BUILT_IN.rows), own=len(own))
