"""What is wrong with the input is said in one clear line, with the right exit code, and costs no finished work."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from checkpoints import cli, one_file, process, random_weights, sharded
from safetensors.numpy import load_file, save_file


def fails(*arguments: object, says: str | list[str]) -> None:
    result = cli(*arguments)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 1, result.output
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    for part in [says] if isinstance(says, str) else says:
        assert part in lines[0]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def test_no_such_folder(tmp_path: Path, out: Path) -> None:
    fails("scan", tmp_path / "nowhere", "--out", out, says=[str(tmp_path / "nowhere"), "no such"])


@pytest.mark.parametrize(
    ("file", "word"), [("pytorch_model.bin", ".bin"), ("model.onnx", "onnx"), ("flax_model.msgpack", "msgpack")]
)
def test_no_safetensors_names_what_is_there(tmp_path: Path, out: Path, file: str, word: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / file).write_bytes(b"x" * 100)
    fails("scan", tmp_path / "model", "--out", out, says=["no safetensors", word])


def test_a_gguf_file_that_is_none(tmp_path: Path, out: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"x" * 100)
    fails("scan", tmp_path, "--out", out, says=["model-Q4_K_M.gguf", "not a GGUF file"])


def test_an_empty_folder(tmp_path: Path, out: Path) -> None:
    (tmp_path / "model").mkdir()
    fails("scan", tmp_path / "model", "--out", out, says="no safetensors")


def test_a_git_lfs_pointer(tmp_path: Path, out: Path) -> None:
    (tmp_path / "model").mkdir()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 438000000\n"
    (tmp_path / "model" / "model.safetensors").write_text(pointer)
    fails("scan", tmp_path / "model", "--out", out, says=["model.safetensors", "LFS", "git lfs pull"])


@pytest.mark.parametrize("lost", [1, 1000, 7000])
def test_a_truncated_shard(tmp_path: Path, out: Path, lost: int) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    shard = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - lost)
    fails("scan", folder, "--out", out, says=[shard.name, "truncated"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (3).to_bytes(8, "little") + b"{a}",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_a_malformed_header(tmp_path: Path, out: Path, content: bytes) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    fails("scan", tmp_path / "model", "--out", out, says="model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F99", "shape": [2, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
        {"dtype": "F32", "shape": [2, 2]},
        {"dtype": "F32", "shape": "2x2", "data_offsets": [0, 16]},
        [],
    ],
)
def test_a_malformed_entry_of_a_header_is_named(tmp_path: Path, out: Path, entry: object) -> None:
    (tmp_path / "model").mkdir()
    text = json.dumps({"layer.0.weight": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(16)
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    fails("scan", tmp_path / "model", "--out", out, says=["model.safetensors", "layer.0.weight"])


def edit_index(folder: Path, name: str, shard: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def test_an_index_that_names_a_missing_shard(tmp_path: Path, out: Path) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    edit_index(folder, "model.norm.weight", "model-00009-of-00003.safetensors")
    fails("scan", folder, "--out", out, says="model-00009-of-00003.safetensors")


def test_an_index_that_names_a_missing_tensor(tmp_path: Path, out: Path) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    edit_index(folder, "model.layers.7.mlp.up_proj.weight", "model-00002-of-00003.safetensors")
    says = ["model.layers.7.mlp.up_proj.weight", "model-00002-of-00003.safetensors"]
    fails("scan", folder, "--out", out, says=says)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x00"])
def test_an_index_that_is_no_index(tmp_path: Path, out: Path, content: str) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    (folder / "model.safetensors.index.json").write_text(content)
    fails("scan", folder, "--out", out, says="model.safetensors.index.json")


@pytest.mark.parametrize("kind", ["parent", "absolute", "symlink"])
def test_an_index_that_leads_outside(tmp_path: Path, out: Path, kind: str) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    secret = tmp_path / "secret.safetensors"
    save_file({"x.weight": np.ones((4, 4), np.float32)}, secret)
    name = {"parent": "../secret.safetensors", "absolute": str(secret), "symlink": "link.safetensors"}[kind]
    if kind == "symlink":
        (folder / name).symlink_to(secret)
    edit_index(folder, "x.weight", name)
    fails("scan", folder, "--out", out, says=[name, "outside"])


def test_out_is_a_file(tmp_path: Path, out: Path) -> None:
    out.write_text("mine")
    fails("scan", one_file(tmp_path / "model", random_weights()), "--out", out, says=str(out))
    assert out.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_out_is_not_writable(tmp_path: Path, out: Path) -> None:
    out.mkdir(mode=0o500)
    fails("scan", one_file(tmp_path / "model", random_weights()), "--out", out, says=str(out))


def test_no_space_left_keeps_finished_rows(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=3))
    real, calls = os.write, 0

    def full(fd: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    # Without kept λ, whose writes would count too, from other threads.
    fails("scan", folder, "--no-cache", "--out", out, says=["no space", str(out)])
    monkeypatch.undo()
    result = cli("scan", folder, "--out", out)
    assert result.exit_code == 0, result.output
    assert "continu" in result.stderr


@pytest.mark.parametrize(
    ("option", "choice"),
    [
        (("--fix-fingers", "xmin_max"), "xmin_mid, xmin_peak, DKS"),
        (("--format", "xlsx"), "csv, parquet, jsonl"),
        (("--solver", "qr"), "auto, gram, svd"),
        (("--precision", "bf16"), "auto, float32, float64"),
        (("--io", "telepathy"), "auto, mmap, pread"),
        (("--device", "tpu"), "auto, cpu, cuda"),
        (("--max-memory", "lots"), "2GB"),
        (("--bins", "0"), "1 or more"),
        (("--max-aspect", "-1"), "0 or more"),
        (("--evals-thresh", "nan"), "0 or more"),
    ],
)
def test_an_unknown_value_names_the_choices(tmp_path: Path, out: Path, option: tuple[str, str], choice: str) -> None:
    fails("scan", one_file(tmp_path / "model", random_weights()), "--out", out, *option, says=[option[1], choice])


def test_usage_is_exit_code_2() -> None:
    assert cli("scan").exit_code == 2
    assert cli("scan", "a", "--nonsense").exit_code == 2
    assert cli("nonsense").exit_code == 2


def test_bad_matrices_cost_their_own_rows(tmp_path: Path, out: Path) -> None:
    tensors = random_weights()
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 4] = np.nan
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = np.inf
    tensors["model.layers.1.self_attn.q_proj.weight"][:] = 0
    tensors["one.row.weight"] = np.ones((1, 5), np.float32)
    tensors["empty.weight"] = np.ones((0, 5), np.float32)
    tensors["scalar.weight"] = np.array(1.0, np.float32)
    result = cli("scan", one_file(tmp_path / "model", tensors), "--out", out, "--show-skipped")
    assert result.exit_code == 3, result.output
    rows = {row["longname"]: row for row in pl.read_csv(out / "models" / "model.csv").to_dicts()}
    for name, reason in (
        ("model.layers.0.self_attn.q_proj", "NaN or Inf"),
        ("model.layers.0.self_attn.o_proj", "NaN or Inf"),
        ("model.layers.1.self_attn.q_proj", "all zeros"),
    ):
        assert (rows[name]["status"], rows[name]["alpha"]) == ("failed", None)
        assert reason in rows[name]["reason"]
        assert name in result.stdout
    for name in ("one.row", "empty", "scalar", "model.norm", "model.embed_tokens"):
        assert rows[name]["status"] == "skipped"
        assert rows[name]["reason"]
    assert rows["model.layers.1.self_attn.o_proj"]["status"] == "ok"
    assert sum(row["status"] == "ok" for row in rows.values()) == 3


def test_results_made_with_other_options_are_not_replaced(tmp_path: Path, out: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    assert cli("scan", folder, "--out", out).exit_code == 0
    before = (out / "models" / "model.csv").read_bytes()
    fails("scan", folder, "--out", out, "--fix-fingers", "DKS", says=["xmin_mid", "DKS", "--overwrite"])
    assert (out / "models" / "model.csv").read_bytes() == before
    assert cli("scan", folder, "--out", out, "--fix-fingers", "DKS", "--overwrite").exit_code == 0
    assert (out / "models" / "model.csv").read_bytes() != before


def test_results_of_other_weights_are_not_replaced(tmp_path: Path, out: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    assert cli("scan", folder, "--out", out).exit_code == 0
    shutil.rmtree(folder)
    one_file(folder, random_weights(seed=1))
    fails("scan", folder, "--out", out, says=["model", "--overwrite"])


def test_a_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    import shardesd
    from shardesd.errors import CheckpointError

    folder = one_file(tmp_path / "model", random_weights(layers=40, size=64))
    shard = folder / "model.safetensors"
    rows = shardesd.stream(folder)
    assert next(rows).status == "ok"
    os.truncate(shard, 100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        list(rows)


def test_verbose_shows_the_traceback(tmp_path: Path, out: Path) -> None:
    result = process("scan", tmp_path / "nowhere", "--out", out, "--verbose")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "error: " in result.stderr.splitlines()[-1]


def test_out_of_budget_says_how_much_it_needs(tmp_path: Path, out: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights(size=300))
    result = cli("scan", folder, "--out", out, "--max-memory", "1MB")
    assert result.exit_code == 3
    reasons = pl.read_csv(out / "models" / "model.csv")["reason"].to_list()
    assert all("needs" in reason and "--max-memory is 1 MB" in reason for reason in reasons)


def test_real_shards_of_another_library_are_accepted(tmp_path: Path, out: Path) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    assert load_file(sorted(folder.glob("*.safetensors"))[0])
    assert cli("scan", folder, "--out", out, "--quiet").exit_code == 0


def test_an_index_may_begin_with_a_mark_and_name_shards_with_a_dot(tmp_path: Path, out: Path) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    path = folder / "model.safetensors.index.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b'"model-', b'"./model-'))
    assert cli("scan", folder, "--out", out).exit_code == 0
    assert pl.read_csv(out / "models" / "model.csv").height == 6


def test_an_index_that_is_a_git_lfs_pointer(tmp_path: Path, out: Path) -> None:
    folder = sharded(tmp_path / "model", random_weights())
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4380\n"
    (folder / "model.safetensors.index.json").write_text(pointer)
    fails("scan", folder, "--out", out, says=["index.json", "LFS", "git lfs pull"])


def test_a_folder_that_is_called_like_a_file(tmp_path: Path, out: Path) -> None:
    (tmp_path / "model" / "model.safetensors").mkdir(parents=True)
    fails("scan", tmp_path / "model", "--out", out, says=["model.safetensors in it is a folder"])


def test_an_integer_of_thousands_of_digits(tmp_path: Path, out: Path) -> None:
    (tmp_path / "model").mkdir()
    text = b'{"a.weight": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}'
    (tmp_path / "model" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    fails("scan", tmp_path / "model", "--out", out, says=["malformed", "an integer of 5000 digits"])


@pytest.mark.parametrize("prefix", ["", "./"])
def test_a_local_folder_has_no_revisions(
    tmp_path: Path, out: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shardesd.source.hub
    from shardesd.errors import Offline

    def offline(address: object) -> None:
        raise Offline("the Hub can't be reached")

    monkeypatch.setattr(shardesd.source.hub, "open_hub", offline)
    monkeypatch.chdir(tmp_path)
    one_file(tmp_path / "model", random_weights())
    fails("scan", f"{prefix}model@main", "--out", out, says=[f"'{prefix}model' is here", "leave '@main' out"])


def test_globs_that_match_nothing_are_named(tmp_path: Path, out: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    result = cli("scan", folder, "--out", out, "--include", "*.c_attn", "--include", "*.q_proj")
    assert result.exit_code == 0
    notes = [line for line in result.stderr.splitlines() if "matches no longname" in line]
    assert len(notes) == 1
    assert "--include '*.c_attn'" in notes[0]
    assert "such as model.embed_tokens" in notes[0]


def test_layouts_that_match_nothing_are_named(tmp_path: Path, out: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights())
    layouts = tmp_path / "own.toml"
    rows = (
        """names='q_proj'""",
        """names='c_attn'""",
        """names='q_proj'\nmodels=['other', 'more*']""",
        """names='o_proj'\nexperts='7'\nparts=['a', 'b']""",
    )
    layouts.write_text("".join(f"[[layout]]\n{row}\n" for row in rows))
    result = cli("scan", folder, "--out", out, "--layout", layouts)
    assert result.exit_code == 0
    notes = [line for line in result.stderr.splitlines() if "matches no tensor" in line]
    assert len(notes) == 2
    assert "own.toml: names 'c_attn' matches no tensor" in notes[0]
    assert notes[1].endswith("names 'q_proj' matches no tensor in a model of type other or more*")
    table = pl.read_csv(next((out / "models").glob("*.csv")))
    reasons = dict(zip(table["longname"], table["reason"], strict=True))
    whole = [reason for name, reason in reasons.items() if name.endswith("o_proj")]
    assert whole
    assert all("rows don't make 7 experts" in reason for reason in whole), "it is not cut as one matrix would be"


def test_numbers_without_a_meaning_of_their_own(tmp_path: Path, out: Path) -> None:
    tensors = random_weights(layers=1)
    tensors["causal.weight"] = np.ones((8, 8), np.bool_)
    tensors["table.weight"] = np.arange(64).reshape(8, 8)
    tensors["codes.weight"] = np.ones((8, 8), np.int8)
    tensors["packed.weight"] = np.ones((8, 8), np.int32)
    tensors["packed.scales"] = np.ones((8, 1), np.float16)
    tensors["tiny.weight"] = np.full((8, 8), 1e-300)
    tensors["head.weight"] = np.ones((1, 8, 3, 3), np.float32)
    tensors["deep.weight"] = np.ones((8, 1, 3, 3), np.float32)
    assert cli("scan", one_file(tmp_path / "model", tensors), "--out", out, "--show-skipped").exit_code == 3
    rows = {row["longname"]: row for row in pl.read_csv(out / "models" / "model.csv").to_dicts()}
    for name, status, reason in (
        ("causal", "skipped", "integer tensor"),
        ("table", "skipped", "integer tensor"),
        ("codes", "failed", "quantised codes"),
        ("packed", "failed", "quantised codes"),
        ("tiny", "failed", "every λ underflows float64"),
        ("head", "skipped", "conv with one output channel"),
        ("deep", "skipped", "conv with one input channel per group"),
    ):
        assert rows[name]["status"] == status, name
        assert reason in rows[name]["reason"]


def test_a_plain_path_is_shown_without_a_second_slash(tmp_path: Path, out: Path) -> None:
    result = cli("scan", f"/{one_file(tmp_path / 'model', random_weights())}", "--out", f"/{out}")
    assert str(out / "models" / "model.csv") in "".join(result.stdout.split())  # a long path is wrapped
    assert "//" not in result.stdout + result.stderr
