"""A quantised weight whose parts lie in several shards, of which one can't be read at first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from quantised_files import opened, random, store

from shardesd.checkpoint import StoredCheckpoint, open_checkpoint
from shardesd.errors import SourceError
from shardesd.records import TensorRef
from shardesd.source.local import LocalSource

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True},
        }
    },
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("index", [True, False])
def test_a_shard_whose_opening_failed_is_opened_again_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool, order: int
) -> None:
    """As after a server that answered once and not the second time: no weight may be missing then."""
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj.weight"
    codes = torch.randint(-(2**31), 2**31 - 1, (48, 8), dtype=torch.int64).to(torch.int32)
    first = {f"{up}.weight_packed": codes, down: random(64, 48)}
    second = {f"{up}.weight_scale": random(48, 2), f"{up}.weight_shape": torch.tensor([48, 64])}
    folder = store(tmp_path / "model", *[first, second][::order], quantization=PACKED, index=index, model_type="llama")
    expected = opened(folder).tensors()
    assert {tensor.name for tensor in expected} == {f"{up}.weight", down}
    source = LocalSource(folder)
    source.location, source.local = "hf://org/name", lambda name: None
    checkpoint = open_checkpoint(source)
    read_part = StoredCheckpoint._read_part
    failed: list[str] = []

    @contextmanager
    def fails_once(self: StoredCheckpoint, tensor: TensorRef) -> Iterator[np.ndarray]:
        if not failed:
            failed.append(tensor.name)
            raise SourceError("the server answered 403")
        with read_part(self, tensor) as part:
            yield part

    monkeypatch.setattr(StoredCheckpoint, "_read_part", fails_once)
    one, other = checkpoint.shards
    checkpoint.open(one, source.path(one.name)).close()
    with pytest.raises(SourceError):
        checkpoint.open(other, source.path(other.name))
    assert failed == [f"{up}.weight_shape"]
    assert not checkpoint.complete
    checkpoint.open(other, source.path(other.name)).close()
    assert checkpoint.complete
    assert checkpoint.tensors() == expected
