"""Groups that a GPU solves together: what is kept leaves the group, what fails costs its own row only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import one_file, random_weights

from shardesd import matrices, spectra
from shardesd.checkpoint import open_checkpoint
from shardesd.keep import Keep, Recall
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, Spectrum
from shardesd.solver import Solver
from shardesd.source import open_source


@pytest.mark.parametrize("active", [True, False])
def test_a_group_is_solved_once_and_then_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: bool) -> None:
    tensors = {name: W for name, W in random_weights(layers=6).items() if "self_attn" in name}
    tensors["model.layers.3.self_attn.q_proj.weight"][0, 0] = np.nan
    checkpoint = open_checkpoint(open_source(one_file(tmp_path / "model", tensors)))
    ref = checkpoint.shards[0]
    shard = checkpoint.open(ref, tmp_path / "model" / ref.name)
    options = ScanOptions()
    context = matrices.Context(options=options)
    items = [item for tensor in shard.tensors for item in matrices.plan(tensor, context)]
    pairs = [(item, shard) for item in items if isinstance(item, MatrixRef)]
    groups: list[int] = []

    def together(opened: list[Any], **how: Any) -> list[Spectrum | Exception]:
        groups.append(len(opened))
        results: list[Spectrum | Exception] = []
        how.pop("n")
        for open_ in opened:
            try:
                with open_() as parts:
                    results.append(spectra.compute(parts, **how | {"device": "cpu"}))
            except Exception as error:
                results.append(error)
        return results

    monkeypatch.setattr(spectra, "compute_many", together)
    solver = Solver(options, Recall(Keep(tmp_path / "kept", 10**6) if active else None, options), 10**9)
    first = solver.solve_many(pairs, "cuda:0")
    again = solver.solve_many(pairs, "cuda:0")
    assert groups == ([12, 1] if active else [12, 12])
    for (item, _), (one, _), (two, _) in zip(pairs, first, again, strict=True):
        if "layers.3.self_attn.q" in item.longname:
            assert isinstance(one, Exception)
            assert isinstance(two, Exception)
            continue
        assert not isinstance(one, Exception)
        assert not isinstance(two, Exception)
        assert np.array_equal(one[0].eigs, two[0].eigs)
        assert (one[1], one[2], two[2]) == (two[1], False, active)
        W = tensors[f"{item.longname}.weight"].astype(np.float64)
        assert np.allclose(one[0].eigs, np.linalg.svd(W, compute_uv=False)[::-1] ** 2, rtol=0, atol=1e-10)
    shard.close()
