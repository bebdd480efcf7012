"""Lists of models: every format, and everything that can be wrong with a line."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import polars as pl
import pytest

from shardesd.batch import ModelList, as_list, identified, read_list
from shardesd.errors import ListError


def listed(tmp_path: Path, text: str | bytes, name: str = "models.csv") -> ModelList:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_list(path)


TABLE = """full_name,source_model,base_model_relation,revision,likes,note
org/one,,,,12,"a, b"
org/two,org/base,LoRA,v1,3,
"""


@pytest.mark.parametrize(
    "data",
    [
        TABLE.encode(),
        codecs.BOM_UTF8 + TABLE.encode(),
        TABLE.replace("\n", "\r\n").encode(),
        TABLE.replace('"a, b"', "*").replace(",", ";").replace("*", "a, b").encode(),
        TABLE.replace('"a, b"', "*").replace(",", "\t").replace("*", "a, b").encode(),
        TABLE.replace('"a, b"', "*").replace(",", "|").replace("*", "a, b").encode(),
        TABLE.encode("utf-16"),
        TABLE.replace("full_name,source_model", " Full Name ,Source_Model").encode(),
    ],
    ids=["plain", "BOM", "CRLF", "semicolons", "tabs", "bars", "UTF-16", "other words"],
)
def test_a_table_however_it_is_written(tmp_path: Path, data: bytes) -> None:
    found = listed(tmp_path, data)
    assert not found.problems
    assert found.columns == ("likes", "note")
    one, two = found.rows
    assert (one.model, one.revision, one.base, dict(one.extra)) == (
        "org/one",
        None,
        None,
        {"likes": "12", "note": "a, b"},
    )
    assert (two.key, two.base, two.relation, two.line) == (("org/two", "v1"), "org/base", "lora", 3)
    assert two.name == "org/two@v1"


def test_parquet_and_json_lines_say_the_same(tmp_path: Path) -> None:
    table = pl.DataFrame({"model_id": ["org/one", None], "full_name": [None, "org/two"], "likes": [12, None]})
    table.write_parquet(tmp_path / "models.parquet")
    table.write_ndjson(tmp_path / "models.jsonl")
    for name in ("models.parquet", "models.jsonl"):
        found = read_list(tmp_path / name)
        assert [row.model for row in found.rows] == ["org/one", "org/two"]
        assert [dict(row.extra) for row in found.rows] == [{"likes": "12"}, {"likes": ""}]


def test_a_text_file_of_ids(tmp_path: Path) -> None:
    found = listed(tmp_path, "# mine\norg/one  # good\n\nhf://org/two@dev/sub\ngpt2@main\n", "models.txt")
    assert [row.name for row in found.rows] == ["org/one", "org/two/sub@dev", "gpt2@main"]
    assert not found.problems


def test_what_is_wrong_is_said_by_line(tmp_path: Path) -> None:
    text = "model_id,revision,x\norg/one,,\n\n,,7\norg/one,,\norg/a b,,\norg/two@v1,v2,\norg/three,,1,2\norg/one,v1,\n"
    found = listed(tmp_path, text)
    assert [row.name for row in found.rows] == ["org/one", "org/one@v1"]
    assert [(problem.line, problem.repeats) for problem in found.problems] == [
        (4, False),
        (5, True),
        (6, False),
        (7, False),
        (8, False),
    ]
    words = ["names no model", "repeats line 2", "org/a b", "v2", "4 cells where there are 3"]
    assert all(word in str(problem) for word, problem in zip(words, found.problems, strict=True))


def test_lines_are_those_of_the_file_even_after_a_cell_of_several_lines(tmp_path: Path) -> None:
    found = listed(tmp_path, 'model_id,note\norg/one,"a\nb"\norg/bad id,\n')
    assert [problem.line for problem in found.problems] == [4]


def test_two_folders_of_one_name_would_share_their_results(tmp_path: Path) -> None:
    for folder in ("a/model", "b/model"):
        (tmp_path / folder).mkdir(parents=True)
    found = listed(tmp_path, f"{tmp_path}/a/model\n{tmp_path}/b/model\n{tmp_path}/a/model\n", "models.txt")
    assert len(found.rows) == 1
    assert [problem.repeats for problem in found.problems] == [False, True]


def test_a_quotation_mark_that_nothing_closes_is_said(tmp_path: Path) -> None:
    found = listed(tmp_path, 'model_id,note\norg/one,"a\nb"\norg/two,"c\norg/three,\norg/four,\n')
    assert [row.model_id for row in found.rows] == ["org/one"]
    (problem,) = found.problems
    assert (problem.line, problem.repeats) == (4, False)
    assert "to line 6 is lost" in problem.message
    whole = listed(tmp_path, 'model_id,note\norg/one,"a\nb" \n')
    assert (len(whole.rows), whole.problems) == (1, ())


def test_cells_that_csv_could_not_read_again(tmp_path: Path) -> None:
    lines = [
        {"model_id": "org/one", "note": "a\rb\r\nc\0d", "bad\rname": "x"},
        {"model_id": "org/two", "card": "x" * 200_000},
        {"model_id": "org/three", "note": "\udc80"},
    ]
    found = listed(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "models.jsonl")
    assert [dict(row.extra) for row in found.rows] == [{"note": "a\nb\ncd", "bad\nname": "x"}, {"note": "\\udc80"}]
    assert [(problem.line, problem.text) for problem in found.problems] == [(2, "org/two")]
    assert "'card' has 200,000 characters" in found.problems[0].message


def test_paths_may_be_relative_to_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lists" / "model").mkdir(parents=True)
    text = "model_id,source_model,base_model_relation\n./model,./base,lora\n./nothing,,\nhf://org/two@dev,,\n"
    (tmp_path / "lists" / "models.csv").write_text(text)
    monkeypatch.chdir(tmp_path)
    model, nothing, remote = read_list("lists/models.csv").rows
    assert (model.model_id, model.model) == ("model", str(tmp_path / "lists" / "model"))
    assert model.base == str(tmp_path / "lists" / "base")
    assert (remote.model, remote.on_hub) == ("hf://org/two@dev", True)
    # A folder that isn't there is no model on the Hub that happens to have its name.
    assert not nothing.on_hub
    monkeypatch.chdir(tmp_path / "lists")
    (nothing,) = [row for row in read_list("models.csv").rows if row.model_id == "nothing"]
    assert not nothing.on_hub


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.csv", b"name,likes\norg/one,1\n", "no column full_name or model_id"),
        ("a.csv", b"", "it has nothing"),
        ("a.csv", b"model_id,x,x\n", "column 'x' twice"),
        ("a.csv", b"model_id\norg/\xff\n", "line 2"),
        ("a.parquet", b"nonsense", "can't read the list"),
    ],
)
def test_a_file_that_is_no_list(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    with pytest.raises(ListError, match=says):
        listed(tmp_path, data, name)
    with pytest.raises(ListError, match="no such file"):
        read_list(tmp_path / "nothing.csv")


def test_lists_in_python() -> None:
    found = as_list(["org/one", {"full_name": "org/two", "likes": 3, "revision": None}, identified("org/three@v1")])
    assert [row.name for row in found.rows] == ["org/one", "org/two", "org/three@v1"]
    assert found.columns == ("likes",)
    with pytest.raises(ListError, match=r"model 2: .*org/a b"):
        as_list(["org/one", "org/a b"])
