"""Which files of a place make its checkpoint.

In this order: the shards that an index names; ``model.safetensors``; a complete numbered set
(``model-00001-of-00003.safetensors`` …); else every safetensors file of the top folder. A single file that was named
itself is the whole checkpoint. What is left out is said in a note.

Only where there is no safetensors: PyTorch's pickled files (an index, ``pytorch_model.bin``, a numbered set), if they
are allowed; a GGUF file, or a numbered set of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from shardesd.errors import MalformedIndex, NoWeights
from shardesd.records import ShardRef

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
"""What PyTorch's own files end in."""
PICKLED_INDEX_SUFFIX = ".bin.index.json"
GGUF = ".gguf"
_STEMS = ("model", "diffusion_pytorch_model")
"""The usual names of a model's weights, the preferred one first."""
_PICKLED_STEMS = ("pytorch_model", "diffusion_pytorch_model", "model")
_PICKLED = "{}: a pickled file is read with --allow-pickle only (allow_pickle=True in Python), tensors and nothing else"
_NUMBERED = re.compile(r"(?P<stem>.+?)[-_.](?P<number>\d+)-of-(?P<count>\d+)\.(?:safetensors|bin|gguf)")
_FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".tflite", ".pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files that make a checkpoint."""

    index: str | None
    """Name of the index, which then says what the shards are."""
    shards: tuple[ShardRef, ...]
    """In natural order; empty where there is an index."""
    why: str
    """What decided, for the notes on what is left out."""
    pickled: bool = False
    """Whether the shards are PyTorch's pickled files."""


def find_layout(
    files: Sequence[ShardRef], place: str, named: str | None = None, *, allow_pickle: bool = False
) -> Layout:
    """The layout of `files`; `place` is where they lie (a source's location), `named` the file that was named itself.

    Raises `NoWeights` (saying what is there instead, and that `allow_pickle` would read it) or `MalformedIndex` (a
    numbered set with gaps, several sets).
    """
    if named is not None and named.endswith((SUFFIX, GGUF, *PICKLED)):
        if named.endswith(PICKLED) and not allow_pickle:
            raise NoWeights(_PICKLED.format(place))
        shards = tuple(file for file in files if file.name == named)
        return Layout(index=None, shards=shards, why=f"{named} was named")
    top = {file.name: file for file in files if "/" not in file.name and not is_adapter(file.name)}
    indices = [name for name in top if name.endswith(INDEX_SUFFIX)]
    if indices:
        index = _prefer(indices, INDEX_SUFFIX, place, "indices")
        return Layout(index=index, shards=(), why=f"{index} names the shards")
    weights = {name: file for name, file in top.items() if name.endswith(SUFFIX)}
    for stem in _STEMS:
        single = weights.get(stem + SUFFIX)
        if single:
            return Layout(index=None, shards=(single,), why=f"{single.name} holds the model")
    chosen = _numbered_set(weights, place)
    why = f"{chosen[0]} and the others of its set are the model" if chosen else ""
    chosen = chosen or natural(weights)
    if not chosen:
        other = _pickled(top, place) or _gguf(top, place)
        if other is None:
            raise NoWeights(_instead(files, place))
        if other.pickled and not allow_pickle:
            raise NoWeights(_PICKLED.format(f"{place} holds no safetensors, only {other.why}"))
        return other
    return Layout(index=None, shards=tuple(weights[name] for name in chosen), why=why)


def _pickled(top: dict[str, ShardRef], place: str) -> Layout | None:
    indices = [name for name in top if name.endswith(PICKLED_INDEX_SUFFIX)]
    if indices:
        index = _prefer(indices, PICKLED_INDEX_SUFFIX, place, "indices")
        return Layout(index=index, shards=(), why=index.removesuffix(".index.json"), pickled=True)
    # Other .bin files may be anything (training_args.bin): they must be named.
    chosen = [f"{stem}.bin" for stem in _PICKLED_STEMS if f"{stem}.bin" in top][:1]
    chosen = chosen or _numbered_set((name for name in top if name.endswith(".bin")), place)
    shards = tuple(top[name] for name in chosen)
    return Layout(index=None, shards=shards, why=chosen[0], pickled=True) if chosen else None


def _gguf(top: dict[str, ShardRef], place: str) -> Layout | None:
    names = natural(name for name in top if name.endswith(GGUF))
    chosen = _numbered_set(names, place) or names
    if len(chosen) > 1 and not _NUMBERED.fullmatch(chosen[0]):
        raise NoWeights(f"{place} holds several GGUF files, {_some(chosen)}: name one")
    return Layout(index=None, shards=tuple(top[name] for name in chosen), why=chosen[0]) if chosen else None


def left_out(files: Iterable[ShardRef], layout: Layout, shards: Iterable[ShardRef]) -> list[str]:
    """A note for every kind of safetensors file that is no part of the checkpoint."""
    used = {shard.name for shard in shards}
    rest = natural(file.name for file in files if file.name.endswith(SUFFIX) and file.name not in used)
    adapters = [name for name in rest if is_adapter(name)]
    inner = [name for name in rest if "/" in name and name not in adapters]
    others = [name for name in rest if name not in adapters and name not in inner]
    notes = [(adapters, "an adapter, not a model's weights"), (inner, "in a subfolder"), (others, layout.why)]
    return [f"ignored {_some(names)}: {why}" for names, why in notes if names]


def adapter_file(files: Iterable[ShardRef]) -> ShardRef | None:
    """The adapter's weights in the top folder, if there are any."""
    return next((file for file in files if file.name == "adapter_model.safetensors"), None)


def is_adapter(name: str) -> bool:
    """Whether a file is an adapter's by its name (PEFT's ``adapter_model.safetensors``, or a shard of one)."""
    return PurePosixPath(name).name.startswith("adapter_model")


def natural(names: Iterable[str]) -> list[str]:
    """Sorted with numbers by value: 2 before 10."""
    return sorted(
        names,
        key=lambda name: [
            (part.isdigit(), int(part) if part.isdigit() else part, part) for part in re.split(r"([0-9]+)", name)
        ],
    )


def _prefer(names: list[str], suffix: str, place: str, what: str) -> str:
    if len(names) == 1:
        return names[0]
    for stem in (*_STEMS, *_PICKLED_STEMS):
        if stem + suffix in names:
            return stem + suffix
    raise MalformedIndex(
        f"{place} holds several {what}: {_some(natural(names))}: name one file, or move the others away"
    )


def _numbered_set(weights: Iterable[str], place: str) -> list[str]:
    """The files of the numbered set, in order; [] where there is none."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in weights:
        match = _NUMBERED.fullmatch(name)
        if match:
            sets.setdefault((match["stem"], match["count"]), {})[int(match["number"])] = name
    if not sets:
        return []
    usual = [[key for key in sets if key[0] == stem] for stem in _STEMS]
    candidates = next((keys for keys in usual if keys), list(sets))
    if len(candidates) > 1:
        firsts = [sets[key][min(sets[key])] for key in candidates]
        raise MalformedIndex(
            f"{place} holds several numbered sets ({_some(natural(firsts))}) and no index: move all but one away"
        )
    members = sets[candidates[0]]
    count = int(candidates[0][1])
    first = 0 if 0 in members else 1
    missing = [number for number in range(first, first + min(count, 10**5)) if number not in members]
    if missing or not count:
        pattern = members[min(members)]
        numbers = _some([str(number) for number in missing])
        raise MalformedIndex(f"{place}: the set of {pattern} lacks {len(missing)} of {count} files: number {numbers}")
    return [members[number] for number in range(first, first + count)]


def _instead(files: Sequence[ShardRef], place: str) -> str:
    names = natural(file.name for file in files)
    if any(is_adapter(name) and name.endswith(SUFFIX) and "/" not in name for name in names):
        return f"{place} holds an adapter and no base model"
    folders = natural({name.rpartition("/")[0] for name in names if name.endswith(SUFFIX) and "/" in name})
    if folders:
        return (
            f"{place} holds safetensors in subfolders only; name one: {_some([f'{place}/{name}' for name in folders])}"
        )
    foreign = [name for name in names if name.endswith(_FOREIGN)]
    if foreign:
        return f"{place} holds no safetensors, only {_some(foreign)}: convert the weights to safetensors first"
    return f"{place} holds no safetensors" + (f", only {_some(names)}" if names else ": it is empty")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
