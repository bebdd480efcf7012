"""What a tensor's name tells: longname, block type, layer index. Nothing here knows shapes or models.

A rule is a regular expression for the end of a name that begins at a component: ``fc1|ffn\\.lin1`` is met by
``layers.3.fc1`` and ``fc1``, and not by ``myfc1``. The first rule that a name meets decides, so the rows' order counts.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import NamedTuple

ATTENTION = r"(?:att|\w*(?:attn|[Aa]ttention)\w*)"
MLP = r"(?:mlp|ffn|moe|block_sparse_moe|feed_forward|\w+_mlp)"
TOP = r"(?<!\.)"  # the component that follows is the name's first

_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "position",
        (
            r"wpe|embed_positions|positions_embed|rel_embeddings|rel_pos_[hw]|pe_k|position_enc",
            # ProphetNet's relative_pos_embeddings is a linear layer.
            r"(?!relative_pos_embeddings$)"
            r"(?:\w*_)?(?:position|positional|pos)_(?:emb|embed|embeds|embedding|embeddings)(?:_table|_layer|_vlm)?",
            r"(?:row|column)_embed(?:der|dings)|distance_embedding|tile_embedding|time_embeddings|rel_attn_embed",
            r"pos_enc|pos_idx_to_embed|emb_rel_[kv]|rpb|ape|index_kpool_compress_ape",
            r"relative_attention_bias_layer\.bias_values",
            r"(?:\w*_)?relative_(?:attention|position)_(?:bias|bias_table|embedding|embeddings)",
        ),
    ),
    (
        "norm",
        (
            r"(?:\w*_)?(?:[Ll]ayer|[Bb]atch|[Gg]roup|[Ii]nstance|[Rr][Mm][Ss])?_?(?:[Nn]orm|layrnorm|normalization)\d*",
            r"(?:\w*_)?(?:layer)?norm_(?:before|after|pre|post|attn|mlp|ffn|cross|embeddings?|\d+|[a-z])",
            r"norm\.(?:scale|shift)",
            r"(?:\w*_)?ln_?(?:\d+|f|out|pre|post|attn|mlp|x)?|(?:\w*_)?[bg]n\d*",
        ),
    ),
    (
        "router",
        (
            rf"{MLP}\.gate(?:\.wg)?|gate\.wg|shared_expert_gate",
            r"(?:\w+_)?router(?:\.(?:layer|classifier|gate|linear|proj))?",
        ),
    ),
    (
        "lm_head",
        (
            r"lm_head(?:\.decoder)?|generator_lm_head|lm_loss|embed_out|output_projection|vocab_projector",
            r"predictions\.decoder|pred_layer\.proj",
            rf"{TOP}(?:proj_out|output|decoder)",
        ),
    ),
    (
        "embedding",
        (
            # ESMFold 2 calls two linear layers so.
            r"wte|emb|(?<!rel_pos\.)(?<!msa_encoder\.)embed|embedding|embeddings|embed_in|tokens_embed",
            r"embed_(?:text_|audio_)?tokens(?:\.\d+)?|text_embed_tokens|embed_tokens_per_layer",
            r"(?:word|tok|token|text_token|token_type|segment|lang|language|class|speaker|char|entity|unit)_embeddings?",
            r"(?:label|prompt|speaker_id|language_id|task_type|visual_token_type|ngram|generation|value)_embeddings?",
            r"(?:encoder_hash_tok|weight|additional)_embedding|token_type_embeddings_\d+|codec?_embedding(?:\.\d+)?",
            r"HashBucketCodepointEmbedder_\d+|embedders\.\d+",
            r"(?<!embedder\.)input_embeddings?|xpath_\w+_sub_embeddings\.\d+",  # PatchTST's embedder has a linear layer
            r"embed_(?:speaker|timestep|global|char)|input_embeds_layers?(?:\.\d+)?|embed_sum|codebook",
            r"(?:pronunciation|num_speakers|denoising_class|codec|label|level|point|shape|tgt|reference_point)_embed",
            r"(?:dist_bin_pairwise|no_mask|not_a_point|cls)_embed|(?:freq|segment)_emb|label_embeddings_concat",
            # DOGE's experts: each is a row of both.
            r"mlp\.(?:up|down)_embed",
            rf"{TOP}query|(?:\w+_)?projector\.query|quer(?:y|ies)_(?:embed|embedder|features|feat)|query_\d+_resolution",
            r"query_refpoint_embeddings|latent_query|latents_\dd",
            r"(?:\w+_)?(?:cls|class|mask|dist|distillation|register|query|bos_eos|iou|hq|score|presence|detection)_tokens?",
            r"(?:cls|segment|type)_token_\w+|group_token|masked_spec_embed|mask_emb|probe|latents",
            rf"{TOP}transformer\.w|(?:{TOP}|model\.|transformer\.|led\.|language_model\.|text_encoder\.)shared",
        ),
    ),
    # RWKV's channel mix calls its two matrices key and value. Qwen's first multiplies w1 by what it activates of w2; in
    # vision transformers (EVA, DINOv2) w3 comes last.
    ("gate_proj", (r"h\.\d+\.mlp\.w2",)),
    ("up_proj", (r"(?:feed_forward|ffn)\.key|h\.\d+\.mlp\.w1|(?<!transformer\.)blocks\.\d+\.mlp\.w2",)),
    ("down_proj", (r"(?:feed_forward|ffn)\.value|(?<!transformer\.)blocks\.\d+\.mlp\.w3",)),
    (
        "kv",
        (r"kv|kv_proj|to_kv|[Ww]kv|key_value|w?kv_a(?:_proj)?_with_mqa|kv_[ab]_proj|wkv_[ab]|crossattention\.c_attn",),
    ),
    (
        "qkv",
        (
            r"g?qkv|g?qkv_proj|qkv_linear|qkv_fused|attn_qkv|to_qkv|to_qkv_mlp_proj|[Ww]qkv|query_key_value|W_pack|att_proj",
            r"in_proj_weight|in_proj_qkvz?",
            rf"c_attn|{ATTENTION}\.(?:self\.)?in_proj",
        ),
    ),
    # kv_b_proj_k, input_linear_gate …: the parts of a fused tensor, where a GGUF file has it cut.
    (
        "q_proj",
        (r"(?:q|query)(?:_proj|_lin|_global)?|q_[ab]_proj|q_attn|[Ww]q(?:_[ab])?|to_q|q_proj_weight|in_proj_qkvz_q",),
    ),
    ("k_proj", (r"(?:k|key)(?:_proj|_lin|_global)?|[Ww]k|to_k|k_proj_weight|kv_b_proj_k|in_proj_qkvz_k",)),
    ("v_proj", (r"(?:v|value)(?:_proj|_lin|_global)?|[Ww]v|to_v|v_proj_weight|kv_b_proj_v|in_proj_qkvz_v",)),
    (
        "o_proj",
        (
            r"o_proj|out_lin|to_out(?:\.0)?|attn_out",
            # MobileBERT's bottleneck makes the inputs of an attention.
            rf"(?<!bottleneck\.){ATTENTION}\.(?:output\.dense|dense|c_proj|proj|out_proj|projection|output|[Ww]?o)",
        ),
    ),
    (
        "gate_up",
        (
            r"gate_up_proj|up_gate_proj|proj_up_gate_z|gate_and_up|gate_up|ff_proj|weights_in|w12|w13(?:_\w+)?",
            r"ffn_gate_up_exps",
            rf"(?<!encoder\.)input_linear|shared_w13_weight|gate_and_up_projs|gated_layers|up_gated_layer|{MLP}\.Wi",
        ),
    ),
    ("gate_proj", (r"gate_proj|w1|wi_0|input_linear_gate|in_proj_qkvz_z",)),
    (
        "up_proj",
        (
            r"up_proj|w3|v1|wi|wi_1|fc1|fc_in|c_fc|lin1|linear1|pwconv1|dense_h_to_4h|intermediate(?:\.|_)dense",
            r"input_linear_up|layers?\.\d+\.ffn|albert_layers\.\d+\.ffn|mlp\.linear_1",
        ),
    ),
    (
        "down_proj",
        (
            r"down_proj|w2|wo|weights_out|fc2|fc_out|lin2|linear2|pwconv2|dense_4h_to_h|output(?:\.|_)dense|ffn_output",
            rf"output_linear|ff_out|mlp\.linear_2|{MLP}\.(?:c_proj|Wo)",
        ),
    ),
    (
        "conv",
        (
            r"(?:\w*_)?(?:dw|pw)?conv(?:olution)?(?:_?\d*[a-z]*)?",
            r"patch_embed(?:ding|dings)?(?:\.(?:proj|projection))?",
        ),
    ),
)


@cache
def ends_with(*rules: str) -> re.Pattern[str]:
    """A pattern whose `search` finds names that end in one of the rules, from the beginning of a component."""
    return re.compile(rf"(?:^|\.)(?:{'|'.join(rules)})$")


_ROLES = tuple((role, ends_with(*rules)) for role, rules in _RULES)
BLOCK_TYPES: tuple[str, ...] = tuple(dict.fromkeys((*(role for role, _ in _RULES), "expert", "other")))
"""Every value that `block_type` can have. ``qkv``, ``kv`` and ``gate_up`` are fused tensors that were not split."""

_STACKS = (
    # A parameter of a module called `experts`, which holds no numbered experts of its own.
    re.compile(r"(?:^|\.)experts(?!\.(?:\w+_)?[0-9]+(?:\.|$))(?:\.|$)"),
    ends_with(r"(?:moe|block_sparse_moe|mlp)\.(?:input_linear|output_linear)", r"moe\.(?:gate|up|down)_proj"),
    ends_with(r"ffn_\w+_exps"),  # of a GGUF file, where the gguf package doesn't know the model's own name
)

_LONGEST = 300  # characters of a name's end that rules are tried on: keeps hostile names from costing quadratic time
_NOT_IN_EXPERTS = ("position", "norm", "router", "lm_head", "embedding")
_EXPERT = re.compile(r"(?:^|\.)(?:shared_)?experts?(?:_\d+)?(?:\.|$)")

# What a module calls its parameters: left off before a rule is tried, so that a bias or a packed weight has the block
# type of its module.
_PARAMETER = re.compile(
    r"\.(?:bias|weight|weight_(?!embedding$)\w+|parametrizations\.\w+\.\w+|qweight|qzeros|scales|g_idx|SCB)$"
)

_WRAPPED = ".base_layer"
"""What peft puts behind the name of a layer that it wraps, in files of models with adapters of their own."""

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")

_BLOCK_NUMBER = re.compile(
    r"(?:^|\.)(?:(?:\w+_)?(?:layers?|blocks?|stages?|groups?|resblocks)|h|features|cells)\.([0-9]{1,9})(?=\.|$)"
)
# What holds numbered layers in some models and parts of a block in others: counts where nothing else is numbered.
_OTHER_NUMBER = re.compile(r"(?:^|\.)(?:attentions|ffns|conformer|encoders|self_attends|mixers)\.([0-9]{1,9})(?=\.|$)")
_NAMED_BLOCK = re.compile(r"(?:^|\.)(?:layer|stage|block|denseblock)([0-9]{1,9})(?=\.|$)")


class Name(NamedTuple):
    """What a name alone tells of a tensor."""

    longname: str
    """The name without ``.weight``."""
    layer_index: int | None
    """The outermost block number, as it stands in the name: ``encoder.layer.3`` → 3, ``block.4.layer.0`` → 4,
    ``stages.2.layers.1`` and torchvision's ``layer2.1`` → 2 (the stage; blocks are numbered anew in each). Both stacks
    of an encoder-decoder count from 0. None outside all blocks."""
    block_type: str
    """One of `BLOCK_TYPES`."""


@lru_cache(maxsize=8192)
def parse_name(name: str) -> Name:
    """The longname, layer index and block type of the tensor `name`."""
    longname = name.removesuffix(".weight")
    part = role(longname)
    if part not in _NOT_IN_EXPERTS and _EXPERT.search(longname):
        part = "expert"
    return Name(longname, _layer_index(longname), part)


def role(longname: str) -> str:
    """What the matrix does in its block: `Name.block_type`, but ``gate_up``, ``down_proj`` … inside an expert too."""
    return _role_of(unnumbered(unwrapped(_PARAMETER.sub("", longname[-_LONGEST:]))))


def unwrapped(longname: str) -> str:
    """The layer's own name where an adapter's wrapper stands around it."""
    return longname.removesuffix(_WRAPPED)


@lru_cache(maxsize=1024)  # each is asked for several times while its tensor is planned
def unnumbered(name: str) -> str:
    """The name with 0 for each number between two dots, of a layer or an expert: of thousands of names, a few dozen."""
    return _NUMBER.sub("0", name)


@lru_cache(maxsize=8192)
def _role_of(stem: str) -> str:
    """No rule asks for a number."""
    return next((part for part, rule in _ROLES if rule.search(stem)), "other")


def is_stack(longname: str) -> bool:
    """Whether a tensor of 3 dimensions with this name holds one matrix per expert along its first axis."""
    return any(rule.search(longname) for rule in _STACKS)


def _layer_index(longname: str) -> int | None:
    found = [match for rule in (_BLOCK_NUMBER, _NAMED_BLOCK) if (match := rule.search(longname))]
    first = min(found, key=lambda match: match.start()) if found else _OTHER_NUMBER.search(longname)
    return int(first[1]) if first else None


_DIGITS = re.compile("([0-9]+)")
NaturalKey = tuple[tuple[tuple[int, str] | str, ...], str]


def natural_key(name: str) -> NaturalKey:
    """Sort key in which numbers count by value: ``h.2`` before ``h.10``."""
    parts: list[tuple[int, str] | str] = [*_DIGITS.split(name)]
    for at in range(1, len(parts), 2):
        digits = str(parts[at]).lstrip("0")
        # Equal lengths make digits compare by value, however long a hostile name makes them.
        parts[at] = len(digits), digits
    return tuple(parts), name


def may_be_tied(name: str) -> bool:
    """Whether the tensor is the weight of an embedding or a vocabulary head, of which one may be a copy of another.

    Only these are ever compared: equal hidden layers are not ties (merged models repeat layers on purpose).
    """
    return name.endswith("weight") and parse_name(name).block_type in ("embedding", "lm_head")


def tie_order(name: str) -> tuple[bool, int, NaturalKey]:
    """Sort key of the tensors that `may_be_tied`: of equal ones the first is the original, the others its duplicates.

    Embeddings come before heads, outer ones before inner ones (T5's ``shared`` before ``encoder.embed_tokens``).
    """
    return parse_name(name).block_type == "lm_head", name.count("."), natural_key(name)
