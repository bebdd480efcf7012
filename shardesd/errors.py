"""Every error that shardesd raises on purpose.

```
ShardesdError                 the message is one line a user can act on
├── OptionError               an option's value is not one of its choices
├── SourceError               the bytes can't be had
│   ├── NotFound              no such folder, repo, revision or file
│   ├── AccessDenied          gated, private, or the token is missing or refused
│   ├── Offline               the network is off or down and nothing is cached
│   ├── NoSpace               the disk is full
│   └── NoRanges              a server sends whole files only
├── CheckpointError           the bytes are there and are not what they should be
│   ├── NoWeights             no safetensors in the place that was named
│   ├── MalformedHeader       a shard's header says what the format forbids
│   ├── MalformedIndex        the index is not JSON, or names what is not there
│   └── ShardChanged          a shard shrank or changed while it was read
├── AdapterError              an adapter can't be merged into this base
│   ├── UnsupportedAdapter    a type or an option that can't be merged from files
│   ├── MalformedAdapter      the config or the tensors are not what the format says
│   └── UnmatchedAdapter      an adapter tensor finds no base tensor, two, or one of another shape
├── MatrixError               one matrix can't be analysed; costs its own row only
├── ListError                 a list of models can't be read at all (what is wrong with one line costs that line only)
└── ResultsError              the output folder, or the cache, can't be written, or holds another run's work
    └── Held                  another process is writing the same model's results at this moment
```

`MatrixError` becomes a row with status ``failed``; all the others end the command with exit code 1.
"""

from __future__ import annotations

import re
from typing import TypeVar

_LONG_WORD = re.compile(r"\S{201,}")
_LONGEST = 1500

_E = TypeVar("_E", bound=Exception)


class ShardesdError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one line that names the value, the place and what to do.

    Names in it come out of files that nobody vouches for: control characters are escaped (a line break becomes
    ``\\n``), and of a word of over 200 characters, or a message of over 1,500, the middle is left out.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if not text.isprintable():
            text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
        text = _LONG_WORD.sub(lambda match: _shortened(match[0], 180), text)
        return text if len(text) <= _LONGEST else _shortened(text, _LONGEST)


def _shortened(text: str, length: int) -> str:
    return f"{text[: length * 2 // 3]}…{text[-(length // 3) :]}"


class OptionError(ShardesdError, ValueError):
    """An option's value is not one of its choices."""


class SourceError(ShardesdError):
    """The bytes of a checkpoint can't be had."""


class NotFound(SourceError):
    """No such folder, repo, revision or file."""


class AccessDenied(SourceError):
    """A gated or private repo, or a token that is missing or refused."""


class Offline(SourceError):
    """The network is off or down, and the cache doesn't hold what is needed."""


class NoSpace(SourceError):
    """The disk has no room for what must be written."""


class NoRanges(SourceError):
    """A server sends whole files only, where parts of one were asked for."""


class CheckpointError(ShardesdError):
    """The bytes of a checkpoint are not what they should be."""


class NoWeights(CheckpointError):
    """The place that was named holds no safetensors."""


class MalformedHeader(CheckpointError):
    """A safetensors header that breaks the format's rules, or a file too short for what its header promises."""


class MalformedIndex(CheckpointError):
    """An index that can't be read, or that names a shard or a tensor that isn't there."""


class ShardChanged(CheckpointError):
    """A shard shrank or was replaced while it was being read."""


class AdapterError(ShardesdError):
    """An adapter can't be merged into this base."""


class UnsupportedAdapter(AdapterError):
    """A type of adapter, or an option of one, that can't be merged from files."""


class MalformedAdapter(AdapterError):
    """An adapter's config or tensors are missing, or are not what the format says."""


class UnmatchedAdapter(AdapterError):
    """An adapter tensor finds no base tensor, more than one, or one of another shape."""


class MatrixError(ShardesdError):
    """One matrix can't be analysed. It costs its own row, never the run."""


class ListError(ShardesdError):
    """A list of models, or of commands, that can't be read, or that has no column for what it should list."""


class ResultsError(ShardesdError):
    """The output folder can't be written, or holds results that this run must not replace."""


class MadeOtherwise(ResultsError):
    """The output folder holds results of this model, finished or not, that were made with other options or weights."""


class Held(ResultsError):
    """Another process is writing the same results at this moment."""


def bare(error: _E) -> _E:
    """`error`, to be kept for a row, without the frames in which it was raised; one that ends the command keeps them.

    Frames hold all that was worked on there, a GPU's memory too, and where one of them holds the error in turn, only
    Python's collector of cycles would ever let go of it.
    """
    if isinstance(error, MatrixError) or not isinstance(error, ShardesdError):
        error.__traceback__ = error.__context__ = error.__cause__ = None
    return error
