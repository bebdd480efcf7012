"""The ways to store a weight: what its parts are called, one row each, and what those names tell by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardesd.checkpoint.quantised import scaled
from shardesd.checkpoint.quantised.codes import FLOAT8

INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
REFUSED = {
    "sparse": "compressed-tensors' sparse bitmasks are not supported",
    "hqq": "HQQ is not supported",
    "marlin": "Marlin's layout is not supported",
    "quanto": "optimum-quanto is not supported",
    "paroquant": "ParoQuant, which rotates pairs of inputs, is not supported",
    "nunchaku": "Nunchaku's SVDQuant is not supported",
    "fp_quant": "FP-Quant is not supported",
}
"""Kind → why it can't be decoded."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names of one way to store a weight, all of them ends that follow the module's name."""

    kind: str
    codes: str
    others: tuple[str, ...]
    weight: str = ".weight"
    needs: tuple[str, ...] = ()
    """Those without which the codes are none."""
    dtypes: frozenset[str] = frozenset({*INTEGERS, *FLOAT8})
    """What codes may be; empty: anything."""

    def names(self, base: str) -> bool:
        """Whether parts of a weight may be called `base` and what follows: torchao begins a parameter's with ``_``."""
        return self.codes != "_qdata" or "._" in base[base.rfind(".") :]

    def name(self, base: str) -> str:
        """What the weight is called."""
        return ".".join(base.rsplit("._", 1)) if self.codes == "_qdata" else base + self.weight


_SCALES = ("_scale_inv", "_scale", "_scale_2", "_zero_point", "_g_idx")
_BITSANDBYTES = (
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
    *(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
)
"""Beside 4-bit codes, after the weight's name."""
_WORDS = (".qzeros", ".scales", ".g_idx")
FAMILIES = (
    Family("paroquant", ".qweight", (*_WORDS, ".theta", ".pairs", ".channel_scales"), needs=(".theta", ".pairs")),
    Family(
        "nunchaku",
        ".qweight",
        (".wscales", ".wtscale", ".wcscales", ".wzeros", ".proj_down", ".proj_up", ".smooth_factor"),
        needs=(".wscales",),
    ),
    Family(
        "fp_quant",
        ".qweight",
        (".scales", ".forward_hadamard_matrix", ".backward_hadamard_matrix", ".weight_global_scale"),
        needs=(".forward_hadamard_matrix",),
    ),
    Family("words", ".qweight", _WORDS),
    Family(
        "packed",
        ".weight_packed",
        tuple(f".weight_{end}" for end in ("scale", "zero_point", "shape", "g_idx", "global_scale")),
    ),
    Family("blocks", "_blocks", ("_scales",), "", needs=("_scales",), dtypes=frozenset({"U8"})),
    Family("torchao", "._weight_qdata", ("._weight_scale", "._weight_zero_point")),
    Family(
        "codes",
        ".weight",
        (
            *(f".weight{end}" for end in (*_SCALES, *_BITSANDBYTES)),
            *(".scale", ".scale_weight", ".qscale_weight", ".SCB", ".weight_format", ".comfy_quant"),
        ),
        dtypes=scaled.CODES,
    ),
    Family("sparse", ".compressed", (".bitmask", ".shape", ".row_offsets"), needs=(".bitmask",), dtypes=frozenset()),
    Family("hqq", ".W_q", (".scale", ".zero"), needs=(".scale", ".zero"), dtypes=frozenset()),
    Family("marlin", ".B", (".s", ".workspace"), needs=(".s",), dtypes=INTEGERS),
    Family("quanto", ".weight._data", (".weight._scale",), needs=(".weight._scale",), dtypes=frozenset()),
    Family("quanto", ".weight._data._data", (".weight._scale", ".weight._shift"), needs=(".weight._scale",)),
    # Parameters that are called weights nowhere: stacked experts.
    Family("torchao", "_qdata", ("_scale", "_zero_point", "_scale_and_zero", "_per_tensor_scale"), ""),
    Family(
        "codes",
        "",
        (*_SCALES, "_weight_scale", "_weight_scale_2", *_BITSANDBYTES),
        "",
        dtypes=scaled.CODES,
    ),
)
ENDS = tuple({end for family in FAMILIES for end in (family.codes, *family.others) if end not in ("", ".weight")})


def owners(name: str) -> Iterator[tuple[Family, str]]:
    """The families that `name` may be a part of beside the codes, each with the module's name."""
    for family in FAMILIES:
        for end in family.others:
            if name.endswith(end) and family.names(base := name.removesuffix(end)):
                yield family, base


def weight_names(names: Iterable[str]) -> frozenset[str]:
    """What the tensors of a checkpoint are called once decoded, as far as stored names tell."""
    stored = frozenset(names)
    return frozenset(
        weight for name in stored for weight in ([name] if not name.endswith(ENDS) else _weight(name, stored))
    )


def _weight(name: str, stored: frozenset[str]) -> Iterator[str]:
    if any(base + family.codes in stored for family, base in owners(name)):
        return
    for family in FAMILIES:
        if family.kind != "codes" and name.endswith(family.codes):
            base = name.removesuffix(family.codes)
            if family.names(base) and any(base + end in stored for end in family.others):
                yield family.name(base)
                return
    yield name
