"""PyTorch's and GGUF files: the same model gives the same rows, and hostile files an error line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import cli, minilm_weights
from quantised_files import random, store
from safetensors.torch import save_file

import shardesd
from shardesd.checkpoint import open_checkpoint
from shardesd.checkpoint.gguf_names import hf_name
from shardesd.errors import MalformedHeader, NoWeights
from shardesd.source import open_source

INCLUDE = ("*layer.0.*", "*layer.3.output.dense")  # the other layers repeat their shapes


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in minilm_weights().items()}


def rounded(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}


def eigenvalues(place: Any, **options: Any) -> tuple[list[str], dict[str, np.ndarray]]:
    result = shardesd.scan(place, include=INCLUDE, **options)
    assert set(result.layers["status"]) == {"ok"}
    return result.layers["longname"].to_list(), {name: result.spectra[name] for name in result.spectra}


def squared_singular_values(W: torch.Tensor) -> np.ndarray:
    return np.sort(np.linalg.svd(W.double().numpy(), compute_uv=False) ** 2)


def check(found: tuple[list[str], dict[str, np.ndarray]], expected: dict[str, torch.Tensor]) -> None:
    """Longnames and λ are those of `expected`, by numpy."""
    names, spectra = found
    assert len(names) == 7  # six of a layer, and one
    for name in names:
        eigs = squared_singular_values(expected[f"{name}.weight"])
        np.testing.assert_allclose(spectra[name], eigs, rtol=0, atol=1e-9 * eigs[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_minilm_in_safetensors_and_bin(tmp_path: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    tensors = rounded(weights, dtype)
    (tmp_path / "st").mkdir()
    save_file(tensors, tmp_path / "st" / "model.safetensors")
    expected = eigenvalues(tmp_path / "st")
    check(expected, {name: value.float() for name, value in tensors.items()})
    (tmp_path / "bin").mkdir()
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    names, spectra = eigenvalues(tmp_path / "bin", allow_pickle=True)
    assert names == expected[0]
    assert all(np.array_equal(spectra[name], expected[1][name]) for name in names)


def gguf_file(
    path: Path, weights: dict[str, torch.Tensor], type: str, architecture: str = "bert", **values: int
) -> None:
    gguf = pytest.importorskip("gguf")
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    name_map = gguf.get_tensor_name_map(arch, 6)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(6)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "żółw"])
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    kind = gguf.GGMLQuantizationType[type]
    for name, value in weights.items():
        theirs = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            continue
        data = value.float().numpy()
        if data.ndim > 1 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            stored = gguf.quants.quantize(data, kind)
            writer.add_tensor(theirs, stored, raw_dtype=kind)
        else:
            writer.add_tensor(theirs, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q8_0(W: torch.Tensor) -> torch.Tensor:
    """Blocks of a float16 and 32 bytes, put together here: the package only rounds."""
    import gguf

    raw = gguf.quants.quantize(W.numpy(), gguf.GGMLQuantizationType.Q8_0)
    blocks = raw.reshape(-1).view(np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    values = blocks["q"] * blocks["d"].astype(np.float32)[:, None]
    assert np.abs(values.reshape(W.shape) - W.numpy()).max() < 0.05
    return torch.from_numpy(values.reshape(W.shape))


@pytest.mark.parametrize(
    ("type", "label", "round"),
    [
        ("F16", "F16", lambda W: W.half().float()),
        ("BF16", "BF16", lambda W: W.bfloat16().float()),
        ("F32", "F32", lambda W: W),
        ("Q8_0", "q8_0", q8_0),
    ],
)
def test_minilm_as_gguf(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    type: str,
    label: str,
    round: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    gguf_file(tmp_path / "minilm.gguf", weights, type)
    result = shardesd.scan(tmp_path / "minilm.gguf", include=INCLUDE)
    names = result.layers["longname"].to_list()
    assert names == [name for name, _ in sorted_names(weights)]
    assert set(result.layers["dtype"]) == {label}
    assert set(result.layers["quantised"]) == {type == "Q8_0"}
    for name in names:
        eigs = squared_singular_values(round(weights[f"{name}.weight"]))
        np.testing.assert_allclose(result.spectra[name], eigs, rtol=0, atol=1e-9 * eigs[-1])


def sorted_names(weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    from fnmatch import fnmatchcase

    from shardesd.matrices import natural_key

    found = {
        name.removesuffix(".weight"): value
        for name, value in weights.items()
        if value.ndim == 2 and any(fnmatchcase(name.removesuffix(".weight"), glob) for glob in INCLUDE)
    }
    return sorted(found.items(), key=lambda pair: natural_key(pair[0]))


# --- GGUF


@pytest.mark.parametrize(
    "type",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0"],
)
def test_blocks_are_what_the_package_makes_of_them(tmp_path: Path, type: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[type]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3, 40, 512 // block, size), dtype=np.uint8).reshape(3, 40, -1)
    with np.errstate(all="ignore"):  # random scales: some are infinite
        expected = gguf.quants.dequantize(data, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", data, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.weight", data[0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(open_source(tmp_path))
    with checkpoint.open(checkpoint.shards[0], tmp_path / "x.gguf") as shard:
        *experts, single = shard.tensors
        assert [tensor.name for tensor in experts] == [
            f"model.layers.0.block_sparse_moe.experts.{i}.w3.weight" for i in range(3)
        ]
        assert single.name == "model.layers.0.self_attn.q_proj.weight"
        for tensor, values in zip((*experts, single), (*expected, expected[0]), strict=True):
            assert (tensor.shape, tensor.label) == ((40, 512), type.lower())
            with shard.read(tensor) as raw:
                np.testing.assert_array_equal(raw, values)


def models() -> dict[str, tuple[str, Any]]:
    import transformers as t

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    llama = {**small, "intermediate_size": 48, "num_key_value_heads": 2}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    return {
        "llama": ("LlamaForCausalLM", t.LlamaConfig(**llama)),
        "qwen2": ("Qwen2ForCausalLM", t.Qwen2Config(**llama)),
        "qwen3": ("Qwen3ForCausalLM", t.Qwen3Config(**llama)),
        "gemma": ("GemmaForCausalLM", t.GemmaConfig(**llama)),
        "gemma2": ("Gemma2ForCausalLM", t.Gemma2Config(**llama)),
        "phi2": ("PhiForCausalLM", t.PhiConfig(**llama)),
        "phi3": ("Phi3ForCausalLM", t.Phi3Config(**llama, pad_token_id=0)),
        "starcoder2": ("Starcoder2ForCausalLM", t.Starcoder2Config(**llama)),
        "bert": ("BertModel", t.BertConfig(**small, intermediate_size=48)),
        "gpt2": ("GPT2LMHeadModel", t.GPT2Config(**gpt2)),
        "starcoder": ("GPTBigCodeForCausalLM", t.GPTBigCodeConfig(**gpt2)),
        "gptneox": ("GPTNeoXForCausalLM", t.GPTNeoXConfig(**small, intermediate_size=48)),
        "falcon": ("FalconForCausalLM", t.FalconConfig(**small)),
        "bloom": ("BloomForCausalLM", t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)),
        "mpt": ("MptForCausalLM", t.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=64)),
    }


@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "qwen2", "qwen3", "gemma", "gemma2", "phi2", "phi3", "starcoder2", "bert", "gpt2", "starcoder"),
        *("gptneox", "falcon", "bloom", "mpt"),
    ],
)
def test_names_come_back_as_transformers_has_them(architecture: str) -> None:
    """Its own names, through the package's map and back."""
    transformers, gguf = pytest.importorskip("transformers"), pytest.importorskip("gguf")
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    name_map = gguf.get_tensor_name_map(arch, 2)
    cls, config = models()[architecture]
    with torch.device("meta"):
        names = list(getattr(transformers, cls)(config).state_dict())
    mapped = {name: name_map.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    mapped = {name: theirs for name, theirs in mapped.items() if theirs}
    if architecture == "gptneox":  # its files, and transformers before 5, call the head embed_out
        mapped["embed_out.weight"] = mapped.pop("lm_head.weight")
    assert len(mapped) >= 12
    assert {name: hf_name(theirs, {"gguf_architecture": architecture}) for name, theirs in mapped.items()} == {
        name: name for name in mapped
    }


def test_gpt2s_conv1d_is_transposed_back(tmp_path: Path) -> None:
    """llama.cpp stores outputs × inputs; GPT-2's layout is inputs × outputs, with q, k and v side by side."""
    name = "transformer.h.0.attn.c_attn.weight"
    W = random(32, 96)
    save_file({name: W}, tmp_path / "model.safetensors")
    expected = shardesd.scan(tmp_path / "model.safetensors")
    for type in ("F32", "F16", "Q8_0"):
        path = tmp_path / f"{type}.gguf"
        gguf_file(path, {name: W.T.contiguous()}, type, "gpt2")
        found = shardesd.scan(path)
        assert found.layers["longname"].to_list() == expected.layers["longname"].to_list()
        for longname in found.spectra:
            largest = expected.spectra[longname][-1]
            np.testing.assert_allclose(found.spectra[longname], expected.spectra[longname], rtol=0, atol=0.02 * largest)


@pytest.mark.parametrize(
    ("architecture", "heads", "groups"), [("gptneox", 4, 4), ("bloom", 4, 4), ("falcon", 4, 1), ("falcon", 6, 3)]
)
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0"])
def test_fused_heads_lie_as_hugging_face_has_them(
    tmp_path: Path, architecture: str, heads: int, groups: int, type: str
) -> None:
    """llama.cpp's converter takes (groups, q heads + 2, size, inputs) apart into all q, all k, all v."""
    size, per = 8, heads // groups
    W = random((heads + 2 * groups) * size, 64).bfloat16().float()
    taken = W.reshape(groups, per + 2, size, 64)
    sorted_rows = torch.cat(
        [taken[:, :per].reshape(-1, 64), taken[:, per].reshape(-1, 64), taken[:, per + 1].reshape(-1, 64)]
    )
    prefix = "gpt_neox.layers.0.attention" if architecture == "gptneox" else "transformer.h.0.self_attention"
    path, name = tmp_path / "x.gguf", f"{prefix}.query_key_value.weight"
    counts = {"attention.head_count": heads, "attention.head_count_kv": groups}
    gguf_file(path, {name: sorted_rows}, type, architecture, **counts)
    checkpoint = open_checkpoint(open_source(path))
    (tensor,) = checkpoint.tensors()
    assert (tensor.name, tensor.shape) == (name, W.shape)
    with checkpoint.open(checkpoint.shards[0], path) as shard, shard.read(tensor) as raw:
        np.testing.assert_allclose(raw, W.numpy(), atol=0.02 if type == "Q8_0" else 0)


def test_a_split_set_of_gguf_files(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)]
    gguf_file(tmp_path / "m-00001-of-00002.gguf", {names[0]: random(32, 32)}, "F16", "llama")
    gguf_file(tmp_path / "m-00002-of-00002.gguf", {names[1]: random(32, 32)}, "Q4_0", "llama")
    assert sorted(row.longname + ".weight" for row in shardesd.stream(tmp_path)) == names


@pytest.mark.parametrize("named", ["{}.scale", "{}.weight.scale"])
def test_a_scale_beside_a_quantised_weight_is_multiplied(tmp_path: Path, named: str) -> None:
    """llama.cpp keeps NVFP4's second scale so, for a tensor or for each expert."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.NVFP4
    data = np.random.default_rng(0).integers(0, 100, (3, 40, 4 * 36), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    factors = np.array([0.5, 2.0, 3.0], np.float32)
    for stem, stored, factor in (
        ("blk.0.ffn_up_exps", data, factors),
        ("blk.0.attn_q", data[0], factors[2:]),
        ("blk.0.attn_k", data[0], factors[:2]),
    ):
        writer.add_tensor(f"{stem}.weight", stored, raw_dtype=kind)
        writer.add_tensor(named.format(stem), factor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(data, kind)
    checkpoint = open_checkpoint(open_source(tmp_path))
    with checkpoint.open(checkpoint.shards[0], tmp_path / "x.gguf") as shard:
        by_name = {tensor.name: tensor for tensor in shard.tensors}
        for i in range(3):
            with shard.read(by_name[f"model.layers.0.block_sparse_moe.experts.{i}.w3.weight"]) as raw:
                np.testing.assert_array_equal(raw, expected[i] * factors[i])
        with shard.read(by_name["model.layers.0.self_attn.q_proj.weight"]) as raw:
            np.testing.assert_array_equal(raw, expected[0] * factors[2])
        assert "its scale of shape (2,)" in by_name["model.layers.0.self_attn.k_proj.weight"].problem


def patched(path: Path, name: str, at: int, value: int, width: int) -> None:
    """Another integer `at` bytes behind a tensor's name in the header of a GGUF file."""
    data = bytearray(path.read_bytes())
    start = data.index(name.encode()) + len(name) + at
    data[start : start + width] = value.to_bytes(width, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("type", [4, 36, 99, 2**31])
def test_a_type_that_gguf_does_not_know_costs_its_own_row(tmp_path: Path, type: int) -> None:
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)]
    path = tmp_path / "m.gguf"
    gguf_file(path, {name: random(32, 32) for name in names}, "F16", "llama")
    patched(path, "blk.0.attn_output.weight", 20, type, 4)
    first, second = sorted(shardesd.stream(path), key=lambda row: row.longname)
    assert (first.longname, first.status, second.status) == (names[0].removesuffix(".weight"), "failed", "ok")
    assert f"doesn't know its type {type}" in first.reason


def test_a_shape_beyond_all_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_file(path, {"model.layers.0.self_attn.o_proj.weight": random(32, 32)}, "F16", "llama")
    patched(path, "blk.0.attn_output.weight", 4, 2**63, 8)
    patched(path, "blk.0.attn_output.weight", 20, 99, 4)
    with pytest.raises(MalformedHeader, match="more elements than a file can hold"):
        open_checkpoint(open_source(path))


def test_several_gguf_files_must_be_named(tmp_path: Path) -> None:
    for name in ("a-F16.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(NoWeights, match=r"several GGUF files, a-F16\.gguf, a-Q8_0\.gguf: name one"):
        open_checkpoint(open_source(tmp_path))


# --- .bin


def test_a_pickled_file_is_read_only_where_it_is_allowed(tmp_path: Path) -> None:
    torch.save({"a.weight": random(8, 8)}, tmp_path / "pytorch_model.bin")
    for place in (tmp_path, tmp_path / "pytorch_model.bin"):
        result = cli("scan", place, "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert "--allow-pickle" in result.stderr
    result = cli("scan", tmp_path, "--out", tmp_path / "out", "--allow-pickle", "--json")
    assert json.loads(result.stdout.splitlines()[0])["longname"] == "a"


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"a.weight": random(8, 8), "evil": Evil()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    for folder in (tmp_path, tmp_path / "old"):
        with pytest.raises(MalformedHeader):
            open_checkpoint(open_source(folder), allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_views_parameters_ties_and_nested_states(tmp_path: Path) -> None:
    base = random(40, 30)
    tensors = {
        "plain.weight": base,
        "transposed.weight": base.T,
        "slice.weight": base[5:15, :],
        "columns.weight": base[:, 3:20],
        "half.weight": random(6, 8).half().T,
        "parameter.weight": torch.nn.Parameter(random(9, 7)),
        "kernel.weight": random(6, 4, 3, 3).permute(1, 0, 2, 3),
        "wide.weight": base[:, :2],
        "double.weight": random(6, 8).double().T,
    }
    torch.save({"epoch": 3, "state_dict": tensors}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(open_source(tmp_path), allow_pickle=True)
    found = {}
    with checkpoint.open(checkpoint.shards[0], tmp_path / "pytorch_model.bin") as shard:
        for tensor in shard.tensors:
            if not tensor.problem:
                assert not tensor.quantised
                with shard.read(tensor) as raw:
                    found[tensor.name] = np.array(raw)
    assert set(tensors) - set(found) == {"wide.weight", "double.weight"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, tensors[name].detach().numpy(), err_msg=name)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_and_complex_tensors_cost_their_own_rows(tmp_path: Path, layout: str) -> None:
    sparse = torch.eye(8).to_sparse() if layout == "coo" else torch.eye(8).to_sparse_csr()
    tensors = {"a.weight": sparse, "b.weight": random(8, 8), "c.weight": torch.ones(8, 8, dtype=torch.complex64)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    rows = {row.longname: row for row in shardesd.stream(tmp_path, allow_pickle=True)}
    assert [rows[name].status for name in "abc"] == ["failed", "ok", "failed"]
    assert rows["a"].reason == f"torch.sparse_{layout} tensors can't be read"
    assert rows["c"].reason == "C64 weights are not supported"


def test_storages_that_are_shared_and_strides_of_0(tmp_path: Path) -> None:
    W = random(64, 32)
    tensors = {
        "model.embed_tokens.weight": W,
        "lm_head.weight": W,
        "first.weight": W[:32],
        "second.weight": W[32:],
        "overlapping.weight": W.as_strided((8, 8), (1, 1)),
        "repeated.weight": W[:1, :8].expand(8, 8),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    result = shardesd.scan(tmp_path, allow_pickle=True, max_aspect=0)
    assert result.layers["longname"].to_list() == ["first", "overlapping", "repeated", "second"]
    for name in ("first", "second", "overlapping"):
        eigs = squared_singular_values(tensors[f"{name}.weight"])
        np.testing.assert_allclose(result.spectra[name], eigs, rtol=0, atol=1e-9 * eigs[-1])


def test_sharded_bin_with_an_index(tmp_path: Path) -> None:
    weight_map = {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({f"layers.{i}.weight": random(8, 8, seed=i)}, tmp_path / file)
        weight_map[f"layers.{i}.weight"] = file
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for place in (tmp_path, index):
        assert shardesd.scan(place, allow_pickle=True).layers["longname"].to_list() == ["layers.0", "layers.1"]
    index.unlink()
    assert shardesd.scan(tmp_path, allow_pickle=True).layers["longname"].to_list() == ["layers.0", "layers.1"]


def test_safetensors_win_over_what_lies_beside_them(tmp_path: Path) -> None:
    store(tmp_path, {"a.weight": random(8, 8)})
    torch.save({"b.weight": random(8, 8)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    assert [row.longname for row in shardesd.stream(tmp_path, allow_pickle=True)] == ["a"]


def test_tensors_that_are_not_their_storages_elements_cost_their_own_rows(tmp_path: Path) -> None:
    state = {
        "l.0.up_proj.weight": torch._neg_view(random(16, 24)),
        "l.0.k_proj.weight": random(16, 24),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    rows = shardesd.scan(tmp_path, allow_pickle=True, cache=False, stats=True)
    found = dict(rows.layers.select("longname", "status").iter_rows())
    assert found == {"l.0.up_proj": "failed", "l.0.k_proj": "ok"}
