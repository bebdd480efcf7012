"""Every mistake in an argument of the Python API is a `ShardesdError` of one line; what can be understood is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import cli

import shardesd
from shardesd.errors import MalformedHeader, NoWeights, OptionError
from shardesd.events import Notice
from shardesd.options import ScanOptions, parse_size, size_text

W = torch.linspace(-1, 1, 64).reshape(8, 8) ** 3


def refused(model: Any = None, says: str = "", **arguments: Any) -> None:
    with pytest.raises(shardesd.ShardesdError, match=says) as caught:
        shardesd.scan({"a.weight": W} if model is None else model, **arguments)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        *[{"bins": value} for value in ("3", 3.5, True, None, 0, 1_000_001)],
        *[{"evals_thresh": value} for value in ("a", None, float("nan"), -1)],
        *[{"max_aspect": value} for value in ("8", None, [8])],
        *[{"gpu_memory_fraction": value} for value in ("half", None, 0, 1.5)],
        *[{"max_memory": value} for value in ("lots", "1e400GB", [3], float("nan"), 0)],
        *[{"include": value} for value in ([3], 3, [""], "", [None])],
        *[{"exclude": value} for value in ([3], b"a", "")],
        *[{"device": value} for value in (3, ["cpu"], torch.device("meta"))],
        *[{"solver": value} for value in (None, 3, [])],
        *[{"out": value} for value in (3, "", b"x", "a\0b")],
        {"filter_zeros": "no"},
        {"embeddings": 1},
        {"revision": 3},
        {"delta": "yes"},
        {"adapter": 3},
        {"adapter": [None]},
        {"lora_alpha": "16"},
        {"options": 3},
        {"out": "r", "format": 3},
        {"out": "r", "overwrite": "yes"},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_an_option_error(arguments: dict[str, Any]) -> None:
    refused(says=r"expected|more than|revision", **arguments)


@pytest.mark.parametrize("places", [{}, {"base": 3, "adapter": "a"}, {"base": "a"}], ids=str)
def test_places_that_are_none(places: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"name a model|expected a local path"):
        shardesd.scan(None, **places)


@pytest.mark.parametrize("model", [3, W, [W], b"x"], ids=lambda model: type(model).__name__)
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(OptionError, match=f"state dict, not {type(model).__name__}"):
        shardesd.scan(model)


def test_what_can_be_understood_is_taken() -> None:
    options = ScanOptions(
        max_memory="2GB",  # type: ignore[arg-type]
        device=torch.device("cpu"),  # type: ignore[arg-type]
        include=None,  # type: ignore[arg-type]
        exclude="*.q",  # type: ignore[arg-type]
        bins=np.int64(7),  # type: ignore[arg-type]
        evals_thresh=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert options == ScanOptions(max_memory=2 * 10**9, device="cpu", exclude=("*.q",), bins=7, evals_thresh=0.5)
    assert shardesd.scan({"a.weight": W}, max_memory="2GB", device=torch.device("cpu")).layers.height == 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (640, "640 B"),
        (1000, "1 kB"),
        (10_752, "10.8 kB"),
        (999_600, "1 MB"),
        (2e9, "2 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_sizes_are_said_in_units_that_fit(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text
    assert parse_size(text) == nbytes or text in ("10.8 kB", "1 MB")


def test_numpy_arrays_are_tensors_too() -> None:
    array = W.numpy().copy()
    array.flags.writeable = False
    ours = shardesd.scan({"a.weight": array}).spectra["a"]
    assert np.array_equal(ours, shardesd.scan({"a.weight": W}).spectra["a"])


def test_a_dict_that_holds_no_tensors_by_name_says_what_it_holds() -> None:
    refused({0: W}, r"ignored 0: names must be strings, not int")
    refused({"state_dict": {"a.weight": W}}, r"ignored 'state_dict': it is a dict of tensors itself; pass that one")
    refused({"a": np.array(["text"])}, r"ignored 'a': torch can't take this array of <U4")
    with pytest.raises(NoWeights):
        shardesd.scan({})


def test_what_is_no_tensor_among_tensors_is_noted() -> None:
    events: list[object] = []
    shardesd.scan({"a.weight": W, "step": 3, "optimizer": {"m": W}}, on_event=events.append)
    notes = [event.message for event in events if isinstance(event, Notice)]
    assert any("'step': no tensor" in note for note in notes)
    assert any("'optimizer': it is a dict of tensors" in note for note in notes)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_costs_its_own_row(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([W, W[:3]], layout=layout)
    layers = shardesd.scan({"a.weight": nested, "b.weight": W}).layers
    assert layers["status"].to_list() == ["failed", "ok"]
    assert "nested" in layers["reason"][0]


def test_a_message_is_one_line_however_hostile_the_name() -> None:
    error = MalformedHeader(f"tensor 'a\nb\x1b[2J\u202e{'x' * 5000}': its bytes overlap")
    assert str(error).startswith("tensor 'a\\nb\\x1b[2J\\u202exxx")
    assert str(error).endswith("xxx': its bytes overlap")
    assert len(str(error)) < 300
    assert len(str(MalformedHeader("y " * 50_000))) <= 1501
    assert str(MalformedHeader("λ of /a/b: 3 × 4")) == "λ of /a/b: 3 × 4"


def test_out_may_be_a_path(tmp_path: Path) -> None:
    assert shardesd.scan({"a.weight": W}, out=tmp_path / "results").files[0].exists()


def test_out_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shells leave as it is in ``--out=~/results``, and Python always does."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (file, *_) = shardesd.scan({"a.weight": W}, out="~/results").files
    assert file.is_relative_to(tmp_path / "results")
    assert cli("summarize", "~/results").exit_code == 0
    assert cli("refit", "~/results").exit_code == 0
    cli("doctor", "--no-network", "--out=~/results")
    assert not (tmp_path / "~").exists()


def test_no_model_at_all_says_what_to_name() -> None:
    with pytest.raises(OptionError, match="name a model, or a base and its adapters"):
        shardesd.scan()
