"""What was named → the checkpoint that is scanned: a model, an adapter over its base, or a difference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from shardesd import matrices
from shardesd.adapters import MergedCheckpoint, is_adapter, looks_like_adapter, open_peft, resolve_chain
from shardesd.adapters.values import LARGEST
from shardesd.checkpoint import Checkpoint, MinusCheckpoint, Shard, open_checkpoint, open_live, open_local, open_shard
from shardesd.errors import NoRanges, OptionError
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, ShardRef, TensorRef
from shardesd.source import Source, open_source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class What:
    """What is scanned, as it was named."""

    model: str | os.PathLike[str] | torch.nn.Module | Mapping[str, torch.Tensor] | None = None
    """A model or an adapter; None where `base` and `adapters` say it."""
    revision: str | None = None
    base: str | os.PathLike[str] | None = None
    """The base of the adapter, in place of what its config names."""
    adapters: tuple[str | os.PathLike[str], ...] = ()
    """Adapters to be merged into the model, in this order."""
    minus: str | os.PathLike[str] | None = None
    """A checkpoint that is subtracted."""
    lora_alpha: float | None = None
    """α of LoRA weights without a config."""
    allow_residual_base: bool = False
    """Merge adapters whose initialisation changed the base: the base given is the changed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint, and what its rows say of where it comes from."""

    checkpoint: Checkpoint
    model_id: str
    revision: str | None = None
    is_adapter: bool = False
    source_model: str | None = None
    notes: tuple[str, ...] = field(default=())


def open_what(what: What, options: ScanOptions) -> Opened:
    """Raises `SourceError`, `CheckpointError`, `AdapterError` or `OptionError`, before any weight is read."""
    if not isinstance(what.revision, str | None):
        raise OptionError(f"revision={what.revision!r} is invalid (expected a branch, a tag or a commit)")
    alpha = what.lora_alpha
    if alpha is not None and (not isinstance(alpha, Real) or isinstance(alpha, bool) or not abs(alpha) < LARGEST):
        raise OptionError(f"lora_alpha={alpha!r} is invalid (expected a number below {LARGEST:.0e})")
    if not (what.model is None or isinstance(what.model, (str, os.PathLike))):
        return _live(what, what.model, options)
    if what.minus is not None:
        return _difference(what, options)
    if what.model is None:
        if what.base is None or not what.adapters:
            raise OptionError("name a model, or a base and its adapters (--base B --adapter A)")
        base, sources = open_source(what.base, revision=what.revision), [open_source(a) for a in what.adapters]
        return _merged(what, options, sources, base, "+".join(source.model_id for source in sources), None)
    source = open_source(what.model, revision=what.revision)
    if what.adapters:
        if what.base is not None:
            raise OptionError("--adapter needs one base: name it as REPO or with --base, not both")
        sources = [open_source(adapter) for adapter in what.adapters]
        return _merged(what, options, sources, source, "+".join(one.model_id for one in sources), None)
    if _adapter(source):
        base_source = None if what.base is None else open_source(what.base)
        return _merged(what, options, [source], base_source, source.model_id, source.revision)
    if what.base is not None:
        raise OptionError(f"--base is for adapters, and {source.model_id} holds a model's own weights")
    _refuse_adapters_options(what, source.model_id, delta=options.delta)
    checkpoint = _stored(source, options)
    return Opened(checkpoint=checkpoint, model_id=source.model_id, revision=source.revision)


def _live(what: What, model: Any, options: ScanOptions) -> Opened:
    if what.revision is not None:
        raise OptionError("a revision can be given only for a repo on the Hub, not for a live model")
    if what.base is not None or what.minus is not None:
        raise OptionError("--base and --minus are for checkpoints, not for a live model")
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        merged = open_peft(model, round_to_base=options.round_to_base_dtype, only_delta=options.delta)
        name = merged.source.model_id
        return Opened(checkpoint=merged, model_id=name, is_adapter=True, source_model=name)
    checkpoint = open_live(model)
    if what.adapters:
        sources = [open_source(adapter) for adapter in what.adapters]
        return _over(what, options, checkpoint, sources, "+".join(source.model_id for source in sources), None)
    _refuse_adapters_options(what, checkpoint.source.model_id, delta=options.delta)
    return Opened(checkpoint=checkpoint, model_id=checkpoint.source.model_id)


def _difference(what: What, options: ScanOptions) -> Opened:
    if what.model is None or what.base is not None or what.adapters:
        raise OptionError("--minus goes with one full checkpoint: neither --base nor --adapter")
    assert what.minus is not None
    pair = [open_source(place) for place in (_named(what.model), what.minus)]
    if what.revision is not None:
        pair[0] = open_source(_named(what.model), revision=what.revision)
    one, other = (_complete(_stored(source, options)) for source in pair)
    _refuse_adapters_options(what, pair[0].model_id)
    context = matrices.Context(
        config=one.config, names=one.names, options=options, hints=one.hints, table=matrices.user_table(options.layout)
    )

    def is_weight(tensor: TensorRef) -> bool:
        return any(isinstance(item, MatrixRef) for item in matrices.plan(tensor, context))

    return Opened(
        checkpoint=MinusCheckpoint(one, other, is_weight),
        model_id=f"{pair[0].model_id}-minus-{pair[1].model_id.rpartition('/')[2]}",
        revision=pair[0].revision,
        source_model=pair[1].model_id,
    )


def _merged(
    what: What,
    options: ScanOptions,
    sources: Sequence[Source],
    base: Source | None,
    model_id: str,
    revision: str | None,
) -> Opened:
    chain = resolve_chain(
        sources,
        lambda repo, at: open_source(repo, revision=at),
        base=base,
        lora_alpha=what.lora_alpha,
        allow_residual_base=what.allow_residual_base,
    )
    checkpoint = _complete(_stored(chain.base, options))
    return Opened(
        checkpoint=MergedCheckpoint(
            checkpoint, chain.adapters, round_to_base=options.round_to_base_dtype, only_delta=options.delta
        ),
        model_id=model_id,
        revision=revision,
        is_adapter=True,
        source_model=chain.base.model_id,
        notes=(f"base {chain.base.model_id}, named by {chain.told_by}",),
    )


def _over(
    what: What,
    options: ScanOptions,
    base: Checkpoint,
    sources: Sequence[Source],
    model_id: str,
    revision: str | None,
) -> Opened:
    from shardesd.adapters import load_adapter

    adapters = [
        load_adapter(source, lora_alpha=what.lora_alpha, allow_residual_base=what.allow_residual_base)
        for source in sources
    ]
    merged = MergedCheckpoint(base, adapters, round_to_base=options.round_to_base_dtype, only_delta=options.delta)
    return Opened(
        checkpoint=merged,
        model_id=model_id,
        revision=revision,
        is_adapter=True,
        source_model=base.source.model_id,
    )


def _adapter(source: Source) -> bool:
    """By its file names, or, for one file that was named itself, by the names of its tensors."""
    if source.file is None or not source.file.endswith(".safetensors"):
        return is_adapter(file.name for file in source.files())
    with open_shard(ShardRef(name=source.file), source.path(source.file)) as shard:
        return looks_like_adapter(tensor.name for tensor in shard.tensors)


def _stored(source: Source, options: ScanOptions) -> Checkpoint:
    return open_checkpoint(source, io=options.io, allow_pickle=options.allow_pickle)


def _complete(checkpoint: Any) -> Any:
    """With the headers of all shards known: adapters are matched before the first matrix is solved."""
    for shard in () if checkpoint.complete else checkpoint.shards:
        opened = open_local(checkpoint, shard) or _peeked(checkpoint, shard)
        (opened or checkpoint.open(shard, checkpoint.source.path(shard.name))).close()
    return checkpoint


def _peeked(checkpoint: Checkpoint, shard: ShardRef) -> Shard | None:
    """A shard by its header alone, where its server gives it so."""
    try:
        return checkpoint.peek(shard)
    except NoRanges:
        return None


def _refuse_adapters_options(what: What, model_id: str, *, delta: bool = False) -> None:
    """What only an adapter could make sense of: whoever asks for it takes the model for one."""
    asked = (
        ("--delta", delta),
        ("--lora-alpha", what.lora_alpha is not None),
        ("--allow-residual-base", what.allow_residual_base),
    )
    for name, given in asked:
        if given:
            raise OptionError(f"{name} is for adapters, and {model_id} holds a model's own weights")


def _named(model: Any) -> str | os.PathLike[str]:
    assert isinstance(model, (str, os.PathLike))
    return model
