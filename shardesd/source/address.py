"""What REPO means: a local folder or file, or a model on the Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from shardesd.errors import NotFound, OptionError, SourceError
from shardesd.source.base import Source

_SCHEME = "hf://"
_REPO_ID = re.compile(r"(?:[A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]{1,96}")
_SPECIAL_REF = re.compile(r"refs/(?:pr|convert)/[^/]+")
_REVISION = re.compile(r"[^\s~^:?*\[\\\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """A place on the Hub."""

    repo_id: str
    revision: str | None
    path: str = ""
    """A folder of the repo, or one file; empty for all of it."""


def open_source(repo: str | os.PathLike[str], *, revision: str | None = None) -> Source:
    """The source that `repo` names.

    `repo` is a local folder, a local file (a shard, or an index), ``org/name``, ``org/name@revision``, or
    ``hf://[models/]org/name[@revision][/subfolder]``. What exists locally wins over a model of the same name.

    Raises `NotFound` where there is no such place, `OptionError` for a revision that contradicts `repo`, and the other
    kinds of `SourceError` where the Hub can't be asked or refuses.
    """
    if not isinstance(repo, (str, os.PathLike)):
        raise OptionError(
            f"{repo!r} is no place of weights (expected a local path, or a Hub model id such as org/name)"
        )
    text = os.fspath(repo)
    if not text:
        raise OptionError("REPO is empty (expected a local folder or file, or a Hub model id such as org/name)")
    hint = ""
    if not text.startswith(_SCHEME):
        try:
            path = Path(os.path.expanduser(text))
        except ValueError:  # a user's name with a NUL in it
            raise NotFound(f"no such file or folder: '{text}'") from None
        if os.path.lexists(path):
            from shardesd.source.local import open_local

            if revision is not None:
                raise OptionError(
                    f"revision '{revision}' can't be used with the local path '{text}' "
                    f"(leave it out, or write hf://{text} for the model on the Hub)"
                )
            return open_local(path)
        hint = "; write a Hub model as org/name or hf://org/name" if "://" in text else ""
        folder, at, inline = text.rpartition("@")
        if at and os.path.exists(os.path.expanduser(folder)):
            hint = f"; '{folder}' is here, but what is local has no revisions: leave '@{inline}' out"
        if not isinstance(repo, str) or looks_like_path(text):
            raise NotFound(f"no such file or folder: '{text}'{hint}")
    from shardesd.source.hub import open_hub

    try:
        return open_hub(parse_hub(text, revision))
    except SourceError as error:
        if not hint:
            raise
        raise type(error)(f"{error}{hint}") from error


def parse_hub(text: str, revision: str | None = None) -> HubAddress:
    """The place on the Hub that `text` names. Raises `NotFound` for a malformed id, `OptionError` for a revision."""
    inline: str | None = None
    path = ""
    if text.startswith(_SCHEME):
        body = text.removeprefix(_SCHEME).strip("/")
        kind, slash, rest = body.partition("/")
        if slash and kind in ("datasets", "spaces", "buckets", "kernels"):
            raise NotFound(f"'{text}' is not a model (expected hf://[models/]org/name[@revision][/subfolder])")
        if slash and kind == "models":
            body = rest
        repo_id, at, tail = body.partition("@")
        if at and repo_id.count("/") <= 1:
            special = _SPECIAL_REF.match(tail)
            inline = special[0] if special else tail.partition("/")[0]
            path = tail[len(inline) :].strip("/")
            inline = unquote(inline)
        else:  # an @ further on belongs to a file's name
            org, slash, tail = body.partition("/")
            name, _, path = tail.partition("/")
            repo_id = org + slash + name
    else:
        repo_id, at, tail = text.partition("@")
        inline = tail if at else None
    if not _REPO_ID.fullmatch(repo_id) or "--" in repo_id or ".." in repo_id or repo_id.startswith((".", "-")):
        raise NotFound(f"'{text}' is neither a local path nor a Hub model id (expected org/name or org/name@revision)")
    if inline is not None and revision is not None and inline != revision:
        raise OptionError(f"'{text}' names revision '{inline}' and --revision names '{revision}'; give one of them")
    chosen = inline if inline is not None else revision
    if chosen is not None and (not _REVISION.fullmatch(chosen) or ".." in chosen or chosen.startswith("/")):
        raise OptionError(f"revision {chosen!r} of '{repo_id}' is invalid (expected a branch, a tag or a commit)")
    return HubAddress(repo_id=repo_id, revision=chosen, path=path)


def looks_like_path(text: str) -> bool:
    """Whether a text that names nothing local was meant as a path all the same."""
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or "://" in text
        or re.match(r"[A-Za-z]:", text) is not None
        or text.partition("@")[0].count("/") > 1
        or text.endswith(("/", ".safetensors", ".json"))
    )
