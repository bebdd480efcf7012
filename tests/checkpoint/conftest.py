"""A folder as a source, and writers of safetensors files, good and bad."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardesd.errors import NotFound
from shardesd.records import ShardRef


class FolderSource:
    """The smallest source: a folder whose files are all local, but for those in `remote`."""

    revision = None
    partial = False
    file: str | None = None

    def __init__(self, folder: Path, *, remote: tuple[str, ...] = (), commit: str | None = None) -> None:
        self.model_id = folder.name
        self.commit = commit
        self.location = f"hf://{folder.name}" if remote else str(folder)
        self._folder = folder
        self._remote = remote

    def files(self) -> tuple[ShardRef, ...]:
        names = sorted(path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())
        return tuple(ShardRef(name=name, size=(self._folder / name).stat().st_size) for name in names)

    def local(self, name: str) -> Path | None:
        path = self._folder / name
        return path if name not in self._remote and path.is_file() else None

    def path(self, name: str, progress: Callable[[int, int | None], None] | None = None) -> Path:
        if not (self._folder / name).is_file():
            raise NotFound(name)
        return self._folder / name


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., FolderSource]:
    """Makes a source of `tmp_path`, after writing `files`: name → a dict (safetensors or JSON) or bytes."""

    def make(files: Mapping[str, Any], **options: Any) -> FolderSource:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif name.endswith(".safetensors"):
                save_file({key: np.full((2, 3), value, np.float32) for key, value in content.items()}, path)
            else:
                path.write_text(json.dumps(content))
        return FolderSource(tmp_path, **options)

    return make


@pytest.fixture
def shard_bytes() -> Callable[[Any, int], bytes]:
    """A file with any header (a JSON value or raw bytes) and `nbytes` of data."""

    def make(header: Any, nbytes: int = 0) -> bytes:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(raw)) + raw + bytes(nbytes)

    return make
