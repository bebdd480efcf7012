"""``--split``, ``--layout``, ``--per-head``, towers, and stacks that give the same numbers as separate experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cli, one_file
from emitted import emitted
from safetensors.numpy import save_file

import shardesd
from shardesd.matrices.expressions import Unknown, holds, parse, size
from shardesd.matrices.towers import Values, tower
from shardesd.options import ScanOptions

rng = np.random.default_rng(0)


def model(folder: Path, config: dict[str, Any], **tensors: np.ndarray) -> Path:
    one_file(folder, {name.replace("__", "."): value for name, value in tensors.items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def W(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


NEOX = {"model_type": "gpt_neox", "num_attention_heads": 4, "hidden_size": 16}


# --split


def test_off_leaves_fused_tensors_whole_and_says_so(tmp_path: Path) -> None:
    fused = W(48, 16)
    found = emitted(model(tmp_path, NEOX, a__attention__query_key_value__weight=fused), split="off")
    (only,) = found.values()
    np.testing.assert_array_equal(only.slices[0], fused)
    assert only.note == "fused qkv analysed whole (--split off)"


@pytest.mark.parametrize(("shape", "axis"), [((48, 16), 0), ((16, 48), 1)])
def test_thirds_cuts_in_three_whatever_the_model_does(tmp_path: Path, shape: tuple[int, int], axis: int) -> None:
    fused = W(*shape)
    folder = model(tmp_path, NEOX, a__attention__query_key_value__weight=fused, b__qkv__weight=W(40, 16))
    found = emitted(folder, split="thirds")
    name = "a.attention.query_key_value"
    for suffix, part in zip("qkv", np.split(fused, 3, axis), strict=True):
        np.testing.assert_array_equal(found[f"{name}_{suffix}"].slices[0], part)
    assert found["b.qkv"].note == "fused qkv analysed whole (--split thirds)"


def test_options_that_change_rows_count_as_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[[layout]]\nnames = 'x'\n")
    base = ScanOptions().numbers()
    for changes in ({"split": "off"}, {"per_head": True}, {"stats": True}, {"layout": str(file)}):
        assert ScanOptions(**changes).numbers() != base
    before = ScanOptions(layout=str(file)).numbers()
    file.write_text("[[layout]]\nnames = 'y'\n")
    assert ScanOptions(layout=str(file)).numbers() != before
    with pytest.raises(shardesd.ShardesdError, match="--split 'half' is invalid"):
        ScanOptions(split="half")


# --layout


TOML = """
[[layout]]
names = 'mix\\.fused'
models = ["my_*"]
when = "wide"
groups = "heads"
parts = ["q: head_dim", {suffix = "rest", size = "2 * head_dim", type = "v_proj", heads = 1}]

[[layout]]
names = "pile"
experts = "count"
transposed = true
parts = ["gate", "up"]
"""


def test_a_user_s_rows_come_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    fused, pile = W(24, 6), W(2, 6, 8)
    config = {"model_type": "my_model", "num_attention_heads": 2, "hidden_size": 8, "wide": True, "count": 2}
    folder = model(tmp_path / "m", config, mix__fused__weight=fused, pile=pile, h__attn__c_attn__weight=W(6, 18))
    result = shardesd.scan(folder, layout=str(file))
    expected = {
        "mix.fused_q": np.concatenate([fused[0:4], fused[12:16]]),
        "mix.fused_rest": np.concatenate([fused[4:12], fused[16:24]]),
        **{f"pile.experts.{i}_gate": pile[i, :, :4] for i in range(2)},
        **{f"pile.experts.{i}_up": pile[i, :, 4:] for i in range(2)},
    }
    assert set(expected) < set(result.spectra)
    assert "h.attn.c_attn_q" in result.spectra
    for name, matrix in expected.items():
        sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        np.testing.assert_allclose(result.spectra[name], sigma[::-1] ** 2, rtol=1e-9)
    kinds = dict(zip(result.layers["longname"], result.layers["block_type"], strict=True))
    assert (kinds["mix.fused_q"], kinds["mix.fused_rest"]) == ("q_proj", "v_proj")


def test_a_user_s_row_may_mean_one_layer(tmp_path: Path) -> None:
    """Of tensors that are the same in all else."""
    (tmp_path / "mine.toml").write_text("[[layout]]\nnames = 'layers\\.1\\.fused'\nparts = ['a', 'b']\n")
    weights = {f"layers__{i}__fused__weight": W(8, 6) for i in range(3)}
    folder = model(tmp_path / "m", {}, **weights)
    found = set(shardesd.scan(folder, layout=str(tmp_path / "mine.toml")).spectra)
    assert found == {"layers.0.fused", "layers.1.fused_a", "layers.1.fused_b", "layers.2.fused"}
    assert set(shardesd.scan(folder).spectra) == {f"layers.{i}.fused" for i in range(3)}


def test_json_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"layout": [{"names": "fused", "parts": ["a", "b"]}]}))
    folder = model(tmp_path / "m", {}, fused__weight=W(8, 6))
    assert set(shardesd.scan(folder, layout=str(tmp_path / "mine.json")).spectra) == {"fused_a", "fused_b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layout = 3", "expected a list of tables called layout"),
        ("[[layout]", "not TOML"),
        ("[[layout]]\nmodels = 'x'", "layout 1 has no names"),
        ("[[layout]]\nnames = '('", "is no regular expression"),
        ("[[layout]]\nnames = 'x'\nsize = 2", "'size' is unknown \\(expected one of: names"),
        ("[[layout]]\nnames = 'x'\nmodels = [1]", "models must be a list"),
        ("[[layout]]\nnames = 'x'\ntransposed = 1", "transposed must be true or false"),
        ("[[layout]]\nnames = 'x'\ngroups = 'a('", "layout 1: groups: 'a\\(' is not an expression"),
        ("[[layout]]\nnames = 'x'\nwhen = 'open(1)'", "only names, whole numbers"),
        ("[[layout]]\nnames = 'x'\nparts = ['a b']", "part 1: the suffix 'a b' must be"),
        ("[[layout]]\nnames = 'x'\nparts = ['a', 'a']", "two parts have the same suffix"),
        ("[[layout]]\nnames = 'x'\nparts = [{suffix = 'a', type = 'b'}]", "the type 'b' is unknown"),
        ("[[layout]]\nnames = 'x'\nparts = 'a'", "parts must be a list"),
        ("[[layout]]\nnames = 'x'\nnote = 1.5", "note must be a text"),
        ("[[layout]]\nnames = 5", "names must be a text"),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(shardesd.ShardesdError, match=message) as raised:
        shardesd.scan(model(tmp_path / "m", {}, a__weight=W(4, 4)), layout=str(file))
    assert str(raised.value).startswith(f"--layout {file}: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = cli("scan", model(tmp_path / "m", {}, a__weight=W(4, 4)), "--layout", tmp_path / "no.toml")
    assert result.exit_code == 1
    assert "no such file" in result.stderr


@pytest.mark.parametrize(
    ("text", "value"), [("heads * head_dim", 32), ("rows / 2 - 1", 4), ("(1 + 2) * 3", 9), ("deep.er", 7)]
)
def test_sizes(text: str, value: int) -> None:
    config = {"n_head": 4, "hidden_size": 32, "deep": {"er": 7}}
    assert size(text, Values("x", config, {"rows": 10})) == value


@pytest.mark.parametrize("text", ["rows / 3", "heads", "rows - 10", "rows / 0", "flag", "word * 2", "a.b"])
def test_sizes_that_there_are_not(text: str) -> None:
    with pytest.raises(Unknown):
        size(text, Values("x", {"flag": True, "word": "w", "a": 3}, {"rows": 10}))


def test_conditions() -> None:
    values = Values("x", {"flag": True, "model": "m"}, {"rows": 10})
    assert holds("flag and rows == 10 and not rows > 11", values)
    assert holds("model == 'm' or nothing", values)
    for text in ("a; b", "__import__('os')", "a[0]", "lambda: 1", "1.5", "a ** 2", "x" * 300, "-" * 150 + "1"):
        with pytest.raises(ValueError, match=r"understood|not an expression|longer"):
            parse(text)


# --per-head


def test_heads_of_fused_and_separate_projections(tmp_path: Path) -> None:
    fused, output = W(48, 16), W(16, 16)
    folder = model(
        tmp_path, NEOX, l__0__attention__query_key_value__weight=fused, l__0__attention__dense__weight=output
    )
    found = emitted(folder, per_head=True)
    assert len(found) == 16
    by_head = fused.reshape(4, 3, 4, 16)
    for i in range(4):
        for j, part in enumerate("qkv"):
            name = f"l.0.attention.query_key_value_{part}.head.{i}"
            np.testing.assert_array_equal(found[name].slices[0], by_head[i, j])
        np.testing.assert_array_equal(found[f"l.0.attention.dense.head.{i}"].slices[0], output[:, 4 * i : 4 * i + 4])


def test_heads_of_grouped_queries_and_of_conv1d(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    q, k, o = W(32, 16), W(16, 16), W(16, 32)
    tensors = {f"l__0__self_attn__{n}_proj__weight": w for n, w in {"q": q, "k": k, "o": o}.items()}
    found = emitted(model(tmp_path / "llama", config, **tensors), per_head=True)
    assert len(found) == 4 + 2 + 4
    np.testing.assert_array_equal(found["l.0.self_attn.k_proj.head.1"].slices[0], k[8:])
    np.testing.assert_array_equal(found["l.0.self_attn.o_proj.head.3"].slices[0], o[:, 24:])
    gpt2 = {"model_type": "gpt2", "n_head": 4, "n_embd": 16}
    fused, proj = W(16, 48), W(16, 16)
    tensors = {"h__0__attn__c_attn__weight": fused, "h__0__attn__c_proj__weight": proj}
    found = emitted(model(tmp_path / "gpt2", gpt2, **tensors), per_head=True)
    np.testing.assert_array_equal(found["h.0.attn.c_attn_v.head.2"].slices[0], fused[:, 40:44])
    np.testing.assert_array_equal(found["h.0.attn.c_proj.head.2"].slices[0], proj[8:12])


def test_heads_that_cannot_be_told_stay_together(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "head_dim": 8}
    found = emitted(model(tmp_path, config, l__0__self_attn__q_proj__weight=W(24, 16)), per_head=True)
    assert found["l.0.self_attn.q_proj"].note == "heads analysed together: 24 are not 4 heads of 8"


def test_heads_are_scanned_however_elongated(tmp_path: Path) -> None:
    folder = model(tmp_path, {**NEOX, "hidden_size": 64}, a__attention__query_key_value__weight=W(192, 64))
    result = shardesd.scan(folder, per_head=True, max_aspect=3)
    assert result.layers.height == 12
    assert result.layers["params"].sum() == 192 * 64


# Towers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.q_proj", "t"),
        ("language_model.model.layers.0.q_proj", "t"),
        ("model.layers.0.q_proj", "t"),
        ("vision_tower.vision_model.layers.0.q_proj", "v"),
        ("model.visual.blocks.0.attn.qkv", "v"),
        ("audio_tower.layers.0.q_proj", "a"),
        ("lm_head", "t"),
    ],
)
def test_a_tensor_s_tower(name: str, expected: str) -> None:
    towers = {f"{word}_config": {"model_type": word[0]} for word in ("text", "vision", "audio")}
    assert tower(name, {"model_type": "many", **towers})["model_type"] == expected
    nested = {"model_type": "omni", "thinker_config": {"model_type": "x", **towers}}
    assert tower(f"thinker.{name}", nested)["model_type"] == expected


def test_a_tower_without_a_model_type_has_that_of_the_whole() -> None:
    assert tower("visual.x", {"model_type": "m", "vision_config": {"depth": 2}}) == {"depth": 2, "model_type": "m"}
    assert tower("attn.Wqkv", {"model_type": "dbrx", "attn_config": {"kv_n_heads": 2}})["model_type"] == "dbrx"


def test_encoder_and_decoder_have_heads_of_their_own() -> None:
    config = {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "d_model": 8}
    assert Values("model.encoder.layers.0.self_attn.q_proj", config)("heads") == 4
    assert Values("model.decoder.layers.0.encoder_attn.q_proj", config)("head_dim") == 4


# Stacked or one by one


def test_stacked_and_separate_experts_give_the_same_table(tmp_path: Path) -> None:
    experts, layers, H, F = 64, 4, 16, 12
    separate: dict[str, np.ndarray] = {}
    stacked: dict[str, np.ndarray] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = W(experts, F, H), W(experts, F, H), W(experts, H, F)
        stacked[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        stacked[f"{prefix}.down_proj"] = down
        for i in range(experts):
            for name, stack in (("gate", gate), ("up", up), ("down", down)):
                separate[f"{prefix}.{i}.{name}_proj.weight"] = stack[i]
    tables = []
    for form, tensors in (("separate", separate), ("stacked", stacked)):
        folder = tmp_path / form
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": experts}))
        tables.append(shardesd.scan(folder).layers)
    rows = [
        {_one_name(row["longname"]): row for row in table.drop("model_id", "seconds").iter_rows(named=True)}
        for table in tables
    ]
    assert len(rows[0]) == experts * layers * 3
    assert rows[0].keys() == rows[1].keys()
    for name, row in rows[0].items():
        for column, value in row.items():
            if column != "longname":
                other = rows[1][name][column]
                assert other == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), column


def _one_name(longname: str) -> tuple[str, ...]:
    """(layer, expert, matrix), however it is stored."""
    parts = longname.split(".")
    if parts[-2] == "experts":  # gate_up_proj.experts.7_gate, down_proj.experts.7
        expert, _, part = parts[-1].partition("_")
        return parts[2], expert, part or "down"
    return parts[2], parts[-2], parts[-1].removesuffix("_proj")
