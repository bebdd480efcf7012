"""What a scan would do, from headers alone: nothing is downloaded but them."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardesd import adapters, spectra
from shardesd.checkpoint import Checkpoint, Shard, open_local
from shardesd.errors import NoRanges, SourceError
from shardesd.opening import Opened, What, open_what
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, ShardRef
from shardesd.wanted import wanted_beforehand

_AT_ONCE = 8
"""Shards whose headers are asked for at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """All of it as plain JSON values; sizes are bytes."""

    model_id: str
    revision: str | None
    commit: str | None
    location: str
    adapter: dict[str, Any] | None
    """``names``, ``base``, ``tensors`` (of the base that are changed), ``added``; None for a model."""
    shards: int
    nbytes: int
    """Of all shards."""
    cached: int
    """Of those that are on this machine."""
    needed: int
    """Of the matrices that would be read: neither skipped nor kept from before."""
    fetch: int
    """That would cross the line: ranges, or shards as a whole."""
    dtypes: dict[str, dict[str, int]]
    """Element type → ``tensors``, ``nbytes``."""
    block_types: dict[str, dict[str, int]]
    """Block type → ``matrices``, ``params``, ``kept`` (how many have λ from before)."""
    skipped: dict[str, int]
    """Reason → how many tensors, or parts of one."""
    failed: dict[str, int]
    """The same, of weights that would be rows without numbers."""
    memory: dict[str, int]
    """Of the matrix that takes most: ``tensor`` as stored, ``blocks`` converted, ``gram`` and LAPACK's ``copy``."""
    solves: list[dict[str, Any]]
    """By shorter side n, largest first: ``n``, ``matrices``, ``gflop`` (Gram and eigenvalues) of what isn't kept."""
    notes: list[str]


def inspect(
    repo: str | os.PathLike[str],
    options: ScanOptions,
    *,
    revision: str | None = None,
    base: str | None = None,
) -> Inspection:
    """What `scan` would find, read, keep and compute.

    For an adapter, of its base (`base`, or the one that its files name) with the adapter matched onto it. Raises
    `ShardesdError`: whatever a scan would meet in headers, and adapters that find no place.
    """
    opened = open_what(What(model=repo, revision=revision, base=base), options)
    shards = _headers(opened.checkpoint)
    return _inspection(opened, shards, options)


def _headers(checkpoint: Checkpoint) -> list[Shard]:
    def one(ref: ShardRef) -> Shard:
        here = open_local(checkpoint, ref)
        if here is not None:
            with here:
                return here
        peeked = checkpoint.peek(ref)
        if peeked is None:
            checkpoint.source.path(ref.name)  # raises the reason
            raise SourceError(f"'{ref.name}' can't be read")
        return peeked

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(one, checkpoint.shards))
    except NoRanges as error:
        words = str(error).partition("; use --fetch")[0]
        raise NoRanges(f"{words}, so headers can't be had alone; scan the model instead") from error


def _adapter(opened: Opened) -> dict[str, Any] | None:
    merged = opened.checkpoint
    if not isinstance(merged, adapters.MergedCheckpoint):
        return None
    return {
        "names": [adapter.name for adapter in merged.adapters],
        "base": opened.source_model,
        "tensors": len(merged.plan.edits),
        "added": len(merged.plan.extra),
    }


def _inspection(opened: Opened, shards: list[Shard], options: ScanOptions) -> Inspection:
    checkpoint = opened.checkpoint
    wanted = wanted_beforehand(checkpoint, options, ["cpu"])
    local = {shard.ref.name for shard in shards if checkpoint.source.local(shard.ref.name) is not None}
    dtypes: dict[str, dict[str, int]] = {}
    block_types: dict[str, dict[str, int]] = {}
    solves: dict[int, dict[str, Any]] = {}
    skipped, failed = Counter[str](), Counter[str]()
    most = {"tensor": 0, "blocks": 0, "gram": 0, "copy": 0}
    for shard in shards:
        for tensor in shard.tensors:
            _add(dtypes, tensor.label, tensors=1, nbytes=tensor.stored_nbytes)
            for item in wanted.plan(tensor):
                if not isinstance(item, MatrixRef):
                    (skipped if item.status == "skipped" else failed)[item.reason] += 1
                    continue
                kept = wanted.recall.unread(item, shard) is not None
                _add(block_types, item.block_type, matrices=1, params=item.numel, kept=int(kept))
                if kept:
                    continue
                memory = _memory(item, options)
                most = max(most, memory, key=lambda stages: sum(stages.values()))
                n = min(item.M, item.N)
                solve = solves.setdefault(n, {"n": n, "matrices": 0, "gflop": 0.0})
                solve["matrices"] += 1
                # Gram n²·max(M, N), tridiagonal form and its eigenvalues 4/3·n³, for each slice of a convolution.
                solve["gflop"] += item.slices * n * n * (max(item.M, item.N) + 4 / 3 * n) / 1e9
    needed = {shard.ref.name: wanted.needed(shard) for shard in shards}
    return Inspection(
        model_id=opened.model_id,
        revision=opened.revision,
        commit=checkpoint.source.commit,
        location=checkpoint.source.location,
        adapter=_adapter(opened),
        shards=len(shards),
        nbytes=sum(shard.nbytes for shard in shards),
        cached=sum(shard.nbytes for shard in shards if shard.ref.name in local),
        needed=sum(needed.values()),
        fetch=sum(
            (checkpoint.source.cost(shard.ref.name) or 0) if wanted.better_whole(shard) else needed[shard.ref.name]
            for shard in shards
            if shard.ref.name not in local
        ),
        dtypes=dtypes,
        block_types=block_types,
        skipped=dict(skipped.most_common()),
        failed=dict(failed.most_common()),
        memory=most,
        solves=[{**solve, "gflop": round(solve["gflop"], 3)} for _, solve in sorted(solves.items(), reverse=True)],
        notes=[*opened.notes, *checkpoint.notes],
    )


def _memory(item: MatrixRef, options: ScanOptions) -> dict[str, int]:
    """What one solve on a CPU takes in its stages; they add up to what the engine reckons with."""
    work = spectra.work_bytes(item.M, item.N, solver=options.solver, precision=options.precision)
    width = 4 if options.precision == "float32" else 8
    square = min(item.M, item.N) ** 2 * width
    gram = 0 if options.solver == "svd" else square
    return {"tensor": item.tensor.nbytes, "blocks": work - 2 * gram, "gram": gram, "copy": gram}


def _add(table: dict[str, dict[str, int]], key: str, **counts: int) -> None:
    row = table.setdefault(key, dict.fromkeys(counts, 0))
    for name, count in counts.items():
        row[name] += count
