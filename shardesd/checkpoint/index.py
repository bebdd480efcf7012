"""The index of a sharded checkpoint: which shard holds which tensor."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from pathlib import Path

from shardesd.checkpoint.header import strict_json
from shardesd.checkpoint.layout import PICKLED_INDEX_SUFFIX, SUFFIX, natural
from shardesd.checkpoint.reader import unreadable
from shardesd.errors import MalformedIndex
from shardesd.records import TensorRef


class Index:
    """A parsed ``….safetensors.index.json``.

    `files` are the names that the source holds, or None if it can't name them all. Raises `MalformedIndex` for what is
    not an index, and for a shard that isn't there or whose name leads outside.
    """

    def __init__(self, name: str, path: Path, files: Collection[str] | None) -> None:
        self.name = name
        try:
            raw = path.read_bytes()
            if raw.startswith(b"version https://git-lfs"):
                raise MalformedIndex(f"{path}: a Git LFS pointer instead of the index itself: run `git lfs pull`")
            value = strict_json(raw.removeprefix(codecs.BOM_UTF8))
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise MalformedIndex(f"{path}: malformed index: {error}") from None
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise MalformedIndex(f"{path}: malformed index: no weight_map that names tensors")
        self._tensors: dict[str, list[str]] = {}
        self.weight_map: dict[str, str] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str):
                raise MalformedIndex(f"{path}: tensor '{tensor}': its shard is not a string")
            shard = shard.removeprefix("./")
            self.weight_map[tensor] = shard
            self._tensors.setdefault(shard, []).append(tensor)
        for shard, tensors in self._tensors.items():
            if _leads_outside(shard):
                raise MalformedIndex(f"{path}: tensor '{tensors[0]}': shard '{shard}' leads outside the checkpoint")
            suffix = ".bin" if name.endswith(PICKLED_INDEX_SUFFIX) else SUFFIX
            if not shard.endswith(suffix):
                raise MalformedIndex(f"{path}: tensor '{tensors[0]}': shard '{shard}' is not a {suffix[1:]} file")
            if files is not None and shard not in files:
                raise MalformedIndex(
                    f"{path}: tensor '{tensors[0]}': shard '{shard}' isn't there: get it, or name one file"
                )

    @property
    def shards(self) -> list[str]:
        """The shards' names in natural order."""
        return natural(self._tensors)

    def select(self, shard: str, tensors: tuple[TensorRef, ...]) -> tuple[TensorRef, ...]:
        """Those of a shard's tensors that count: all but the ones that the index places in another shard.

        Raises `MalformedIndex` where the shard lacks a tensor that the index places in it.
        """
        there = {tensor.name for tensor in tensors}
        lacking = [name for name in self._tensors[shard] if name not in there]
        if lacking:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise MalformedIndex(f"{self.name} places tensor '{lacking[0]}'{more} in {shard}, which doesn't hold it")
        return tuple(tensor for tensor in tensors if self.weight_map.get(tensor.name, shard) == shard)


def _leads_outside(name: str) -> bool:
    parts = name.split("/")
    return (
        "\\" in name or "\0" in name or bool(re.match(r"[A-Za-z]:", name)) or any(p in ("", ".", "..") for p in parts)
    )
