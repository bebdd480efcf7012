"""Which tensors are left out, and the words that say why.

Reasons are the constants below, so that they can be counted. Three go on with a detail: `TIED` with the original's
name, and what `unsupported` and `QUANTISED` say of weights that ought to be analysed and can't be (status ``failed``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from shardesd.matrices.names import ends_with, unnumbered
from shardesd.options import ScanOptions
from shardesd.records import TensorRef

EMBEDDING = "embedding"
"""A table of vectors looked up by token, type or class (``--embeddings`` analyses the 2-D ones)."""
POSITION = "position embedding"
"""Position embeddings and relative-position tables (``--embeddings`` analyses the 2-D ones)."""
NORM = "norm"
"""Scale of a normalisation layer."""
BIAS = "bias"
BUFFER = "buffer"
"""Saved state that no gradient reaches: running statistics, rotary frequencies, position ids."""
MASK = "mask"
"""Attention masks, such as GPT-2's 4-D ``attn.bias``."""
ELEMENTWISE = "elementwise parameter"
"""A parameter that multiplies or adds element by element (Mamba's ``A_log``, RWKV's ``time_decay``)."""
PARAMETRISED = "parametrised weight"
"""A factor of a weight that the model computes anew (weight norm, spectral norm), not the weight itself."""
SCALE = "quantisation parameter"
"""Scales, zero points and group indices of a quantised weight."""
INTEGER = "integer tensor"
EMPTY = "empty"
"""No elements."""
SCALAR = "scalar"
"""No dimensions."""
VECTOR = "vector"
"""One dimension."""
UNKNOWN_LAYOUT = "unknown layout"
"""Three dimensions or more, and neither a convolution's kernel nor a known stack of experts."""
ONE_ROW = "one row or column"
ONE_INPUT = "conv with one input channel per group"
"""A depthwise one, or the first of a model for sound: each of its slices is one column."""
ONE_OUTPUT = "conv with one output channel"
"""Each of its slices is one row."""
ASPECT = "aspect ratio"
"""Longer side ≥ ``--max-aspect`` × shorter side, in a 2-D matrix that is no embedding."""
EXCLUDED = "excluded"
"""By ``--include`` or ``--exclude``."""
TIED = "tied duplicate"
"""The same bytes as an embedding that comes first (decided where both can be read)."""
QUANTISED = "quantised codes are not analysed as weights"
"""Packed or integer codes, whose values mean nothing without their scales."""

REASONS: tuple[str, ...] = (
    *(EMBEDDING, POSITION, NORM, BIAS, BUFFER, MASK, ELEMENTWISE, PARAMETRISED, SCALE, INTEGER, EMPTY, SCALAR, VECTOR),
    *(UNKNOWN_LAYOUT, ONE_ROW, ONE_INPUT, ONE_OUTPUT, ASPECT, EXCLUDED, TIED, QUANTISED),
)

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types that can be analysed."""
INTEGERS = frozenset({"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"})

_BY_BLOCK_TYPE = {"embedding": EMBEDDING, "position": POSITION, "norm": NORM}
_BY_NAME = (
    (MASK, ends_with(r"masked_bias|causal_mask|attn_mask|attention_mask|mask|tril")),
    (
        BUFFER,
        ends_with(
            r"(?:\w+_)?inv_freq|position_ids|token_type_ids|running_mean|running_var|num_batches_tracked",
            r"relative_position_index|relative_coords_table|freqs_cis|(?:cos|sin)(?:_cached)?",
            r"(?:rotary_emb|rotary_pos_emb)\.\w+|(?:weight|bias)_integer|embed_avg",
        ),
    ),
    (
        SCALE,
        ends_with(
            r"qzeros|scales|g_idx|absmax|quant_map|nested_\w+|SCB|weight_format|weight_shape|weight_g_idx",
            r"(?:\w+_)?(?:weight|input|output|global|activation)_scale(?:_inv|_2)?|(?:\w+_)?zero_point",
            r"[kvq]_scale|scale_inv|\w+_scales|\w+_scale_inv|quant_state\.\w+|bitsandbytes__\w+",
            r"codebooks|(?<!masked_embedding\.)(?:\w+_)?centroids\.weight|weight\._(?:scale|shift)",
            r"(?:\w+_)?hadamard_matrix|spinquant_\w+_matrix",
        ),
    ),
    (BIAS, ends_with(r"(?:\w+_)?bias(?:es)?(?:_[uv])?")),
    (PARAMETRISED, ends_with(r"parametrizations\.\w+\.\w+", r"weight_[guv]|weight_orig")),
    (
        ELEMENTWISE,
        ends_with(
            r"A_log|D|dt_bias|sinks|logit_scale|layer_scale\w*|layer_scale\w*\.\w+|ls\d\.gamma|gamma(?:_\d)?|lambda_?\d*",
            r"time_(?:decay|first|faaaa|mix_\w+|maa_[xwkvrg])|\w+_clip\.scale",
        ),
    ),
)
_SCALES = ("scales", "scale", "qzeros", "SCB", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_scb")
_CODES = ends_with(r"weight|qweight|weight_packed|\w+_blocks|\w+_packed|\w+_proj|\w+_weight\.blocks|experts\.w[123]")
_CODES_OF_OTHERS = ends_with(
    r"codes|Qidxs\w*|q_weight|(?:\w+_)?indices|dense_weights|weight\.(?:_data\.)*_data",
    r"trellis|B|W_q|quantized_weight_values|\w+_qdata",
)
"""As AQLM, QuIP#, EXL2, VPTQ, SpQR and quanto, EXL3, QQQ, HQQ and SINQ, Four Over Six and torchao call them, where
config.json speaks of quantisation."""
_CONVOLUTION = re.compile(r"(?:^|\.)[A-Za-z0-9_]*(?:[Cc]onv|patch_embed)")
_LONGEST_UNNAMED_KERNEL = 16


def reason_by_name(
    name: str, block_type: str, ndim: int | None, siblings: Collection[str], options: ScanOptions
) -> str:
    """Why the tensor `name` is left out whatever its values and size are; empty where its name gives no reason.

    `ndim` is None while it isn't known. `siblings` are the checkpoint's tensor names: a weight beside a
    ``running_mean`` is a batch norm's.
    """
    if ndim == 4 and name.rpartition(".")[2] == "bias":
        return MASK
    # T5's and Swin's relative_…_bias tables are positions, not biases.
    if block_type != "position" and (reason := _reason_of(unnumbered(name))):
        return reason
    # What is looked up by number has two dimensions: a weight of more is a convolution's.
    if block_type == "embedding" and ndim is not None and ndim > 2 and name.endswith(".weight"):
        return ""
    if block_type in _BY_BLOCK_TYPE and not (options.embeddings and block_type != "norm"):
        return _BY_BLOCK_TYPE[block_type]
    if name.endswith("weight") and f"{name.removesuffix('weight')}running_mean" in siblings:
        return NORM
    return ""


@lru_cache(maxsize=8192)
def _reason_of(stem: str) -> str:
    """No rule asks for a number."""
    return next((reason for reason, rule in _BY_NAME if rule.search(stem)), "")


def reason_by_shape(tensor: TensorRef) -> str:
    """Why a tensor of this shape holds no matrix; empty where it may."""
    if not tensor.shape:
        return SCALAR
    if not tensor.numel:
        return EMPTY
    return VECTOR if len(tensor.shape) == 1 else ""


def is_conv(tensor: TensorRef, hint: str | None) -> bool:
    """Whether a tensor of 3 to 5 dimensions is the kernel of a convolution (cout, cin per group, kernel …).

    Convolutions are what 4-D and 5-D weights are. A 3-D weight can be some stack of matrices too: it must be called
    conv or have a short kernel, for a wrong guess here would give numbers that mean nothing.
    """
    ndim = len(tensor.shape)
    if ndim not in (3, 4, 5):
        return False
    if hint is not None and hint.startswith("conv"):
        return True
    if tensor.name.rpartition(".")[2] != "weight":
        return False
    return ndim > 3 or tensor.shape[2] <= _LONGEST_UNNAMED_KERNEL or bool(_CONVOLUTION.search(tensor.name))


def is_quantised(tensor: TensorRef, siblings: Collection[str] | None, config: Mapping[str, Any]) -> bool:
    """Whether the integers in `tensor` are codes for a weight's values.

    Those of a plain weight wider than a byte are not, where neither config.json nor a tensor beside it (`siblings`: all
    names, or None while they aren't known) speaks of quantisation.
    """
    if tensor.dtype not in INTEGERS or tensor.dtype == "BOOL" or len(tensor.shape) < 2:
        return False
    speaks = _speaks_of_quantisation(config)
    if speaks and _CODES_OF_OTHERS.search(tensor.name):
        return True
    if not _CODES.search(tensor.name):
        return False
    stem, dot, leaf = tensor.name.rpartition(".")
    if leaf != "weight" or tensor.dtype in ("I8", "U8") or siblings is None or speaks:
        return True
    return any(f"{stem}{dot}{scale}" in siblings for scale in _SCALES)


def _speaks_of_quantisation(config: Mapping[str, Any]) -> bool:
    """Of the model, or of a part of it."""
    parts = (value for value in config.values() if isinstance(value, dict))
    return any("quantization_config" in place for place in (config, *parts))


def unsupported(dtype: str) -> str:
    """The reason of a weight in an element type that can't be analysed."""
    return f"{dtype} weights are not supported"


def is_excluded(longname: str, options: ScanOptions) -> bool:
    """Whether the globs leave `longname` out. They are case-sensitive and cover the whole longname."""
    if options.include and not any(fnmatchcase(longname, glob) for glob in options.include):
        return True
    return any(fnmatchcase(longname, glob) for glob in options.exclude)


def is_elongated(M: int, N: int, options: ScanOptions) -> bool:
    """Whether the aspect ratio reaches ``--max-aspect``."""
    return options.max_aspect > 0 and max(M, N) >= options.max_aspect * min(M, N)
