"""One model of a list: what it is called, where it is, and the names of its results."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardesd.errors import OptionError, SourceError
from shardesd.results import file_stem
from shardesd.source import file_id, looks_like_path, open_source, parse_hub

ADAPTER_RELATIONS = frozenset({"adapter", "lora", "peft", "qlora", "dora", "adalora", "loha", "lokr", "ia3", "oft"})
"""What `base_model_relation` may say of a model that is to be merged into its `source_model`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRow:
    """One model of a list."""

    model: str
    """As `scan` takes it: a path, an id on the Hub, or ``hf://…``; without a revision."""
    model_id: str
    """As its results will call it."""
    revision: str | None = None
    source_model: str | None = None
    relation: str | None = None
    """In lower case."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """The cells of the columns that mean nothing to shardesd."""
    line: int = 0

    @property
    def key(self) -> tuple[str, str | None]:
        return self.model_id, self.revision

    @property
    def name(self) -> str:
        """``org/name``, or ``org/name@revision``."""
        return self.model_id if self.revision is None else f"{self.model_id}@{self.revision}"

    @property
    def stem(self) -> str:
        """The name of its files."""
        return file_stem(self.model_id, self.revision)

    @property
    def base(self) -> str | None:
        """The model that it is to be merged into, where the list says that it is an adapter, and of which."""
        return self.source_model if self.relation in ADAPTER_RELATIONS else None

    @property
    def family(self) -> str:
        """What models share that are worked on one after the other: their base's id, or their own."""
        return (self.base or self.model_id).partition("@")[0]

    @property
    def on_hub(self) -> bool:
        return self.model.startswith("hf://") or not (os.path.lexists(os.path.expanduser(self.model)) or _path(self))

    def cells(self) -> dict[str, str]:
        """The row by a list's columns."""
        cells = {
            "model_id": self.model,
            "revision": self.revision,
            "source_model": self.source_model,
            "base_model_relation": self.relation,
        }
        return {name: value for name, value in cells.items() if value} | dict(self.extra)


def identified(
    text: str,
    *,
    line: int = 0,
    revision: str | None = None,
    source_model: str | None = None,
    relation: str | None = None,
    extra: Mapping[str, str] | None = None,
    beside: Path | None = None,
) -> ListRow:
    """The row for what a list calls `text`. Relative paths may also be relative to the folder `beside`.

    What exists locally wins over a model of the same name, as for `scan`. Raises `NotFound` for a malformed id and
    `OptionError` for a revision that can't be.
    """
    model_id = ""
    model = _beside(text, beside)
    path = Path(os.path.expanduser(model))
    if not text.startswith("hf://") and (os.path.lexists(path) or looks_like_path(text)):
        if revision is not None:
            raise OptionError(f"revision '{revision}' can't be used with the local path '{text}'")
        real = Path(os.path.realpath(path))
        folder = _folder_id(real if real.is_dir() or not real.suffix else real.parent)
        model_id = folder if real.is_dir() or not real.suffix else file_id(path.name, folder)
    else:
        address = parse_hub(text, revision)
        revision = address.revision
        folder = "/".join(filter(None, (address.repo_id, address.path)))
        if address.path.endswith((".safetensors", ".json")):
            folder = "/".join(filter(None, (address.repo_id, address.path.rpartition("/")[0])))
            model_id = file_id(address.path.rpartition("/")[2], folder)
        else:
            model_id = folder
        if not text.startswith("hf://"):
            model = address.repo_id
    return ListRow(
        model=model,
        model_id=model_id,
        revision=revision,
        source_model=source_model and _beside(source_model, beside),
        relation=relation,
        extra=extra or {},
        line=line,
    )


def _beside(text: str, folder: Path | None) -> str:
    """A relative path that isn't here, by the list's own folder; any other text as it is."""
    path = Path(os.path.expanduser(text))
    meant = looks_like_path(text) and "://" not in text
    if folder is None or not meant or path.is_absolute() or os.path.lexists(path):
        return text
    # Absolute: without its leading dot a path that isn't there could be taken for a model on the Hub.
    return os.path.abspath(folder / path)


def _folder_id(folder: Path) -> str:
    """The id that a local source gives its folder: the repo's own inside a Hub cache, else the folder's name."""
    try:
        return open_source(folder).model_id
    except SourceError:
        return folder.name or str(folder)


def _path(row: ListRow) -> bool:
    return looks_like_path(row.model)
