"""Which of a GGUF file's tensors lie in another order than Hugging Face's, and how that is undone.

llama.cpp's converters permute the rows of some architectures' q and k matrices (within each head, for its rotary
embedding), and those of fused ones; they turn latent attention's keys over, head by head. That is undone: a spectrum
doesn't depend on the order of rows, but an adapter's delta, another checkpoint that is subtracted, and a split do.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardesd.checkpoint.quantised.encoding import strips

Rows = Callable[[int, int, np.ndarray], None]
"""Decodes the stored rows `start`…`stop` into an array of theirs."""

_CONV1D = re.compile(r"blk\.[0-9]+\.(?:attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
_ROTARY = re.compile(r"blk\.([0-9]{1,6})\.attn_([qk])\.weight")
_ROTATED = (
    *("llama", "deci", "arcee", "smollm3", "mistral3", "nanbeige", "granite", "granitemoe", "granitehybrid"),
    *("nemotron_h", "nemotron_h_moe"),
    *("minicpm", "internlm2", "baichuan", "xverse", "olmo", "bailingmoe", "llada"),
    *("deepseek", "arctic", "chameleon"),
)
"""Architectures whose converters permute q and k: ``undo_permute``, or a call of ``permute``, in llama.cpp's."""
_KERNEL = re.compile(r"blk\.[0-9]+\.(?:ssm_conv1d|shortconv\.conv)\.weight")
_LATENT = re.compile(r"blk\.[0-9]+\.attn_([kv])_b\.weight")
_TILED = re.compile(r"blk\.[0-9]+\.(attn_qkv|attn_gate|ssm_alpha|ssm_beta|ssm_out)\.weight")


@dataclass(frozen=True, slots=True)
class Order(ABC):
    """How the rows of a weight lie in the file."""

    @property
    def by_rows(self) -> bool:
        """See `Encoding.by_rows`."""
        return True

    def own(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape, of the stored one."""
        return shape

    @abstractmethod
    def decode(self, rows: Rows, shape: tuple[int, ...], start: int, stop: int, out: np.ndarray) -> None:
        """The weight's rows `start`…`stop` into `out`; `shape` is the stored one."""


@dataclass(frozen=True, slots=True)
class Transposed(Order):
    """Hugging Face keeps the transpose: GPT-2's Conv1D."""

    @property
    def by_rows(self) -> bool:
        return False

    def own(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def decode(self, rows: Rows, shape: tuple[int, ...], start: int, stop: int, out: np.ndarray) -> None:
        for first, last in strips(shape[0], 4 * shape[1]):
            values = np.empty((last - first, shape[1]), np.float32)
            rows(first, last, values)
            out[:, first:last] = values[:, start:stop].T


@dataclass(frozen=True, slots=True)
class Rotated(Order):
    """q or k, whose row t·half + j of each head of `size` lies at 2·j + t."""

    size: int

    def decode(self, rows: Rows, shape: tuple[int, ...], start: int, stop: int, out: np.ndarray) -> None:
        size = self.size
        whole = np.empty((size, shape[1]), np.float32)
        for head, first, last, at in _by_head(start, stop, size):
            rows(head * size, (head + 1) * size, whole)
            turn, pair = np.divmod(np.arange(first, last), size // 2)
            out[at] = whole[2 * pair + turn]


@dataclass(frozen=True, slots=True)
class TurnedHeads(Order):
    """Keys of latent attention: the transpose of each head, (heads, columns, rows), for all heads' rows one below the
    other."""

    def own(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        heads, columns, rows = shape
        return heads * rows, columns

    def decode(self, rows: Rows, shape: tuple[int, ...], start: int, stop: int, out: np.ndarray) -> None:
        _, columns, size = shape
        whole = np.empty((columns, size), np.float32)
        for head, first, last, at in _by_head(start, stop, size):
            rows(head * columns, (head + 1) * columns, whole)
            out[at] = whole[:, first:last].T


@dataclass(frozen=True, slots=True)
class _Moved(Order):
    """From row `first` on heads of `size` rows, each of which lies elsewhere."""

    size: int
    first: int

    @abstractmethod
    def stored(self, head: int) -> int:
        """Which of the stored heads it is."""

    def decode(self, rows: Rows, shape: tuple[int, ...], start: int, stop: int, out: np.ndarray) -> None:
        moved = max(start, min(stop, self.first))
        if start < moved:
            rows(start, moved, out[: moved - start])
        for head, first, last, at in _by_head(moved - self.first, stop - self.first, self.size):
            begin = self.first + self.stored(head) * self.size
            rows(begin + first, begin + last, out[moved - start :][at])


@dataclass(frozen=True, slots=True)
class Grouped(_Moved):
    """A fused qkv that lies as all q, all k, all v, and is wanted as groups of q heads, k head and v head."""

    per: int
    """Heads of q in a group."""
    groups: int

    def stored(self, head: int) -> int:
        group, i = divmod(head, self.per + 2)
        return group * self.per + i if i < self.per else (self.per + i - self.per) * self.groups + group


@dataclass(frozen=True, slots=True)
class Tiled(_Moved):
    """Value heads of linear attention: the first of each key head, then the second of each …"""

    per: int
    """Value heads of a key head."""
    groups: int

    def stored(self, head: int) -> int:
        group, i = divmod(head, self.per)
        return i * self.groups + group


@dataclass(frozen=True, slots=True)
class TiledColumns(Order):
    """As `Tiled`, of an output projection's inputs."""

    size: int
    per: int
    groups: int

    def decode(self, rows: Rows, shape: tuple[int, ...], start: int, stop: int, out: np.ndarray) -> None:
        rows(start, stop, out)
        tiles = out.reshape(len(out), self.per, self.groups, self.size)
        out[:] = tiles.swapaxes(1, 2).reshape(out.shape)


def _by_head(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int, slice]]:
    """Of rows `start`…`stop`, those of one head of `size` after the other: its number, from which to which of its own
    rows, and where they are, counted from `start`."""
    row = start
    while row < stop:
        head, first = divmod(row, size)
        end = min(stop, row - first + size)
        yield head, first, first + end - row, slice(row - start, end - start)
        row = end


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's, of what lies in the same order: a depthwise convolution's kernel has its one input channel, the
    values of latent attention's heads are one below the other."""
    if len(shape) == 2 and _KERNEL.fullmatch(name):
        return shape[0], 1, shape[1]
    if len(shape) == 3 and _LATENT.fullmatch(name):
        return shape[0] * shape[1], shape[2]
    return shape


def order_of(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Order | None:
    """None where the tensor lies as Hugging Face has it."""
    if len(shape) == 3 and (match := _LATENT.fullmatch(name)) and match[1] == "k":
        return TurnedHeads()
    if len(shape) != 2:
        return None
    if config.get("gguf_architecture") == "gpt2" and _CONV1D.fullmatch(name):
        return Transposed()
    return _rotated(name, shape, config) or _grouped(name, shape, config) or _tiled(name, shape, config)


def _rotated(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Order | None:
    match = _ROTARY.fullmatch(name)
    if not match or config.get("gguf_architecture") not in _ROTATED:
        return None
    heads = _heads(config, "num_attention_heads", int(match[1]))
    if match[2] == "k":
        heads = _heads(config, "num_key_value_heads", int(match[1]), heads)
    rows = shape[0] // heads if heads else config.get("head_dim", config.get("gguf_rotary", 0))
    return Rotated(rows) if rows and rows % 2 == 0 and shape[0] % rows == 0 else None


def _heads(config: Mapping[str, Any], word: str, block: int, otherwise: int = 0) -> int:
    """How many a block has."""
    each = config.get(f"gguf_{word}", ())
    found = each[block] if block < len(each) else config.get(word, otherwise)
    return found if type(found) is int and found > 0 else 0


def _grouped(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Order | None:
    architecture = config.get("gguf_architecture")
    if architecture not in ("gptneox", "bloom", "falcon") or not name.endswith(".attn_qkv.weight"):
        return None
    heads = config.get("num_attention_heads", 0)
    groups = config.get("num_key_value_heads", 1) if architecture == "falcon" else heads
    if not heads or heads % groups or shape[0] % (heads + 2 * groups):
        return None
    return Grouped(size=shape[0] // (heads + 2 * groups), first=0, per=heads // groups, groups=groups)


def _tiled(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Order | None:
    match = _TILED.fullmatch(name)
    if not match or config.get("gguf_architecture") not in ("qwen35", "qwen35moe"):
        return None
    groups, heads = config.get("linear_num_key_heads", 0), config.get("linear_num_value_heads", 0)
    if not groups or heads % groups:
        return None
    first = 2 * groups * config.get("linear_key_head_dim", 0) if match[1] == "attn_qkv" else 0
    size = 1 if match[1] in ("ssm_alpha", "ssm_beta") else config.get("linear_value_head_dim", 0)
    per = heads // groups
    if shape[match[1] == "ssm_out"] != first + heads * size:
        return None
    if match[1] == "ssm_out":
        return TiledColumns(size, per, groups)
    return Tiled(size=size, first=first, per=per, groups=groups)
