"""Adapter tensor names → (module, role), whichever tool wrote them.

A role is peft's own parameter name (``lora_A``, ``hada_w1_a``, ``ia3_l`` …), with ``.bias`` where it is one; ``weight``
for a tensor that replaces the base's. Dialects: peft and unsloth (``base_model.model.`` in front), diffusers
(``.lora.down``, ``processor.to_q_lora.up``), kohya and LyCORIS (``lora_unet_…`` with dots flattened to underscores),
MLX (``lora_a``, ``lora_b``, stored transposed).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardesd.errors import MalformedAdapter
from shardesd.records import TensorRef

REPLACE = "weight"

_PARAMETERS = (
    *("lora_A", "lora_B", "lora_E", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "ranknum"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    *("ia3_l", "oft_R", "oft_r", "oft_embedding_R", "boft_R", "boft_s"),
    *("vera_A", "vera_B", "vera_lambda_b", "vera_lambda_d"),
    *("hira_A", "hira_B", "hira_embedding_A", "hira_embedding_B"),
    *("delora_A", "delora_B", "delora_lambda", "delora_w_norm"),
    *("ln_tuning_layers", "trainable_tokens_delta", "lora_velora_embed", "lora_monteclora_sampler"),
)
_PEFT = re.compile(rf"(?:(?P<module>.*)\.)?(?P<role>{'|'.join(_PARAMETERS)})(?P<rest>(?:\.[^.]+)*)")
_DIFFUSERS = (
    (re.compile(r"\.processor\.(to_[qkv]|to_out|add_[a-z]+_proj)_lora\.(down|up)\.weight$"), r".\1.lora.\2.weight"),
    (re.compile(r"\.to_out\.lora\.(down|up)\.weight$"), r".to_out.0.lora.\1.weight"),
    (re.compile(r"\.(?:lora|lora_linear_layer)\.down\.weight$"), ".lora_A.weight"),
    (re.compile(r"\.(?:lora|lora_linear_layer)\.up\.weight$"), ".lora_B.weight"),
)
_KOHYA = {
    "lora_down.weight": "lora_A",
    "lora_up.weight": "lora_B",
    "lora_mid.weight": "lora_mid",
    "dora_scale": "lora_magnitude_vector",
    "alpha": "alpha",
}
_KOHYA_PREFIX = re.compile(r"(?:lora|lycoris)_(?:unet|te\d?|transformer|prior_unet)?_?")
_MLX = {"lora_a": "mlx_a", "lora_b": "mlx_b", "m": "lora_magnitude_vector"}
_INFORMATIONAL = ("lora_velora_embed", "lora_monteclora_sampler", "original_module")

MARKS = re.compile(
    r"\.(?:lora_[ABEab]|lora_(?:down|up|embedding_[AB])|lora\.(?:down|up)|hada_w1_a|lokr_w[12](?:_[ab])?|ia3_l|oft_R|"
    r"boft_R|vera_lambda_[bd]|hira_(?:embedding_)?[AB]|delora_[AB]|trainable_tokens_delta)(?:\.|$)|_lora\.(?:down|up)\."
)
"""What tells an adapter's tensor names from a model's."""


@dataclass(slots=True, kw_only=True)
class Group:
    """The adapter tensors of one module."""

    module: str
    """Its name in the model that was trained; for a replacement, the name of the tensor itself."""
    depth: int = 0
    """How many wrappers (``base_layer``) lie around these tensors; the parameter wrapped first has the most."""
    inside: bool = False
    """It lies inside another wrapped module (the `out_proj` of a wrapped MultiheadAttention)."""
    flattened: bool = False
    """The module's dots are underscores (kohya)."""
    tensors: dict[str, TensorRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """All tensors of an adapter, by what they are."""

    groups: tuple[Group, ...]
    shared: Mapping[str, TensorRef]
    """Tensors of no module (VeRA's projections)."""
    dialect: str


def group(tensors: Iterable[TensorRef], *, where: str, dialect: str = "peft") -> Named:
    """Sort an adapter's tensors by module and role. Raises `MalformedAdapter` where two tensors claim one role."""
    tensors = list(tensors)
    if dialect == "peft" and any(_is_kohya(tensor.name) for tensor in tensors):
        dialect = "kohya"
    groups: dict[tuple[str, int], Group] = {}
    shared: dict[str, TensorRef] = {}
    for tensor in tensors:
        module, wrappers, role = _split(tensor.name, dialect)
        if role.startswith(_INFORMATIONAL):
            continue
        if not module:
            shared[role] = tensor
            continue
        here = groups.setdefault(
            (module, wrappers),
            Group(
                module=module,
                depth=wrappers,
                inside=".base_layer." in tensor.name.removesuffix(f".{role}").rpartition(".lora_")[0],
                flattened=_is_flat(tensor.name, dialect),
            ),
        )
        if role in here.tensors and ".modules_to_save." in tensor.name:
            continue  # with bias="all", peft saves a saved module's bias under this name too
        if role in here.tensors and ".modules_to_save." not in here.tensors[role].name:
            raise MalformedAdapter(
                f"{where}: {tensor.name} and {here.tensors[role].name} are both the {role} of {module}"
            )
        here.tensors[role] = tensor
    return Named(groups=tuple(groups.values()), shared=shared, dialect=dialect)


def looks_like_adapter(names: Iterable[str]) -> bool:
    """Whether any of these tensor names is one that only adapters have."""
    return any(MARKS.search(name) or _is_kohya(name) for name in names)


def base_name(name: str) -> str | None:
    """What the base calls a tensor of a live `PeftModel`'s base model; None for one that is an adapter's."""
    if ".modules_to_save." in name or ".trainable_tokens_original." in name:
        return None
    name = name.replace(".original_module.", ".").replace(".token_adapter.", ".")
    module, _, role = _split(name, "peft")
    return module if role == REPLACE else None


def _split(name: str, dialect: str) -> tuple[str, int, str]:
    """(module, how often it is wrapped in a ``base_layer``, role)."""
    if dialect == "kohya" and (parts := _split_kohya(name)):
        return parts
    if dialect == "mlx":
        module, _, leaf = name.rpartition(".")
        return (module, 0, _MLX[leaf]) if leaf in _MLX else (name, 0, REPLACE)
    name = name.removeprefix("base_model.model.").removeprefix("base_model.")
    for pattern, replacement in _DIFFUSERS:
        name = pattern.sub(replacement, name)
    module, dot, leaf = name.rpartition(".")
    if leaf == "alpha" and dot:
        return _unwrap(module)[0], _unwrap(module)[1], "alpha"
    if ".original_module." in name:
        return name, 0, "original_module"
    name = re.sub(r"\.modules_to_save\.(?:default\.)?", ".", name)
    match = _PEFT.fullmatch(name)
    if not match:
        return _unwrap(name)[0], 0, REPLACE
    module, wrappers = _unwrap((match["module"] or "").removesuffix(".token_adapter"))
    role = match["role"]
    if match["rest"].endswith(".bias"):
        role += ".bias"
    return module, wrappers, role


def _split_kohya(name: str) -> tuple[str, int, str] | None:
    module, _, leaf = name.partition(".")
    if leaf in _KOHYA:
        return module, 0, _KOHYA[leaf]
    if leaf.removesuffix(".weight") in _PARAMETERS:
        return module, 0, leaf.removesuffix(".weight")
    for suffix, role in _KOHYA.items():
        if name.endswith(f".{suffix}"):
            return name.removesuffix(f".{suffix}"), 0, role
    return None


def _unwrap(module: str) -> tuple[str, int]:
    """Take peft's ``base_layer`` out of a name; also how many of them stood at its end."""
    bare, wrappers = module, 0
    while bare.endswith(".base_layer"):
        bare, wrappers = bare.removesuffix(".base_layer"), wrappers + 1
    return re.sub(r"(?:\.base_layer)+(?=\.)", "", bare), wrappers


def _is_kohya(name: str) -> bool:
    return name.endswith((".lora_down.weight", ".lora_up.weight")) or bool(
        re.match(r"(?:lora_(?:unet|te\d?)|lycoris)_[^.]+\.", name)
    )


def _is_flat(name: str, dialect: str) -> bool:
    return dialect == "kohya" and bool(_KOHYA_PREFIX.match(name)) and "." not in name.partition(".")[0]


def unflatten_prefix(module: str) -> str:
    """A kohya module without its ``lora_unet_`` or the like."""
    return _KOHYA_PREFIX.sub("", module, count=1)
