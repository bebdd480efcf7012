"""What can't be merged is refused with one line that names the value, the place and what to do."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftType, VeraConfig
from peft_cases import llama, make_case, refs_of
from safetensors.torch import load_file, save_file

from shardesd.adapters import apply, parse_config, patterns, plan_merge
from shardesd.adapters.config import MERGEABLE, REFUSED
from shardesd.adapters.load import adapter_from_tensors, load_adapter
from shardesd.errors import (
    AdapterError,
    MalformedAdapter,
    MatrixError,
    ShardesdError,
    UnmatchedAdapter,
    UnsupportedAdapter,
)
from shardesd.records import TensorRef
from shardesd.source import open_source

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
M = "base_model.model.layers.0.q"
BASE = {"layers.0.q.weight": (6, 4), "layers.0.k.weight": (6, 4)}


def pair(**changes: Any) -> dict[str, torch.Tensor]:
    return {f"{M}.lora_A.weight": torch.ones(2, 4), f"{M}.lora_B.weight": torch.ones(6, 2), **changes}


def plan(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] = LORA,
    base: Mapping[str, tuple[int, ...]] = BASE,
    dtype: str = "F32",
    model: Mapping[str, Any] | None = None,
) -> Any:
    refs = {name: TensorRef(name=name, dtype=dtype, shape=shape, shard="s") for name, shape in base.items()}
    return plan_merge([adapter_from_tensors("org/a", config, tensors)], refs, model or {})


def refused(kind: type[ShardesdError], match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=match) as error:
        plan(*args, **kwargs)
    assert "\n" not in str(error.value)
    assert "org/a" in str(error.value)


def test_every_type_that_peft_has_is_merged_or_refused_by_name() -> None:
    known = {*MERGEABLE, *REFUSED}
    assert {kind.value for kind in PeftType} <= known
    for kind in REFUSED:
        with pytest.raises(UnsupportedAdapter, match=f"org/a: peft_type {kind} can't be merged from files: "):
            parse_config({"peft_type": kind}, where="org/a")
    with pytest.raises(UnsupportedAdapter, match=r"unknown peft_type 'NEW' .expected one of LORA"):
        parse_config({"peft_type": "NEW"}, where="org/a")
    with pytest.raises(MalformedAdapter, match="has no peft_type"):
        parse_config({"r": 4}, where="org/a")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"])
def test_initialisations_that_change_the_base(init: str) -> None:
    config = {**LORA, "init_lora_weights": init}
    refused(UnsupportedAdapter, f"init_lora_weights '{init}' changed the base", pair(), config)
    assert parse_config(config, where="a", allow_residual_base=True).r == 2


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica", None])
def test_initialisations_that_do_not(init: Any) -> None:
    assert plan(pair(), {**LORA, "init_lora_weights": init}).for_tensor("layers.0.q.weight")


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("use_qalora", True, "can't merge QA-LoRA"),
        ("alora_invocation_tokens", [1, 2], "only after its invocation tokens"),
        ("arrow_config", {"top_k": 2}, "decided for each input"),
        ("kasa_config", {"beta": 1}, "truncates the base"),
    ],
)
def test_options(option: str, value: Any, why: str) -> None:
    refused(UnsupportedAdapter, f"{option}.*{why}", pair(), {**LORA, option: value})


@pytest.mark.parametrize("rank", [0, -1, "8"])
def test_rank_zero(rank: Any) -> None:
    refused(MalformedAdapter, f"r {rank!r} in adapter_config.json is invalid", pair(), {**LORA, "r": rank})


def test_alpha_that_is_no_number() -> None:
    refused(MalformedAdapter, "lora_alpha 'x' in adapter_config.json is invalid", pair(), {**LORA, "lora_alpha": "x"})


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("lora_alpha", 10**400, r"lora_alpha 10+\.\.\.0+ in adapter_config.json is invalid .expected a number"),
        ("lora_alpha", True, "lora_alpha True .*expected a number"),
        ("lora_alpha", float("nan"), "lora_alpha nan .*expected a number"),
        ("r", 10**400, "r 10.*expected a whole number from 1 to"),
        ("use_dora", "false", "use_dora 'false' .*expected true or false"),
        ("modules_to_save", True, "modules_to_save True .*expected a list of names"),
        ("modules_to_save", "norm", "modules_to_save 'norm' .*expected a list of names"),
        ("target_parameters", [7], r"target_parameters \[7\] .*expected a list of names"),
        ("feedforward_modules", 5, "feedforward_modules 5 .*expected a list of names"),
        ("rank_pattern", [1], r"rank_pattern \[1\] .*expected an object"),
        ("rank_pattern", {"q": 2.5}, r"rank_pattern.q 2.5 .*expected a whole number"),
        ("rank_pattern", {"(": 2}, r"'\(' of rank_pattern .*no regular expression: missing"),
        ("alpha_pattern", "x", "alpha_pattern 'x' .*expected an object"),
        ("alpha_pattern", {"q": "8"}, "alpha_pattern.q '8' .*expected a number"),
        ("layer_replication", [[0, 10**9]], r"layer_replication .*10,000 layers at most"),
        ("trainable_token_indices", [1.5], "trainable_token_indices .*expected lists of row numbers"),
        ("trainable_token_indices", {"q": [-1]}, "trainable_token_indices .*expected lists of row numbers"),
        ("use_bdlora", True, "use_bdlora True .*expected an object"),
        ("peft_type", ["LORA"], r"peft_type \['LORA'\] .*expected a text"),
        ("base_model_name_or_path", [1], r"base_model_name_or_path \[1\] .*expected a text"),
        ("revision", 5, "revision 5 .*expected a text"),
        ("peft_version", 5, "peft_version 5 .*expected a text"),
    ],
)
def test_values_of_another_kind(option: str, value: Any, why: str) -> None:
    refused(MalformedAdapter, why, pair(), {**LORA, option: value})


def test_values_of_another_kind_in_mlxs_config() -> None:
    for parameters, why in (([1], "expected an object"), ({"scale": "20"}, "scale '20' .*expected a number")):
        refused(MalformedAdapter, f"lora_parameters.*{why}", pair(), {"lora_parameters": parameters})


@pytest.mark.parametrize("terms", [0, 10**9, 2.5])
def test_neumann_terms_without_end(terms: Any) -> None:
    tensors = {f"{M}.oft_R.weight": torch.ones(2, 1)}
    config = {"peft_type": "OFT", "num_cayley_neumann_terms": terms}
    refused(MalformedAdapter, f"num_cayley_neumann_terms {terms} .*from 1 to 1000", tensors, config)


@pytest.mark.parametrize(
    ("key", "alpha"),
    [
        ("layers.0.q", 9),
        ("q", 9),
        (r".*\.q", 9),
        (r"^layers\.(0|1)\..*", 9),
        (r"layers\.\d+\.(q|k)", 9),
        (r"(?!.*k$)layers.+", 9),
        ("layers.1.q", 4),
        # `re` would not come to an end of these, nor of the next test's.
        ("((x|[a-z_.0-9])*)*!", 4),
        ("(a|.|[a-z]*)*" * 9 + "!", 4),
        (".*" * 99 + "!", 4),
    ],
)
def test_keys_of_patterns(key: str, alpha: int) -> None:
    config = parse_config({**LORA, "alpha_pattern": {key: 9}}, where="org/a")
    assert config.alpha_of("layers.0.q") == alpha


def test_a_pattern_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    config = parse_config({**LORA, "alpha_pattern": {r"(?:(?:\w|.)*)*(?<=Z)": 9}}, where="org/a")
    with pytest.raises(MalformedAdapter, match=r"^org/a: .* of alpha_pattern in adapter_config.json takes more than"):
        config.alpha_of("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("shape", [(0, 4), (8,), (0,)])
def test_empty_or_flat_factors(shape: tuple[int, ...]) -> None:
    tensors = pair(**{f"{M}.lora_A.weight": torch.ones(shape)})
    refused(MalformedAdapter, "lora_A.weight has shape .* but a factor needs two dimensions and elements", tensors)


def test_factors_that_do_not_fit_each_other() -> None:
    tensors = pair(**{f"{M}.lora_B.weight": torch.ones(6, 3)})
    refused(MalformedAdapter, r"lora_A.weight \[2, 4\] and .*lora_B.weight \[6, 3\] don't fit: ranks 2 and 3", tensors)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_a_factor_fails_that_tensor_alone(bad: float) -> None:
    good = {
        f"{M[:-1]}k.lora_{side}.weight": value for side, value in (("A", torch.ones(2, 4)), ("B", torch.ones(6, 2)))
    }
    tensors = pair(**{f"{M}.lora_B.weight": torch.full((6, 2), bad)}) | good
    made = plan(tensors)
    assert apply(made.for_tensor("layers.0.k.weight"), np.zeros((6, 4), np.float32)).max() == 4
    with pytest.raises(MatrixError, match=f"adapter org/a: {M}.lora_B.weight holds NaN or infinity"):
        apply(made.for_tensor("layers.0.q.weight"), np.zeros((6, 4), np.float32))


def test_a_base_of_another_size() -> None:
    base = {"layers.0.q.weight": (12, 8)}
    refused(
        UnmatchedAdapter,
        r"lora_A.weight needs 6×4, but the base's layers.0.q.weight is 12×8; is this another",
        pair(),
        base=base,
    )


def test_two_base_tensors_that_fit() -> None:
    base = {"text.layers.0.q.weight": (6, 4), "vision.layers.0.q.weight": (6, 4)}
    refused(
        UnmatchedAdapter, "fits more than one base tensor: text.layers.0.q.weight, vision.layers", pair(), base=base
    )


def test_the_one_of_two_that_fits() -> None:
    base = {"text.layers.0.q.weight": (6, 4), "vision.layers.0.q.weight": (5, 4)}
    assert plan(pair(), base=base).for_tensor("text.layers.0.q.weight")


def test_two_modules_that_lead_to_one_tensor() -> None:
    tensors = pair() | {name.replace("layers.0", "x.layers.0"): value for name, value in pair().items()}
    refused(UnmatchedAdapter, "layers.0.q and x.layers.0.q both lead to the base's layers.0.q.weight", tensors)


def test_a_replacement_without_a_place() -> None:
    tensors = pair(**{"base_model.model.score.weight": torch.ones(3, 4)})
    refused(UnmatchedAdapter, "score.weight finds no tensor score.weight in the base, and modules_to_save", tensors)
    made = plan(tensors, {**LORA, "modules_to_save": ["score"]})
    assert [(v.name, v.base, v.shape, v.why) for v in made.extra] == [
        ("score.weight", None, (3, 4), "added by the adapter")
    ]


def test_a_bias_that_the_base_lacks() -> None:
    tensors = pair(**{f"{M}.lora_B.bias": torch.ones(6)})
    refused(UnmatchedAdapter, "lora_B.bias is added to a bias, but the base's layers.0.q has none", tensors)


def test_a_tensor_left_over() -> None:
    tensors = pair(**{f"{M}.ia3_l": torch.ones(6, 1)})
    refused(MalformedAdapter, "ia3_l has no place beside the other tensors of layers.0.q", tensors)


def test_dora_without_magnitudes() -> None:
    refused(MalformedAdapter, "says DoRA, but layers.0.q has no magnitude", pair(), {**LORA, "use_dora": True})


def test_a_magnitude_of_another_size() -> None:
    tensors = pair(**{f"{M}.lora_magnitude_vector": torch.ones(4)})
    refused(MalformedAdapter, r"magnitude_vector \[4\] doesn't fit layers.0.q \[6, 4\]: 6 magnitudes", tensors)


def test_a_quantised_base_or_adapter() -> None:
    refused(UnsupportedAdapter, "the base's layers.0.q.weight is stored as I8.*unquantised", pair(), dtype="I8")
    tensors = {name: value.to(torch.float8_e4m3fn) for name, value in pair().items()}
    refused(UnsupportedAdapter, "lora_.*weight is stored as FLOAT8_E4M3FN", tensors)


def test_a_base_whose_quantisation_hides_its_shapes() -> None:
    base = {"layers.0.q.weight": (12, 1)}
    model = {"quantization_config": {"quant_method": "bitsandbytes"}}
    refused(UnsupportedAdapter, "needs 6×4.*the base is quantised.*--base", pair(), base=base, dtype="U8", model=model)


def test_tokens_outside_the_vocabulary() -> None:
    tensors = {"base_model.model.embed_tokens.trainable_tokens_delta": torch.ones(2, 4)}
    config = {"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 9], "target_modules": ["embed_tokens"]}
    base = {"embed_tokens.weight": (9, 4)}
    refused(MalformedAdapter, "token 9 of embed_tokens is outside the base's 9 rows", tensors, config, base=base)
    short = {**config, "token_indices": [1]}
    refused(MalformedAdapter, r"has shape \[2, 4\], but the config gives 1 row numbers", tensors, short, base=base)


@pytest.mark.filterwarnings("ignore:Specified to not save vera_A")
def test_vera_without_projections(tmp_path: Path) -> None:
    case = make_case(llama(), VeraConfig(r=4, target_modules=["q_proj"], save_projection=False), tmp_path)
    with case.adapter, pytest.raises(UnsupportedAdapter, match="saved without its projections"):
        plan_merge([case.adapter], refs_of(case.base), case.config)


def test_oft_of_old() -> None:
    tensors = {f"{M}.oft_r": torch.ones(2, 2, 2)}
    refused(UnsupportedAdapter, "oft_r is in the format of peft before 0.16", tensors, {"peft_type": "OFT"})


def test_layers_that_are_not_there_to_replicate() -> None:
    refused(
        UnmatchedAdapter,
        "layer_replication names layer 1, but the base has 1",
        pair(),
        {**LORA, "layer_replication": [[0, 2]]},
    )
    refused(
        MalformedAdapter,
        r"layer_replication \[\[2, 1\]\] .*expected a list",
        pair(),
        {**LORA, "layer_replication": [[2, 1]]},
    )


def test_kohya_modules_without_a_place() -> None:
    tensors = {"lora_unet_mid_q.lora_down.weight": torch.ones(2, 4), "lora_unet_mid_q.lora_up.weight": torch.ones(6, 2)}
    refused(
        UnmatchedAdapter,
        "lora_unet_mid_q.lora_down.weight finds no base module; nearest: mid.qk",
        tensors,
        base={"mid.qk.weight": (6, 4)},
    )


# Files


def write(folder: Path, config: Any = LORA, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if tensors is not None:
        save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def test_a_config_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        MalformedAdapter, match=r"one has adapter_config.json but no weights .expected one of adapter_model"
    ):
        load_adapter(open_source(write(tmp_path / "one")))


def test_weights_without_a_config(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "one", None, pair()))
    adapter = load_adapter(source)
    refs = {n: TensorRef(name=n, dtype="F32", shape=s, shard="s") for n, s in BASE.items()}
    with pytest.raises(MalformedAdapter, match=r"α is unknown for layers.0.q: .*config is missing.*--lora-alpha"):
        plan_merge([adapter], refs, {})
    with load_adapter(source, lora_alpha=6) as told:
        merged = apply(plan_merge([told], refs, {}).for_tensor("layers.0.q.weight"), np.zeros((6, 4), np.float32))
    assert merged.max() == 2 * 6 / 2


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(MalformedAdapter, match=r"one: adapter_config.json can't be read"):
        load_adapter(open_source(write(tmp_path / "one", "{", pair())))
    with pytest.raises(MalformedAdapter, match="is not a JSON object"):
        load_adapter(open_source(write(tmp_path / "two", "[]", pair())))
    with pytest.raises(MalformedAdapter, match=r"three: adapter_config.json (can't be read|has no peft_type)"):
        load_adapter(open_source(write(tmp_path / "three", '{"a":' * 5000 + "1" + "}" * 5000, pair())))


def test_bin_weights(tmp_path: Path) -> None:
    torch.save(pair(), write(tmp_path / "one") / "adapter_model.bin")
    adapter = load_adapter(open_source(tmp_path / "one"))
    refs = {n: TensorRef(name=n, dtype="F32", shape=s, shard="s") for n, s in BASE.items()}
    merged = apply(plan_merge([adapter], refs, {}).for_tensor("layers.0.q.weight"), np.zeros((6, 4), np.float32))
    assert (merged == 4).all()
    assert len(adapter.digest or "") == 64


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("/dev/null",))


@pytest.mark.parametrize("how", ["torch", "pickle", "noise"])
def test_bin_weights_that_are_more_than_tensors(how: str, tmp_path: Path) -> None:
    path = write(tmp_path / "one") / "adapter_model.bin"
    if how == "torch":
        torch.save({"x": Evil()}, path)
    else:
        path.write_bytes(pickle.dumps(Evil()) if how == "pickle" else b"no pickle at all")
    with pytest.raises(MalformedAdapter, match=r"one: adapter_model.bin is not a plain dictionary of tensors") as error:
        load_adapter(open_source(tmp_path / "one"))
    assert "\n" not in str(error.value)


def test_safetensors_come_before_bin(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", LORA, pair())
    (folder / "adapter_model.bin").write_bytes(b"never read")
    assert load_adapter(open_source(folder)).file == "adapter_model.safetensors"


def test_weights_that_are_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="holds no tensor that an adapter's name marks"):
        load_adapter(open_source(write(tmp_path / "one", None, {"model.weight": torch.ones(2, 2)})))


def test_several_adapters_in_one_place(tmp_path: Path) -> None:
    for name in ("en", "fr"):
        write(tmp_path / "both" / name, {**LORA, "lora_alpha": len(name)}, pair())
    source = open_source(tmp_path / "both")
    with pytest.raises(MalformedAdapter, match="both holds 2 adapters, in en, fr; name one"):
        load_adapter(source)
    assert load_adapter(source, subfolder="fr").name == "both/fr"
    write(tmp_path / "single" / "inner", LORA, pair())
    assert load_adapter(open_source(tmp_path / "single")).file == "inner/adapter_model.safetensors"


def test_the_digest_is_the_files(tmp_path: Path) -> None:
    import hashlib

    folder = write(tmp_path / "one", LORA, pair())
    expected = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert load_adapter(open_source(folder)).digest == expected
    assert load_file(folder / "adapter_model.safetensors")


def test_lora_alpha_replaces_the_configs() -> None:
    assert parse_config(LORA, where="a", lora_alpha=9).alpha == 9
    assert parse_config(LORA, where="a").alpha == 4


def test_a_config_of_peft_is_understood(tmp_path: Path) -> None:
    case = make_case(llama(), LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj"]), tmp_path)
    config = case.adapter.config
    assert (config.r, config.alpha, config.use_rslora, config.peft_type) == (3, 5, True, "LORA")
    assert config.peft_version is not None
    assert config.peft_version >= (0, 18)
