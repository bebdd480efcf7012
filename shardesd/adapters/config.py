"""adapter_config.json → what a merge needs to know, and which adapters are refused by name.

Keys and defaults are those of peft's config classes (0.5 … 0.21) and of mlx-lm's ``adapter_config.json``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardesd.errors import MalformedAdapter, UnsupportedAdapter

CONFIG_NAME = "adapter_config.json"

MERGEABLE = (
    "LORA",
    "ADALORA",
    "LOHA",
    "LOKR",
    "IA3",
    "OFT",
    "BOFT",
    "VERA",
    "HIRA",
    "DELORA",
    "LN_TUNING",
    "TRAINABLE_TOKENS",
)

_PROMPT = "it steers the model with learned inputs, so no weight changes"
_ROUTED = "which of its experts acts is decided for each input, so no fixed weight matrix exists"
_SEEDED = (
    "its delta comes from random projections or banks that are drawn from a seed, not from the saved tensors alone"
)
_LATER = "merging it is not implemented"

REFUSED = {
    **dict.fromkeys(
        (
            "PROMPT_TUNING",
            "MULTITASK_PROMPT_TUNING",
            "P_TUNING",
            "PREFIX_TUNING",
            "ADAPTION_PROMPT",
            "CPT",
            "CARTRIDGE",
        ),
        _PROMPT,
    ),
    **dict.fromkeys(("POLY", "XLORA"), _ROUTED),
    **dict.fromkeys(("FOURIERFT", "RANDLORA", "VBLORA", "PVERA", "UNILORA", "WAVEFT", "TINYLORA"), _SEEDED),
    **dict.fromkeys(
        (
            *("ADAMSS", "BEFT", "BONE", "C3A", "DEFT", "FROD", "GLORA", "GRALORA", "HRA", "LILY", "MISS", "OSF"),
            *("PEANUT", "PSOFT", "ROAD", "SHADOW", "SHIRA", "SUPERTUNING"),
        ),
        _LATER,
    ),
}

_BASE_MUTATING = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga|loftq", re.IGNORECASE)
_OPTIONS_REFUSED = {
    "use_qalora": "peft itself can't merge QA-LoRA into an unquantised base",
    "alora_invocation_tokens": "it acts only after its invocation tokens, so no fixed weight matrix exists",
    "arrow_config": _ROUTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What the config of an adapter says, in peft's words, whatever tool wrote it."""

    peft_type: str = "LORA"
    dialect: str = "peft"
    """``peft``, ``mlx``, ``kohya`` or ``diffusers``."""
    base_model: str | None = None
    revision: str | None = None
    r: int | None = None
    alpha: float | None = None
    """`lora_alpha` or `alpha`; None where only the tensors (kohya's ``.alpha``) can say."""
    scale: float | None = None
    """A scale that is used as it stands (MLX)."""
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, Any] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    layer_replication: tuple[tuple[int, int], ...] = ()
    trainable_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Module → rows; the key ``""`` stands for the input embedding."""
    feedforward_modules: str | tuple[str, ...] = ()
    peft_version: tuple[int, ...] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The config as it was written, for the options that one type alone has."""

    def alpha_of(self, module: str) -> float | None:
        """α of one module: the first key of `alpha_pattern` that matches, else the adapter's."""
        alpha: float | None = _pattern(self.alpha_pattern, module, self.alpha)
        return alpha

    def rank_of(self, module: str) -> int | None:
        """The rank that the config gives one module; None where it gives none."""
        rank: int | None = _pattern(self.rank_pattern, module, self.r)
        return rank


def parse_config(
    data: Mapping[str, Any], *, where: str, lora_alpha: float | None = None, allow_residual_base: bool = False
) -> AdapterConfig:
    """The parsed `adapter_config.json` of an adapter called `where` in messages.

    `lora_alpha` replaces the config's α. `allow_residual_base` accepts adapters whose initialisation changed the base
    (PiSSA, OLoRA …), for a base that already is the residual one. Raises `UnsupportedAdapter` and `MalformedAdapter`.
    """
    if "peft_type" not in data and ("lora_parameters" in data or "fine_tune_type" in data):
        return _parse_mlx(data, where)
    peft_type = str(data.get("peft_type", "")).upper()
    if not peft_type:
        raise MalformedAdapter(f"{where}: {CONFIG_NAME} has no peft_type; expected one of {', '.join(MERGEABLE)}")
    if peft_type in REFUSED:
        raise UnsupportedAdapter(f"{where}: peft_type {peft_type} can't be merged from files: {REFUSED[peft_type]}")
    if peft_type not in MERGEABLE:
        raise UnsupportedAdapter(f"{where}: unknown peft_type '{peft_type}' (expected one of {', '.join(MERGEABLE)})")
    for option, why in _OPTIONS_REFUSED.items():
        if data.get(option):
            raise UnsupportedAdapter(f"{where}: an adapter with {option} can't be merged: {why}")
    _check_init(data, where, allow_residual_base)
    rank_key, alpha_key = _KEYS.get(peft_type, ("r", "lora_alpha"))
    r, alpha = data.get(rank_key), data.get(alpha_key)
    if r is not None and (not isinstance(r, int) or r < 1) and peft_type not in ("OFT", "BOFT"):
        raise MalformedAdapter(f"{where}: rank {r} in {CONFIG_NAME} is invalid (expected a whole number of 1 or more)")
    if lora_alpha is not None:
        alpha = lora_alpha
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise MalformedAdapter(f"{where}: {alpha_key} {alpha!r} in {CONFIG_NAME} is not a number")
    return AdapterConfig(
        peft_type=peft_type,
        base_model=data.get("base_model_name_or_path") or None,
        revision=data.get("revision") or None,
        r=r,
        alpha=alpha,
        use_rslora=bool(data.get("use_rslora")),
        use_dora=bool(data.get("use_dora")),
        fan_in_fan_out=bool(data.get("fan_in_fan_out")),
        rank_pattern=data.get("rank_pattern") or {},
        alpha_pattern=data.get("alpha_pattern") or {},
        modules_to_save=tuple(data.get("modules_to_save") or ()),
        target_parameters=tuple(data.get("target_parameters") or ()),
        layer_replication=_replication(data.get("layer_replication"), where),
        trainable_tokens=_token_rows(data, where),
        feedforward_modules=_names(data.get("feedforward_modules")),
        peft_version=_version(data.get("peft_version")),
        raw=dict(data),
    )


_KEYS = {"LOHA": ("r", "alpha"), "LOKR": ("r", "alpha"), "ADALORA": ("init_r", "lora_alpha")}


def _check_init(data: Mapping[str, Any], where: str, allow_residual_base: bool) -> None:
    init = data.get("init_lora_weights")
    if isinstance(init, str) and _BASE_MUTATING.fullmatch(init) and not allow_residual_base:
        raise UnsupportedAdapter(
            f"{where}: init_lora_weights '{init}' changed the base when training began, so adding this delta to the "
            "original base is wrong; convert the adapter with peft (path_initial_model_for_weight_conversion), or give "
            "the residual base and allow it explicitly"
        )
    if data.get("kasa_config"):
        raise UnsupportedAdapter(f"{where}: kasa_config truncates the base's singular values, which is not implemented")


def _parse_mlx(data: Mapping[str, Any], where: str) -> AdapterConfig:
    kind = data.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora", "full"):
        raise UnsupportedAdapter(f"{where}: unknown fine_tune_type '{kind}' (expected lora, dora or full)")
    parameters = data.get("lora_parameters") or {}
    scale = parameters.get("scale")
    if kind != "full" and not isinstance(scale, int | float):
        raise MalformedAdapter(
            f"{where}: lora_parameters.scale is missing in {CONFIG_NAME}, so the delta's size is unknown"
        )
    return AdapterConfig(
        dialect="mlx",
        base_model=data.get("model") or None,
        r=parameters.get("rank"),
        scale=scale,
        use_dora=kind == "dora",
        raw=dict(data),
    )


def _pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    # peft.utils.other.get_pattern_key: the first key that matches the module's name, or a tail of it after a dot.
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _replication(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    try:
        ranges = tuple((int(start), int(stop)) for start, stop in value or ())
    except (TypeError, ValueError):
        ranges = ((-1, -1),)
    if any(not 0 <= start < stop for start, stop in ranges):
        raise MalformedAdapter(f"{where}: layer_replication {value} is not a list of [start, stop] ranges")
    return ranges


def _token_rows(data: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    value = data.get("trainable_token_indices") or data.get("token_indices") or {}
    if isinstance(value, list):
        targets = _names(data.get("target_modules")) if data.get("peft_type") == "TRAINABLE_TOKENS" else ()
        value = dict.fromkeys((targets,) if isinstance(targets, str) else targets or ("",), value)
    try:
        return {str(module): tuple(int(row) for row in rows) for module, rows in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise MalformedAdapter(f"{where}: trainable token indices {value!r} are not lists of row numbers") from None


def _names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value or ())


def _version(text: Any) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text or ""))
    return tuple(int(part or 0) for part in match.groups()) if match else None
