"""What makes two spectra one, and what doesn't."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from shardesd.keep import Keep, Recall, digest, spectrum_key
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, ShardRef, Spectrum, TensorRef

TENSOR = TensorRef(name="a.weight", dtype="F32", shape=(4, 6), shard="one", start=8, end=104)
MATRIX = MatrixRef(longname="a", tensor=TENSOR, M=4, N=6, block_type="q_proj")


def key(matrix: MatrixRef = MATRIX, content: str = "c", **how: str) -> str:
    return spectrum_key(content, matrix, **{"solver": "auto", "precision": "auto", **how})


def test_names_and_places_change_nothing() -> None:
    moved = replace(TENSOR, name="b.weight", shard="two", start=1000, end=1096)
    other = replace(MATRIX, longname="b", tensor=moved, block_type="other", layer_index=7, note="x", whole=False)
    assert key(other) == key()


@pytest.mark.parametrize(
    "changed",
    [
        key(content="d"),
        key(solver="svd"),
        key(precision="float32"),
        key(replace(MATRIX, scale=0.5)),
        key(replace(MATRIX, M=6, N=4)),
        key(replace(MATRIX, slices=3)),
        key(replace(MATRIX, fold=(2, 2, 6), pick=(0,))),
        key(replace(MATRIX, fold=(2, 2, 6), pick=(1,))),
        key(replace(MATRIX, fold=(2, 2, 6), pick=(slice(0, 1),))),
        key(replace(MATRIX, tensor=replace(TENSOR, dtype="I32"))),
        key(replace(MATRIX, tensor=replace(TENSOR, shape=(6, 4)))),
    ],
)
def test_whatever_may_change_a_value_changes_the_key(changed: str) -> None:
    assert changed != key()
    assert len(changed) == 64


def test_every_field_of_a_matrix_has_been_thought_of() -> None:
    """A new one goes into the key by itself; this test asks whether it should."""
    assert {field.name for field in fields(MatrixRef)} >= {"longname", "block_type", "layer_index", "whole", "note"}
    named = {"M", "N", "fold", "longname", "block_type", "layer_index", "note", "pick", "scale", "slices", "tensor"}
    assert named <= {field.name for field in fields(MatrixRef)}


def test_a_digest_is_of_the_bytes_alone() -> None:
    W = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert digest([W]) == digest([W.reshape(-1).view(np.uint8)]) == digest([W[:2], W[2:]])
    assert digest([W]) != digest([W + 1])
    assert digest([W.T]) == digest([np.ascontiguousarray(W.T)]) != digest([W])


@dataclass
class Opened:
    """An open shard, as far as `Recall` knows one."""

    ref: ShardRef
    of: str | None = ""

    def delta(self, tensor: TensorRef) -> str | None:
        return self.of


def spectrum(*eigs: float, solver: str = "gram") -> Spectrum:
    return Spectrum(
        eigs=np.array(eigs),
        solver=solver,  # type: ignore[arg-type]
        precision="float64",
        device="cpu",
        seconds=0.1,
    )


def test_a_place_in_a_file_of_known_digest_needs_no_reading(tmp_path) -> None:  # type: ignore[no-untyped-def]
    shard = ShardRef(name="one", sha256="ab" * 32)
    raw = np.arange(24, dtype=np.float32).reshape(4, 6)
    keep = Keep(tmp_path, 10**6)
    recall = Recall(keep, ScanOptions())
    assert recall.unread(MATRIX, Opened(shard)) is None
    content = digest([raw])
    assert recall.get(content, MATRIX) is None
    recall.note(TENSOR, Opened(shard), content)
    assert recall.unread(MATRIX, Opened(shard)) is None
    recall.put(content, MATRIX, spectrum(1.0, 2.0))
    keep.flush()
    again = Recall(Keep(tmp_path, 10**6), ScanOptions(fix_fingers="DKS", bins=7, evals_thresh=0.1))
    found = again.unread(MATRIX, Opened(shard))
    assert found is not None
    assert (found.eigs.tolist(), found.solver, found.device, found.seconds) == ([1.0, 2.0], "gram", "cpu", 0.1)
    assert again.unread(MATRIX, Opened(shard, "an adapter")) is None
    assert again.unread(replace(MATRIX, tensor=replace(TENSOR, start=9)), Opened(shard)) is None
    assert again.unread(MATRIX, Opened(ShardRef(name="one"))) is None
    assert again.get(content, replace(MATRIX, longname="copy")) is not None
    assert again.get(None, MATRIX) is None
    # What an adapter makes of the same bytes is remembered beside it, and where other files count too, nothing is.
    adapted = Opened(shard, "an adapter")
    again.note(TENSOR, adapted, "other content")
    assert again.content(TENSOR, adapted) == "other content"
    assert again.content(TENSOR, Opened(shard)) == content
    again.note(TENSOR, Opened(shard, None), "never")
    assert again.content(TENSOR, Opened(shard, None)) is None


def test_rounding_that_a_smaller_threshold_would_see_is_not_taken(tmp_path) -> None:  # type: ignore[no-untyped-def]
    keep, content = Keep(tmp_path, 10**6), digest([np.zeros(24)])
    for solver, taken in (("gram", False), ("svd", True)):
        Recall(keep, ScanOptions()).put(content, MATRIX, spectrum(1e-14, 1e3, solver=solver))
        assert (Recall(keep, ScanOptions(evals_thresh=1e-16)).get(content, MATRIX) is not None) is taken
        assert Recall(keep, ScanOptions(evals_thresh=1e-5)).get(content, MATRIX) is not None
        assert Recall(keep, ScanOptions(evals_thresh=1e-16, filter_zeros=False)).get(content, MATRIX) is not None


def test_float32_is_not_taken_for_float64(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(
        "shardesd.spectra.choose_precision", lambda wanted, device: "float32" if device == "cuda:0" else "float64"
    )
    keep, content = Keep(tmp_path, 10**6), digest([np.zeros(24)])
    Recall(keep, ScanOptions()).put(content, MATRIX, replace(spectrum(1.0, 2.0), precision="float32"))
    assert Recall(keep, ScanOptions(), ["cpu", "cuda:1"]).get(content, MATRIX) is None
    assert Recall(keep, ScanOptions(), ["cuda:0"]).get(content, MATRIX) is not None


def test_a_folder_that_cannot_be_written_costs_one_word(tmp_path) -> None:  # type: ignore[no-untyped-def]
    place = tmp_path / "file"
    place.write_text("in the way")
    said: list[str] = []
    keep = Keep(place / "cache", 10**6, said.append)
    for n in range(3):
        keep.put(f"{n:064}", spectrum(1.0))
        keep.flush()
        assert keep.get(f"{n:064}") is None
    assert len(said) == 1
    assert str(place) in said[0]


def test_what_was_put_is_there_at_once_and_written_when_flushed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    keep = Keep(tmp_path, 10**6)

    def put(of: int) -> None:
        for n in range(of, 200, 4):
            keep.put(f"{n:064x}", spectrum(float(n)))
            found = keep.get(f"{n:064x}")
            assert found is not None
            assert found.eigs.tolist() == [n]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(4)))
    keep.flush()
    again = Keep(tmp_path, 10**6)
    for n in range(200):
        found = again.get(f"{n:064x}")
        assert found is not None
        assert found.eigs.tolist() == [n]
    assert again.contents().entries == 200
    assert not list(tmp_path.rglob("*.tmp"))
