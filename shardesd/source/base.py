"""What a source is, and the rules on file names that all sources share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from shardesd.errors import SourceError
from shardesd.records import ShardRef

if TYPE_CHECKING:
    from shardesd.source.remote import Remote

Progress = Callable[[int, int | None], None]
"""Is told the bytes that are here and the bytes there will be (None where that is unknown)."""

INDEX_SUFFIX = ".index.json"
CONFIGS = ("config.json", "quantize_config.json")
"""Files that tell of a model, whichever of its files is named."""

# Stems that say nothing about which model a file holds, so that its folder names the model.
_GENERIC_STEM = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|consolidated)([.-].*)?|.*-\d+-of-\d+", re.IGNORECASE
)


class Source(Protocol):
    """The files of one checkpoint, wherever they lie."""

    model_id: str
    """``org/name`` on the Hub, a folder's name, or a file's stem (its folder's name where the stem is generic)."""
    revision: str | None
    """As the user asked for it; None is the default branch."""
    commit: str | None
    """40 hex digits, where it is known."""
    file: str | None
    """The file that REPO itself names (a shard, or an index); None where it names a folder or a whole repo."""
    location: str
    """Identity for resuming and provenance: a resolved path, or ``hf://org/name@<commit>[/subfolder]``."""
    partial: bool
    """True where `files` may lack files that exist: the Hub could not be asked, and the cache was listed instead."""

    def files(self) -> tuple[ShardRef, ...]:
        """Every file of the place, in the order of names, with size and digest where they are known."""
        ...

    def local(self, name: str) -> Path | None:
        """Where the file lies already, without any network; None where it doesn't, or may not be read."""
        ...

    def remote(self, name: str) -> Remote | None:
        """The file as it lies on its server, to be read by ranges; None where there is no server, or no such file."""
        ...

    def cost(self, name: str) -> int | None:
        """Bytes that `path` would add to the disk; None where that is not known."""
        ...

    def free(self) -> int | None:
        """Bytes that are free where `path` puts what it downloads; None where that is not known."""
        ...

    def evict(self, name: str) -> None:
        """Remove a downloaded file again, and its content where nothing else in the cache uses it.

        A file that isn't here is none to remove. Raises `SourceError` where nothing can be removed.
        """
        ...

    def remove_unfinished(self, name: str) -> None:
        """Remove what a download of the file that was killed has left of its content."""
        ...

    def path(self, name: str, progress: Progress | None = None) -> Path:
        """The file's path, downloading it if need be. Raises `SourceError`, also for a name that leads outside."""
        ...


def checked_name(name: str, place: str) -> PurePosixPath:
    """`name` as a path inside `place`. Raises `SourceError` where it is absolute or contains ``..``."""
    if (
        not name
        or name.startswith("/")
        or "\\" in name
        or "\0" in name
        or re.match(r"[A-Za-z]:", name)
        or ".." in name.split("/")
    ):
        raise SourceError(f"the file name {name!r} leads outside {place}; it is not read")
    return PurePosixPath(name)


def file_id(name: str, folder_id: str) -> str:
    """The model id of a file that was named itself: its stem, or its folder's id where the stem is generic."""
    stem = PurePosixPath(name.removesuffix(INDEX_SUFFIX)).name
    stem = stem.removesuffix(".safetensors") if name.endswith(INDEX_SUFFIX) else PurePosixPath(stem).stem
    return folder_id if not stem or _GENERIC_STEM.fullmatch(stem) else stem


def belonging(name: str, names: Iterable[str]) -> set[str]:
    """Which files of a folder count when its file `name` was named itself.

    An index stands for its folder, without other indexes; any other file for itself and the configs beside it.
    """
    if name.endswith(INDEX_SUFFIX):
        return {other for other in names if other == name or not other.endswith(INDEX_SUFFIX)}
    return {other for other in names if other in (name, *CONFIGS)}
