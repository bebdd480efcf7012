"""Which base an adapter was made for, and the adapters that lie between it and a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardesd.adapters.load import Adapter, is_adapter, load_adapter
from shardesd.errors import AdapterError, MalformedAdapter, NotFound, OptionError

if TYPE_CHECKING:
    from shardesd.source import Source

Opener = Callable[[str, "str | None"], "Source"]
"""(repo, revision) → source; `source.open_source` with its keyword made positional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseReference:
    """The base that an adapter's own files name."""

    repo: str
    revision: str | None
    told_by: str
    """``adapter_config.json`` or ``README.md``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model, and the adapters to merge into it, in order."""

    base: Source
    adapters: tuple[Adapter, ...]
    told_by: str
    """Who named the base: ``--base``, ``adapter_config.json`` or ``README.md``."""


def base_reference(adapter: Adapter) -> BaseReference:
    """The base that the config names, else the model card's `base_model`; paths may be relative to the adapter.

    Raises `MalformedAdapter` where neither names one.
    """
    config = adapter.config
    if config.base_model:
        local = _local(config.base_model, adapter)
        if local is not None:
            return BaseReference(repo=local, revision=None, told_by="adapter_config.json")
        if not _is_path(config.base_model):
            return BaseReference(repo=config.base_model, revision=config.revision, told_by="adapter_config.json")
    if card := _from_card(adapter):
        return BaseReference(repo=_local(card, adapter) or card, revision=None, told_by="README.md")
    if config.base_model:
        raise MalformedAdapter(
            f"{adapter.name}: its base '{config.base_model}' is a path that isn't here, and no model card names "
            "another; give it with --base"
        )
    raise MalformedAdapter(
        f"{adapter.name}: neither adapter_config.json nor README.md names a base; give it with --base"
    )


def resolve_chain(
    sources: Sequence[Source],
    open_: Opener,
    *,
    base: Source | None = None,
    lora_alpha: float | None = None,
    allow_residual_base: bool = False,
) -> Chain:
    """The model that `sources`, adapters to be merged in this order, go into.

    `base` is the user's choice; without it the first adapter's files say. A base that is itself an adapter is followed
    to its own base and merged first; a cycle is an `AdapterError`, as are adapters that can't be loaded. `open_` may
    raise `SourceError` (gated, missing, offline).
    """

    def load(source: Source) -> Adapter:
        return load_adapter(source, lora_alpha=lora_alpha, allow_residual_base=allow_residual_base)

    adapters = [load(source) for source in sources]
    told_by = "--base"
    seen = [source.location for source in sources]
    while base is None or is_adapter(file.name for file in base.files()):
        if base is not None:
            if base.location in seen:
                raise AdapterError(f"{base.model_id} is its own base, by way of {' → '.join(a.name for a in adapters)}")
            seen.append(base.location)
            adapters.insert(0, load(base))
        reference = base_reference(adapters[0])
        told_by = reference.told_by if base is None else told_by
        try:
            base = open_(reference.repo, reference.revision)
        except (NotFound, OptionError) as error:  # the option is a revision that no branch can have
            raise NotFound(
                f"{adapters[0].name}: its base '{reference.repo}' (from {reference.told_by}) can't be found: {error}; "
                "give it with --base"
            ) from error
    return Chain(base=base, adapters=tuple(adapters), told_by=told_by)


def _local(text: str, adapter: Adapter) -> str | None:
    # os.path.exists answers where Path.exists raises: a text of thousands of characters is no path either.
    try:
        path = os.path.expanduser(text)
    except ValueError:  # a user's name with a NUL in it
        return None
    if not os.path.isabs(path) and adapter.path is not None and _is_path(text):
        beside = str(adapter.path.parent / path)
        if os.path.exists(beside):
            return beside
    return path if os.path.exists(path) else None


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "\\")) or text[1:2] == ":" or text.count("/") > 1 or text.endswith("/")


def _from_card(adapter: Adapter) -> str | None:
    if adapter.source is None:
        return None
    folder = adapter.file.rpartition("/")[0]
    for name in dict.fromkeys((f"{folder}/README.md".lstrip("/"), "README.md")):
        if name not in {file.name for file in adapter.source.files()}:
            continue
        from huggingface_hub import metadata_load
        from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]

        try:
            metadata = metadata_load(adapter.source.path(name)) or {}
        except (OSError, ValueError, YAMLError, RecursionError):
            continue  # a card that can't be read names nothing
        named = metadata.get("base_model")
        if isinstance(named, list):
            named = named[0] if len(named) == 1 else None
        if isinstance(named, str) and named:
            return named
    return None
