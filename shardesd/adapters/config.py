"""adapter_config.json → what a merge needs to know, and which adapters are refused by name.

Keys and defaults are those of peft's config classes (0.5 … 0.21) and of mlx-lm's ``adapter_config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardesd.adapters.patterns import Matcher
from shardesd.adapters.values import CONFIG_NAME, Patterns, Values
from shardesd.errors import MalformedAdapter, UnsupportedAdapter

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


_MOST_LAYERS = 10_000
"""Of a model that layer_replication makes."""

_V = TypeVar("_V")


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
    rank_pattern: Patterns[int] = ()
    alpha_pattern: Patterns[float] = ()
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    layer_replication: tuple[tuple[int, int], ...] = ()
    trainable_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Module → rows; the key ``""`` stands for the input embedding."""
    feedforward_modules: Matcher | tuple[str, ...] = ()
    peft_version: tuple[int, ...] | None = None
    raw: Values = field(default_factory=lambda: Values(where=""))
    """The config as it was written, for the options that one type alone has."""

    def alpha_of(self, module: str) -> float | None:
        """α of one module: the first key of `alpha_pattern` that matches, else the adapter's."""
        return _pattern(self.alpha_pattern, module, self.alpha)

    def rank_of(self, module: str) -> int | None:
        """The rank that the config gives one module; None where it gives none."""
        return _pattern(self.rank_pattern, module, self.r)


def parse_config(
    data: Mapping[str, Any],
    *,
    where: str,
    file: str = CONFIG_NAME,
    lora_alpha: float | None = None,
    allow_residual_base: bool = False,
) -> AdapterConfig:
    """The parsed config, from `file`, of an adapter called `where` in messages.

    `lora_alpha` replaces the config's α. `allow_residual_base` accepts adapters whose initialisation changed the base
    (PiSSA, OLoRA …), for a base that already is the residual one. Raises `UnsupportedAdapter` and `MalformedAdapter`.
    """
    values = Values(where=where, data=data, file=file)
    if "peft_type" not in data and ("lora_parameters" in data or "fine_tune_type" in data):
        return _parse_mlx(values)
    peft_type = (values.text("peft_type") or "").upper()
    if not peft_type:
        raise MalformedAdapter(f"{where}: {file} has no peft_type; expected one of {', '.join(MERGEABLE)}")
    if peft_type in REFUSED:
        raise UnsupportedAdapter(f"{where}: peft_type {peft_type} can't be merged from files: {REFUSED[peft_type]}")
    if peft_type not in MERGEABLE:
        raise UnsupportedAdapter(f"{where}: unknown peft_type '{peft_type}' (expected one of {', '.join(MERGEABLE)})")
    for option, why in _OPTIONS_REFUSED.items():
        if values.given(option):
            raise UnsupportedAdapter(f"{where}: an adapter with {option} can't be merged: {why}")
    _check_init(values, allow_residual_base)
    rank_key, alpha_key = _KEYS.get(peft_type, ("r", "lora_alpha"))
    return AdapterConfig(
        peft_type=peft_type,
        base_model=values.text("base_model_name_or_path"),
        revision=values.text("revision"),
        # OFT's r counts blocks, and is 0 where their size is given.
        r=None if peft_type in ("OFT", "BOFT") else values.count(rank_key),
        alpha=values.number(alpha_key) if lora_alpha is None else lora_alpha,
        use_rslora=values.flag("use_rslora"),
        use_dora=values.flag("use_dora"),
        fan_in_fan_out=values.flag("fan_in_fan_out"),
        # AdaLoRA's says which ranks are left, and the tensors show that.
        rank_pattern=() if peft_type == "ADALORA" else values.ranks_by_pattern("rank_pattern"),
        alpha_pattern=values.numbers_by_pattern("alpha_pattern"),
        modules_to_save=values.names("modules_to_save"),
        target_parameters=values.names("target_parameters"),
        layer_replication=_replication(values),
        trainable_tokens=_token_rows(values, peft_type),
        feedforward_modules=_feedforward(values),
        peft_version=_version(values.text("peft_version")),
        raw=values,
    )


_KEYS = {"LOHA": ("r", "alpha"), "LOKR": ("r", "alpha"), "ADALORA": ("init_r", "lora_alpha")}


def _check_init(values: Values, allow_residual_base: bool) -> None:
    init = values.data.get("init_lora_weights")
    if not isinstance(init, bool):
        init = values.text("init_lora_weights")
    if isinstance(init, str) and _BASE_MUTATING.fullmatch(init) and not allow_residual_base:
        raise UnsupportedAdapter(
            f"{values.where}: init_lora_weights '{init}' changed the base when training began, so adding this delta to "
            "the original base is wrong; convert the adapter with peft (path_initial_model_for_weight_conversion), or "
            "give the residual base and allow it explicitly"
        )
    if values.given("kasa_config"):
        raise UnsupportedAdapter(
            f"{values.where}: kasa_config truncates the base's singular values, which is not implemented"
        )


def _parse_mlx(values: Values) -> AdapterConfig:
    kind = values.text("fine_tune_type") or "lora"
    if kind not in ("lora", "dora", "full"):
        raise UnsupportedAdapter(f"{values.where}: unknown fine_tune_type '{kind}' (expected lora, dora or full)")
    parameters = values.part("lora_parameters")
    scale = parameters.number("scale")
    if kind != "full" and scale is None:
        raise MalformedAdapter(
            f"{values.where}: lora_parameters.scale is missing in {values.file}, so the delta's size is unknown"
        )
    return AdapterConfig(
        dialect="mlx",
        base_model=values.text("model"),
        r=parameters.count("rank"),
        scale=scale,
        use_dora=kind == "dora",
        raw=values,
    )


def _pattern(patterns: Patterns[_V], module: str, default: _V | None) -> _V | None:
    return next((value for matches, value in patterns if matches(module)), default)


def _replication(values: Values) -> tuple[tuple[int, int], ...]:
    key = "layer_replication"
    given = values.data.get(key) or ()
    wrong = values.refusal(key, given, f"a list of [start, stop] ranges, of {_MOST_LAYERS:,} layers at most")
    if not isinstance(given, list | tuple) or not all(isinstance(r, list | tuple) and len(r) == 2 for r in given):
        raise wrong
    ranges = tuple((start, stop) for start, stop in given)
    if not all(type(start) is int and type(stop) is int and 0 <= start < stop for start, stop in ranges):
        raise wrong
    if sum(stop - start for start, stop in ranges) > _MOST_LAYERS:
        raise wrong
    return ranges


def _token_rows(values: Values, peft_type: str) -> dict[str, tuple[int, ...]]:
    key = next((key for key in ("trainable_token_indices", "token_indices") if values.given(key)), "")
    given = values.data.get(key) or {}
    if not isinstance(given, Mapping):
        # TRAINABLE_TOKENS names its modules apart; everywhere else a bare list means the input embedding.
        modules = _one_or_more(values, "target_modules") if peft_type == "TRAINABLE_TOKENS" else ()
        given = dict.fromkeys(modules or ("",), given)
    for rows in given.values():
        if not isinstance(rows, list | tuple) or not all(type(row) is int and row >= 0 for row in rows):
            raise values.refusal(key, rows, "lists of row numbers")
    return {module: tuple(rows) for module, rows in given.items()}


def _one_or_more(values: Values, key: str) -> tuple[str, ...]:
    name = values.data.get(key)
    return (name,) if isinstance(name, str) else values.names(key)


def _feedforward(values: Values) -> Matcher | tuple[str, ...]:
    key = "feedforward_modules"
    given = values.data.get(key)
    return values.pattern(key, given) if isinstance(given, str) else values.names(key)


def _version(text: str | None) -> tuple[int, ...] | None:
    match = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", text or "")
    return tuple(int(part or 0) for part in match.groups()) if match else None
