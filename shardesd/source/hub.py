"""A model on the Hugging Face Hub: one request for the listing, then files by commit, out of the cache where it can."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from shardesd.errors import NoSpace, NotFound, Offline, SourceError
from shardesd.records import ShardRef
from shardesd.source.address import HubAddress
from shardesd.source.bars import bars
from shardesd.source.base import Progress, belonging, checked_name, file_id
from shardesd.source.faults import cache_folder, endpoint, fault_of, source_error
from shardesd.source.local import LocalSource
from shardesd.source.patience import Meter, hushed, patiently
from shardesd.source.remote import Remote

_log = logging.getLogger(__name__)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BRANCH = "main"
_REQUEST_SECONDS = 15.0
_EVICT_AGAIN_SECONDS = (0.05, 0.2, 1.0)
_LOCK_SECONDS = 30.0


def open_hub(address: HubAddress) -> HubSource:
    """The source at a place on the Hub, its revision resolved to a commit.

    One request gives the commit and the listing. Where the network is switched off (``HF_HUB_OFFLINE``) or can't be
    reached, both come from the Hub cache. Raises `SourceError`'s kinds.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        cached = _from_cache(address)
        if cached is None:
            raise Offline(
                f"{_named(address)} is not in the Hub cache '{cache_folder()}' and HF_HUB_OFFLINE is set; "
                "unset it, or point HF_HOME at the cache that holds it"
            )
        return cached
    try:
        with hushed():
            info = patiently(
                lambda: HfApi().model_info(
                    # The branch is named, since some mirrors refuse a request without one.
                    address.repo_id,
                    revision=address.revision or _BRANCH,
                    files_metadata=True,
                    timeout=_REQUEST_SECONDS,
                )
            )
        commit = str(info.sha)
        files = [_ref(sibling) for sibling in info.siblings or ()]
    except Exception as error:
        fault = fault_of(error)
        if fault.kind == "connect" and (cached := _from_cache(address)) is not None:
            _log.warning("%s can't be reached; using commit %s of the Hub cache.", endpoint(), cached.commit)
            return cached
        raise source_error(fault, repo_id=address.repo_id, revision=address.revision) from error
    if not _COMMIT.fullmatch(commit):
        raise SourceError(f"{endpoint()} names no commit for {_named(address)}; check that HF_ENDPOINT is a Hub")
    return HubSource(address, commit, files)


class HubSource:
    """The files of one commit of a model on the Hub. Made by `open_hub`."""

    def __init__(self, address: HubAddress, commit: str, files: list[ShardRef], *, partial: bool = False) -> None:
        self._repo_id = address.repo_id
        self.revision = address.revision
        self.commit: str | None = commit
        self._commit = commit
        self.partial = partial
        names = {ref.name for ref in files}
        folder = address.path
        file: str | None = None
        if folder in names:
            folder, _, file = folder.rpartition("/")
        self.file = file
        self._prefix = f"{folder}/" if folder else ""
        here = {
            ref.name.removeprefix(self._prefix): ref
            for ref in sorted(files, key=lambda ref: ref.name)
            if ref.name.startswith(self._prefix)
        }
        if folder and not here and partial:
            raise self._not_cached(folder)
        if folder and not here:
            raise NotFound(f"'{address.repo_id}' has no file or folder '{folder}' at commit {commit}")
        kept = here.keys() if file is None else belonging(file, here)
        self._refs = {
            name: ShardRef(name=name, size=ref.size, sha256=ref.sha256) for name, ref in here.items() if name in kept
        }
        folder_id = "/".join(filter(None, (self._repo_id, folder)))
        self.model_id = folder_id if file is None else file_id(file, folder_id)
        self.location = f"hf://{self._repo_id}@{commit}" + (f"/{address.path}" if address.path else "")

    def files(self) -> tuple[ShardRef, ...]:
        """Every file of the place; only those that are cached where `partial`."""
        return tuple(self._refs.values())

    def local(self, name: str) -> Path | None:
        """The file in the Hub cache, or None."""
        from huggingface_hub import try_to_load_from_cache

        try:
            full = self._full(name)
        except SourceError:
            return None
        path = try_to_load_from_cache(self._repo_id, full, revision=self._commit)
        return Path(path) if isinstance(path, str) else None

    def path(self, name: str, progress: Progress | None = None) -> Path:
        """The file in the Hub cache, downloaded if need be.

        Raises `NotFound`, `AccessDenied`, `Offline`, `NoSpace`, or `SourceError` where the Hub keeps failing.
        """
        full = self._full(name)
        path = self.local(name)
        if path is None:
            if self.partial:
                raise self._not_cached(full)
            if name not in self._refs:
                raise NotFound(f"there is no file '{full}' in '{self._repo_id}' at commit {self._commit}")
            path = self._download(full, self._refs[name], progress)
        self._remember_revision()
        return path

    def remote(self, name: str) -> Remote | None:
        """The file on the Hub; None where the network is off or the listing has no such file."""
        from huggingface_hub import hf_hub_url

        ref = self._refs.get(name)
        if ref is None or self.partial:
            return None
        full = self._full(name)
        return Remote(
            hf_hub_url(self._repo_id, full, revision=self._commit),
            what=f"'{full}' of '{self._repo_id}'",
            size=ref.size,
            sha256=ref.sha256,
            explain=lambda fault: source_error(fault, repo_id=self._repo_id, revision=self.revision, file=full),
        )

    def cost(self, name: str) -> int | None:
        """Bytes that a download would add to the Hub cache: none where another commit has brought the same content."""
        ref = self._refs.get(name)
        if ref is None or self.local(name) is not None:
            return 0
        blobs = (_repo_folder(self._repo_id) / "blobs", Path(cache_folder()) / "blobs")
        return 0 if ref.sha256 and any((blob / ref.sha256).exists() for blob in blobs) else ref.size

    def free(self) -> int | None:
        """Bytes that are free on the Hub cache's disk."""
        return _free_bytes(_repo_folder(self._repo_id))

    def evict(self, name: str) -> None:
        """Remove a file from the Hub cache by the cache's own functions; its content stays where others refer to it.

        Raises `SourceError` where huggingface_hub can't do that (before 1.33), or the cache can't be written.
        """
        for wait in (*_EVICT_AGAIN_SECONDS, None):
            path = self.local(name)
            try:
                # One at a time: of two commits that share the content, each would leave it for the other's sake.
                with self._evicting(), hushed():
                    self._drop_broken_links()
                    held = scan_cache(self._repo_id)
                    if path is None:
                        return
                    held.delete_files(*_entries(held, self._repo_id, _real(path))).execute()
                if not path.exists():
                    return
                why = "could not be removed from the Hub cache"
            except OSError as error:
                why = f"can't be removed: {error.strerror or error}"
            # Another process that changes the cache at this moment makes huggingface_hub pass over a model.
            if wait is not None:
                time.sleep(wait)
        raise SourceError(f"'{path or name or cache_folder()}' {why}")

    def _evicting(self) -> FileLock:
        """A lock of the repository, among huggingface_hub's own."""
        folder = Path(cache_folder()) / ".locks" / _repo_folder(self._repo_id).name
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / "evicting.lock", timeout=_LOCK_SECONDS)

    def _drop_broken_links(self) -> None:
        """Removes the cache's own links to content that is gone, for which huggingface_hub passes over a model: one is
        left where content is removed at the moment at which another scan, to which it was new, links it."""
        repo = _repo_folder(self._repo_id)
        if (repo / "blobs").is_symlink():  # to a disk that may be away
            return
        for link in (repo / "snapshots").rglob("*"):
            with suppress(OSError):
                content = Path(os.path.abspath(link.parent / os.readlink(link)))
                if content.parent == Path(os.path.abspath(repo / "blobs")) and _is_gone(content):
                    link.unlink()
                    if not _is_gone(content):  # downloaded again at this very moment
                        link.symlink_to(os.path.relpath(content, link.parent))

    def remove_unfinished(self, name: str) -> None:
        """Remove what killed downloads of a file's content have left in the Hub cache."""
        ref = self._refs.get(name)
        if ref is None or not ref.sha256:
            return
        for left in (_repo_folder(self._repo_id) / "blobs").glob(f"{ref.sha256}*.incomplete"):
            with suppress(OSError):
                left.unlink()

    def _not_cached(self, full: str) -> Offline:
        return Offline(
            f"'{full}' of '{self._repo_id}' is not in the Hub cache '{cache_folder()}' and the network is off; "
            "scan again when it is on"
        )

    def _full(self, name: str) -> str:
        return self._prefix + str(checked_name(name, f"'{self._repo_id}'"))

    def _download(self, full: str, ref: ShardRef, progress: Progress | None) -> Path:
        from huggingface_hub import hf_hub_download

        self._check_space(full, ref)
        meter = Meter(ref.size, progress)
        meter.at(0)
        try:
            with hushed(), bars(meter) as options:
                path = Path(
                    patiently(lambda: hf_hub_download(self._repo_id, full, revision=self._commit, **options), meter)
                )
        except Exception as error:
            fault = fault_of(error)
            if fault.kind == "space":
                raise self._no_space(full, ref.size) from error
            raise source_error(fault, repo_id=self._repo_id, revision=self.revision, file=full) from error
        if meter.done != meter.total and progress is not None:
            with suppress(FileNotFoundError):  # another scan's --evict was quick: whoever opens it will see
                size = path.stat().st_size
                progress(size, size)
        return path

    def _check_space(self, full: str, ref: ShardRef) -> None:
        """Raise `NoSpace` before a download that can't fit. Another commit's copy of the same blob needs no room."""
        folder = _repo_folder(self._repo_id)
        if ref.size is None or (ref.sha256 and (folder / "blobs" / ref.sha256).exists()):
            return
        free = _free_bytes(folder)
        if free is not None and free < ref.size:
            raise self._no_space(full, ref.size)

    def _no_space(self, full: str, size: int | None) -> NoSpace:
        free = _free_bytes(_repo_folder(self._repo_id))
        return NoSpace(
            f"no space for '{full}' of '{self._repo_id}' in the Hub cache '{cache_folder()}': it needs {_sized(size)} "
            f"and {_sized(free)} is free; free some, or set HF_HOME to a folder on a larger disk"
        )

    def _remember_revision(self) -> None:
        """Note the commit in the cache's refs, as huggingface_hub does, so that the revision resolves offline."""
        revision = self.revision or _BRANCH
        folder = _repo_folder(self._repo_id)
        ref = folder / "refs" / revision
        if revision == self._commit or self.partial or not (folder / "snapshots" / self._commit).is_dir():
            return
        try:
            if ref.is_file() and ref.read_text() == self._commit:
                return
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{uuid.uuid4().hex[:8]}.tmp")
            fresh.write_text(self._commit)
            os.replace(fresh, ref)
        except OSError:
            return  # a cache that can only be read is used all the same


def scan_cache(repo_id: str) -> Any:
    """What huggingface_hub says that its cache holds; able to delete single files.

    Raises `SourceError` where it isn't.
    """
    from huggingface_hub import scan_cache_dir

    os.makedirs(cache_folder(), exist_ok=True)  # on a machine that has downloaded nothing yet
    held: Any = scan_cache_dir(cache_folder())
    if not hasattr(held, "delete_files"):
        raise SourceError(
            f"--evict of '{repo_id}' needs huggingface_hub 1.33 or newer; upgrade it, or use --fetch ranges"
        )
    return held


def _entries(held: Any, repo_id: str, place: Path) -> Iterator[Any]:
    """Of what `scan_cache` found, the file that lies at `place`."""
    for repo in held.repos:
        if repo.repo_type == "model" and repo.repo_id == repo_id:
            for revision in repo.revisions:
                yield from (file for file in revision.files if _real(file.file_path) == place)


def _from_cache(address: HubAddress) -> HubSource | None:
    """What the Hub cache holds of a place, or None where it doesn't know the revision."""
    folder = _repo_folder(address.repo_id)
    commit = address.revision or _BRANCH
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / commit).read_text().strip()
        except OSError:
            return None
    snapshot = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        return None
    return HubSource(address, commit, list(LocalSource(snapshot).files()), partial=True)


def _real(link: Path) -> Path:
    """Where a link of the cache lies, itself not followed: huggingface_hub's own paths follow those before it."""
    return link.parent.resolve() / link.name


def _is_gone(path: Path) -> bool:
    """Whether there is nothing, not even a link; not that it can't be told."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    return False


def _repo_folder(repo_id: str) -> Path:
    return Path(cache_folder()) / f"models--{repo_id.replace('/', '--')}"


def _free_bytes(folder: Path) -> int | None:
    """What is free where `folder` is or will be; None where that can't be told."""
    place = next((place for place in (folder, *folder.parents) if place.is_dir()), folder)
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _sized(count: int | None) -> str:
    return "an unknown size" if count is None else f"{count / 1e6:,.1f} MB"


def _ref(sibling: Any) -> ShardRef:
    return ShardRef(name=sibling.rfilename, size=sibling.size, sha256=sibling.lfs.sha256 if sibling.lfs else None)


def _named(address: HubAddress) -> str:
    return f"'{address.repo_id}'" + (f" (revision '{address.revision}')" if address.revision else "")
