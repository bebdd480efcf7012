"""Finding out: what is an adapter, which base it names, and chains of adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardesd.adapters.base import base_reference, resolve_chain
from shardesd.adapters.load import is_adapter, load_adapter
from shardesd.errors import AccessDenied, AdapterError, MalformedAdapter, NotFound
from shardesd.source import Source, open_source


def open_(repo: str, revision: str | None) -> Source:
    return open_source(repo, revision=revision)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], True),
        (["adapter_config.json"], True),
        (["adapter_model.bin", "README.md"], True),
        (["pytorch_lora_weights.safetensors"], True),
        (["adapter_config.json", "adapters.safetensors"], True),
        (["adapter_config.json", "adapter_model.safetensors", "checkpoint-9/model.safetensors"], True),
        (["adapter_config.json", "adapter_model.safetensors", "training_args.bin", "optimizer.bin"], True),
        (["adapter_config.json", "adapter_model.safetensors", "model.safetensors"], False),
        (["adapter_config.json", "pytorch_model-00001-of-00002.bin"], False),
        (["config.json", "model.safetensors"], False),
        (["config.json", "model.safetensors", "adapter/adapter_config.json"], False),
        ([], False),
    ],
)
def test_what_is_an_adapter(files: list[str], expected: bool) -> None:
    assert is_adapter(files) is expected


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, base: Any = None, card: str = "", **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base, **config}
        (folder / "adapter_config.json").write_text(json.dumps(described))
        save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 4)}, folder / "adapter_model.safetensors")
        if card:
            (folder / "README.md").write_text(card)
        return folder

    return write


def reference(folder: Path) -> tuple[str, str | None, str]:
    found = base_reference(load_adapter(open_source(folder)))
    return found.repo, found.revision, found.told_by


def test_the_config_names_the_base(adapter: Callable[..., Path]) -> None:
    folder = adapter("a", "org/base", "---\nbase_model: org/other\n---\n", revision="v1")
    assert reference(folder) == ("org/base", "v1", "adapter_config.json")


@pytest.mark.parametrize("card", ["---\nbase_model: org/base\n---\nText", "---\nbase_model:\n- org/base\n---\n"])
def test_the_card_names_the_base(card: str, adapter: Callable[..., Path]) -> None:
    assert reference(adapter("a", None, card)) == ("org/base", None, "README.md")
    assert reference(adapter("b", "/home/somebody/llama", card)) == ("org/base", None, "README.md")


@pytest.mark.parametrize("card", ["", "no metadata", "---\nlicense: mit\n---\n", "---\n: [\n---\n"])
def test_nobody_names_the_base(card: str, adapter: Callable[..., Path]) -> None:
    with pytest.raises(MalformedAdapter, match=r"a: neither adapter_config.json nor README.md names a base.*--base"):
        reference(adapter("a", None, card))


def test_a_path_that_is_not_here(adapter: Callable[..., Path]) -> None:
    with pytest.raises(MalformedAdapter, match=r"its base '/home/somebody/llama' is a path that isn't here.*--base"):
        reference(adapter("a", "/home/somebody/llama"))


@pytest.mark.parametrize("text", ["x" * 5000, "/" + "x" * 5000, "~\0", "~\0@main", "a b", "\ud800"])
def test_a_name_that_nothing_can_have(text: str, adapter: Callable[..., Path]) -> None:
    for folder in (adapter("a", text), adapter("b", None, f"---\nbase_model: {json.dumps(text)}\n---\n")):
        with pytest.raises((MalformedAdapter, NotFound), match=r"^[ab]: its base '.*--base"):
            resolve_chain([open_source(folder)], open_)


def test_a_revision_that_no_branch_can_have(adapter: Callable[..., Path]) -> None:
    with pytest.raises(NotFound, match=r"a: its base 'org/x' .*revision 'a b' of 'org/x' is invalid.*--base"):
        resolve_chain([open_source(adapter("a", "org/x", revision="a b"))], open_)


@pytest.mark.parametrize("text", ["../base", "./../base"])
def test_a_path_relative_to_the_adapter(text: str, tmp_path: Path, adapter: Callable[..., Path]) -> None:
    (tmp_path / "base").mkdir()
    repo, revision, _ = reference(adapter("a", text, revision="main"))
    assert (Path(repo).resolve(), revision) == (tmp_path / "base", None)


def base_model(folder: Path) -> Path:
    folder.mkdir()
    save_file({"q.weight": torch.ones(6, 4)}, folder / "model.safetensors")
    return folder


def test_a_chain_is_followed_to_the_model(tmp_path: Path, adapter: Callable[..., Path]) -> None:
    model = base_model(tmp_path / "model")
    adapter("first", "../model")
    top = adapter("second", "../first")
    chain = resolve_chain([open_source(top)], open_)
    assert chain.base.location == open_source(model).location
    assert [one.name for one in chain.adapters] == ["first", "second"]
    assert chain.told_by == "adapter_config.json"


def test_the_users_base_comes_first(tmp_path: Path, adapter: Callable[..., Path]) -> None:
    model = base_model(tmp_path / "model")
    sources = [open_source(adapter("a", "org/elsewhere")), open_source(adapter("b", "org/elsewhere"))]
    chain = resolve_chain(sources, open_, base=open_source(model))
    assert (chain.base.model_id, chain.told_by) == ("model", "--base")
    assert [one.name for one in chain.adapters] == ["a", "b"]


def test_a_cycle(tmp_path: Path, adapter: Callable[..., Path]) -> None:
    adapter("a", "../b")
    adapter("b", "../a")
    with pytest.raises(AdapterError, match="a is its own base, by way of b → a") as error:
        resolve_chain([open_source(tmp_path / "a")], open_)
    assert "\n" not in str(error.value)
    adapter("self", ".")
    with pytest.raises(AdapterError, match="self is its own base"):
        resolve_chain([open_source(tmp_path / "self")], open_)


def test_a_base_that_is_missing_or_gated(adapter: Callable[..., Path]) -> None:
    source = open_source(adapter("a", "org/gone"))

    def missing(repo: str, revision: str | None) -> Source:
        raise NotFound(f"no model '{repo}'")

    def gated(repo: str, revision: str | None) -> Source:
        raise AccessDenied(f"'{repo}' is gated")

    with pytest.raises(NotFound, match=r"a: its base 'org/gone' .from adapter_config.json. can't be found.*--base"):
        resolve_chain([source], missing)
    with pytest.raises(AccessDenied, match="'org/gone' is gated"):
        resolve_chain([source], gated)
