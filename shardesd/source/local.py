"""Files that lie on this machine: a folder, one file, or a snapshot inside a Hub cache."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path

from shardesd.errors import NotFound, SourceError
from shardesd.records import ShardRef
from shardesd.source.base import CONFIGS, INDEX_SUFFIX, Progress, belonging, checked_name, file_id

# Diffusers and Mistral checkpoints keep weights one or two folders down; deeper, a walk of a home folder gets dear.
_DEPTH = 2
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def open_local(path: Path) -> LocalSource:
    """The source at an existing path. Raises `NotFound` for a link to nothing or a JSON file that is no index."""
    if path.is_dir():
        return LocalSource(path)
    if not path.is_file():
        target = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        raise NotFound(f"'{path}'{target} is neither a file nor a folder")
    if path.suffix == ".json" and not path.name.endswith(INDEX_SUFFIX):
        raise NotFound(f"'{path}' is no index (expected a name that ends in {INDEX_SUFFIX}); name the folder instead")
    return LocalSource(path.parent, file=path.name)


class LocalSource:
    """The files of a folder, or one file of it when `file` was named itself."""

    revision: str | None = None
    partial = False

    def __init__(self, folder: Path, *, file: str | None = None) -> None:
        self._folder = Path(os.path.realpath(folder))
        self.file = file
        self._snapshot = _snapshot_of(self._folder)
        if self._snapshot is None:
            self.commit: str | None = None
            folder_id = self._folder.name or str(self._folder)
        else:
            self.commit = self._snapshot.name
            inside = self._folder.relative_to(self._snapshot).parts
            repo_id = self._snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
            folder_id = "/".join((repo_id, *inside))
        self.model_id = folder_id if file is None else file_id(file, folder_id)
        self.location = str(self._folder if file is None else self._folder / file)

    def files(self) -> tuple[ShardRef, ...]:
        """Every file here and up to two folders down; hidden folders and links to folders are not entered."""
        return self._files

    @cached_property
    def _files(self) -> tuple[ShardRef, ...]:
        if self.file is not None and not self.file.endswith(INDEX_SUFFIX):
            names = [name for name in (self.file, *CONFIGS) if os.path.isfile(self._folder / name)]
            return tuple(self._ref(name) for name in sorted(set(names)))
        try:
            names = _walk(self._folder, _DEPTH)
        except OSError as error:
            raise SourceError(f"the folder '{self._folder}' can't be read: {error.strerror or error}") from error
        if self.file is not None:
            kept = belonging(self.file, names)
            names = [name for name in names if name in kept]
        return tuple(self._ref(name) for name in names)

    def local(self, name: str) -> Path | None:
        """The file's path where it is here and may be read."""
        try:
            return self.path(name)
        except SourceError:
            return None

    def remote(self, name: str) -> None:
        """There is no server."""

    def cost(self, name: str) -> int:
        """Nothing: the files are here."""
        return 0

    def free(self) -> None:
        """Of no interest: nothing is downloaded."""

    def evict(self, name: str) -> None:
        """Nothing was downloaded."""

    def remove_unfinished(self, name: str) -> None:
        """Nothing was downloaded."""

    def path(self, name: str, progress: Progress | None = None) -> Path:
        """The file's path; nothing is ever downloaded.

        Raises `NotFound` where there is no such file, and `SourceError` where the name, or a link, leads outside the
        folder. Links from a Hub cache's snapshot into that cache's blobs are the cache's own and are followed.
        """
        path = self._folder / checked_name(name, f"'{self._folder}'")
        real = Path(os.path.realpath(path))
        if name != self.file and not any(real.is_relative_to(root) for root in self._roots):
            raise SourceError(
                f"'{name}' in '{self._folder}' leads outside the folder, to '{real}'; scan the folder that holds the "
                "file itself, or name the file"
            )
        if not real.is_file():
            link = f" (a link to '{real}')" if path.is_symlink() else ""
            raise NotFound(f"no file '{name}'{link} in '{self._folder}'")
        return path

    @cached_property
    def _roots(self) -> tuple[Path, ...]:
        if self._snapshot is None:
            return (self._folder,)
        # The repo's own blobs, and the store that newer clients share between repos.
        repo = self._snapshot.parents[1]
        blobs = (repo / "blobs", repo.parent / "blobs")
        return (self._folder, *(Path(os.path.realpath(folder)) for folder in blobs))

    def _ref(self, name: str) -> ShardRef:
        path = self._folder / name
        try:
            size: int | None = path.stat().st_size
        except OSError:
            size = None
        sha256 = None
        if self._snapshot is not None and path.is_symlink():
            # A blob is named by its etag, which is the digest for files in LFS.
            blob = os.path.basename(os.readlink(path))
            sha256 = blob if _SHA256.fullmatch(blob) else None
        return ShardRef(name=name, size=size, sha256=sha256)


def _snapshot_of(folder: Path) -> Path | None:
    """The snapshot of a Hub cache (``models--org--name/snapshots/<commit>``) that `folder` is or lies in."""
    for place in (folder, *folder.parents):
        repo = place.parent.parent
        if _COMMIT.fullmatch(place.name) and place.parent.name == "snapshots" and repo.name.startswith("models--"):
            return place
    return None


def _walk(folder: Path, depth: int) -> list[str]:
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth and not entry.name.startswith("."):
                    folders.append(entry.name)
            elif not os.path.isdir(entry.path):
                files.append(entry.name)
    names = sorted(files)
    for name in sorted(folders):
        try:
            names += [f"{name}/{inner}" for inner in _walk(folder / name, depth - 1)]
        except OSError:
            continue  # a subfolder that can't be read is none of the checkpoint's
    return names
