"""Rows that are easily lost: of tensors whose longnames meet, and of tied weights whose original is filtered out."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from checkpoints import one_file, random_weights, sharded

import shardesd
from shardesd.events import Event, ScanStarted
from shardesd.refitter import refit
from shardesd.source.local import LocalSource


def weights(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def eigs(W: np.ndarray) -> np.ndarray:
    return np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2


def meeting() -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Tensor name → the tensor, and the matrices it must come out as."""
    a, b, c_attn, c_attn_q, stack, expert = weights((9, 9), (9, 7), (8, 24), (8, 6), (2, 5, 6), (6, 6))
    return {
        "m.a": (a, {"m.a": a}),
        "m.a.weight": (b, {"m.a.weight": b}),
        "h.0.c_attn.weight": (c_attn, {f"h.0.c_attn_{k}": c_attn[:, 8 * i : 8 * i + 8] for i, k in enumerate("qkv")}),
        "h.0.c_attn_q.weight": (c_attn_q, {"h.0.c_attn_q.weight": c_attn_q}),
        "z.experts.w": (stack, {f"z.experts.w.experts.{i}": stack[i] for i in range(2)}),
        "z.experts.w.experts.1": (expert, {"z.experts.w.experts.1#2": expert}),
    }


def holds(result: shardesd.Result) -> None:
    expected = {name: W for _, parts in meeting().values() for name, W in parts.items()}
    layers = {row["longname"]: row for row in result.layers.to_dicts()}
    assert sorted(layers) == sorted(expected) == sorted(result.spectra)
    for name, W in expected.items():
        np.testing.assert_allclose(result.spectra[name], eigs(W), rtol=1e-9, atol=1e-12)
        assert (layers[name]["M"], layers[name]["N"], layers[name]["params"]) == (*W.shape, W.size)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("index", [True, False])
def test_tensors_whose_longnames_meet_keep_a_row_each(tmp_path: Path, count: int, index: bool) -> None:
    tensors = {name: tensor for name, (tensor, _) in reversed(meeting().items())}
    folder = sharded(tmp_path / "model", tensors, count, index=index)
    holds(shardesd.scan(folder, out=tmp_path / "results"))
    holds(shardesd.scan(folder, out=tmp_path / "results"))  # taken from the files


def test_a_state_dict_whose_longnames_meet() -> None:
    holds(shardesd.scan({name: torch.from_numpy(tensor) for name, (tensor, _) in meeting().items()}))


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_called_as_no_key_of_a_spectra_file_can_be(tmp_path: Path, count: int) -> None:
    W, other = weights((9, 7), (8, 6))
    tensors = {"__metadata__.weight": W, "m.weight": other}
    shardesd.scan(sharded(tmp_path / "model", tensors, count), out=tmp_path / "results")
    result = shardesd.scan(tmp_path / "model", out=tmp_path / "results")
    assert sorted(result.spectra) == ["__metadata__.weight", "m"]
    np.testing.assert_allclose(result.spectra["__metadata__.weight"], eigs(W), rtol=1e-9)
    (again,) = refit(tmp_path / "results", shardesd.ScanOptions(fix_fingers="DKS"), processes=1)
    assert (again.rows, again.problem) == (2, "")


def test_shards_whose_names_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the Hub without an index: nothing tells the names of a shard before it is there."""
    tensors = {name: tensor for name, (tensor, _) in reversed(meeting().items())}
    for count in (1, 3):
        source = LocalSource(sharded(tmp_path / str(count), tensors, count, index=False))
        source.location, source.local = "hf://org/name", lambda name: None
        monkeypatch.setattr("shardesd.opening.open_source", lambda repo, revision, source=source: source)
        result = shardesd.scan("org/name")
        assert result.layers.height == 9
        assert len(result.spectra) == 9


def tied(folder: Path) -> Path:
    tensors = random_weights(layers=1)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    return one_file(folder, tensors)


@pytest.mark.parametrize(
    ("globs", "analysed"),
    [
        ({"include": ["lm_head"]}, ["lm_head"]),
        ({"exclude": ["*embed_tokens", "*layers*"]}, ["lm_head"]),
        ({"include": ["*embed_tokens"], "embeddings": True}, ["model.embed_tokens"]),
        ({"include": ["*embed_tokens", "lm_head"], "embeddings": True}, ["model.embed_tokens"]),
        ({"include": ["*embed_tokens", "lm_head"]}, []),
    ],
)
def test_globs_come_before_ties(tmp_path: Path, globs: dict[str, object], analysed: list[str]) -> None:
    folder = tied(tmp_path / "model")
    assert shardesd.scan(folder, **globs).layers["longname"].to_list() == analysed

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(96, 24)
            self.lm_head = torch.nn.Linear(24, 96, bias=False)
            self.lm_head.weight = self.model.embed_tokens.weight

    assert shardesd.scan(Net(), **globs).layers["longname"].to_list() == analysed


def test_what_is_left_out_is_excluded_and_no_duplicate(tmp_path: Path) -> None:
    result = shardesd.scan(tied(tmp_path / "model"), exclude=["lm_head"], show_skipped=True)
    row = result.layers.filter(pl.col("longname") == "lm_head").to_dicts()[0]
    assert (row["status"], row["reason"]) == ("skipped", "excluded")


def test_three_names_of_one_memory() -> None:
    W = torch.from_numpy(weights((6, 6))[0])
    model = {"a.weight": W, "b.weight": W, "c.weight": W}
    for left in itertools.chain.from_iterable(itertools.combinations("abc", k) for k in (1, 2, 3)):
        assert shardesd.scan(model, include=list(left)).layers["longname"].to_list() == [left[0]]


def test_a_stack_that_modules_share_is_counted_once() -> None:
    shared = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))
    single = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    events: list[Event] = []
    stored = {"a.experts.w": shared, "b.experts.w": shared, "c.mlp.up_proj.weight": single}
    result = shardesd.scan(stored, on_event=events.append, cache=False)
    assert result.layers.height == 5
    assert [(event.matrices, event.exact) for event in events if isinstance(event, ScanStarted)] == [(5, True)]
