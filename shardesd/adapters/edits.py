"""What an adapter does to one tensor, and how it is done: whole, by blocks of rows, or as ΔW alone.

An `Edit` is planned from headers; its factors are read when it is loaded, for this one tensor, and dropped after it.
Rows are those of the tensor as stored, along its first axis. All arithmetic is in the dtype of the array that is
edited: float32 for a merge, float64 for ΔW.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from shardesd.errors import AdapterError
from shardesd.records import TensorRef

Read = Callable[[TensorRef], np.ndarray]
"""The elements of one adapter tensor as float32 or float64."""
Round = Callable[[np.ndarray], np.ndarray]
Change = Callable[[np.ndarray, np.ndarray, int, int, "Round | None"], None]
"""(rows, the same rows before any adapter, start, stop, round) → None; `rows` are changed in place."""

_BLOCK = 1 << 20
"""Elements that a temporary of a merge by rows holds at most (or one row)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(ABC):
    """One adapter's change of one tensor."""

    adapter: str
    """Which adapter, as messages name it."""
    module: str
    read: Read = field(repr=False, compare=False)
    needs_base: ClassVar[bool] = False
    """Whether it looks at the base's own rows even where another adapter has changed them before."""
    additive: ClassVar[bool] = False
    """Whether ΔW is the same whatever W is."""

    @property
    def by_rows(self) -> bool:
        """Whether a block of rows can be merged without the others."""
        return True

    @property
    @abstractmethod
    def refs(self) -> tuple[TensorRef, ...]:
        """The adapter tensors it reads."""

    @abstractmethod
    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        """Read the factors; give what changes rows of a tensor of this shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned(Edit):
    """An edit of a linear layer (outputs × inputs) whose tensor is stored as inputs × outputs."""

    edit: Edit
    needs_base: ClassVar[bool] = True

    @property
    def by_rows(self) -> bool:
        """See `Edit.by_rows`."""
        return False

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """See `Edit.refs`."""
        return self.edit.refs

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        """See `Edit.load`."""
        change = self.edit.load(shape[::-1], dtype)

        def turned(rows: np.ndarray, before: np.ndarray, start: int, stop: int, round: Round | None) -> None:
            work = np.array(rows.T, order="C")
            change(work, np.array(before.T, order="C"), 0, len(work), round)
            rows[...] = work.T

        return turned


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """α/r, α/√r, or a number that is used as it stands."""

    rank: int = 1
    alpha: float | None = None
    alpha_ref: TensorRef | None = None
    """A scalar tensor that holds α (kohya)."""
    root: bool = False
    """α/√r (rank-stabilised LoRA)."""
    times: int = 1
    """How often the delta is added."""

    def value(self, read: Read) -> float:
        alpha = self.alpha
        if self.alpha_ref is not None:
            alpha = float(read(self.alpha_ref).reshape(-1)[0])
        if alpha is None:
            return float(self.times)
        return self.times * alpha / (math.sqrt(self.rank) if self.root else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank(Edit):
    """W += B·A in the stored orientation; with `magnitude`, DoRA: W' = m·(W+BA)/‖W+BA‖ (peft lora/dora.py)."""

    transposed: bool = False
    """The tensor is stored (in, out), as Conv1D and embeddings are, so it gets (B·A)ᵀ."""
    magnitude: TensorRef | None = None
    norm_axis: int = 0
    """The axis that keeps its entries apart in the norm: 0 for a norm per stored row."""
    additive: ClassVar[bool] = True

    @property
    def by_rows(self) -> bool:
        return self.magnitude is None or self.norm_axis == 0

    @property
    def rounds_delta(self) -> bool:
        """Whether peft casts the delta itself to the base's dtype before it adds it."""
        return True

    @abstractmethod
    def ab(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """A (r, in) and B (out, r), the scale included; with a leading axis of experts for a stack."""

    def factors(self, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(left, right) with ΔW = left @ right in the stored orientation."""
        A, B = self.ab(dtype)
        return (A.swapaxes(-1, -2), B.swapaxes(-1, -2)) if self.transposed else (B, A)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        left, right = self.factors(dtype)
        stacked = left.ndim == 3
        m = None if self.magnitude is None else self.read(self.magnitude).astype(dtype).reshape(-1)

        def delta(start: int, stop: int) -> np.ndarray:
            product: np.ndarray = np.matmul(left[start:stop], right[start:stop] if stacked else right)
            return np.reshape(product, (stop - start, *shape[1:]))

        def add(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            D = delta(start, stop)
            W += round_(D) if round_ and self.rounds_delta else D

        def dora(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            assert m is not None
            D = delta(start, stop)
            axes = tuple(axis for axis in range(W.ndim) if axis != self.norm_axis)
            norm = np.sqrt(np.square(base + D).sum(axis=axes, keepdims=True))
            factor = (m[start:stop] if self.norm_axis == 0 else m).reshape(norm.shape) / norm
            W += D
            W *= factor

        return add if m is None else dora


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace(Edit):
    """The adapter holds the whole tensor (modules_to_save, resized embeddings, trained biases)."""

    tensor: TensorRef

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.tensor,)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        new = self.read(self.tensor)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            W[...] = new[start:stop] if new.ndim else new

        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRows(Edit):
    """Trainable tokens: some rows of an embedding are replaced, not added to."""

    rows: tuple[int, ...]
    tensor: TensorRef

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.tensor,)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        new = self.read(self.tensor)
        rows = np.asarray(self.rows)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            here = (rows >= start) & (rows < stop)
            W[rows[here] - start] = new[here]

        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class AddVector(Edit):
    """`lora_bias`: bias += s·b."""

    tensor: TensorRef
    scale: Scale
    additive: ClassVar[bool] = True

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.tensor, *((self.scale.alpha_ref,) if self.scale.alpha_ref else ()))

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        b = self.read(self.tensor).astype(dtype) * dtype.type(self.scale.value(self.read))

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            W += b[start:stop]

        return change


class Merger:
    """The edits of one tensor with their factors in memory, ready to merge it whole or row by row."""

    def __init__(
        self,
        edits: Sequence[Edit],
        shape: tuple[int, ...],
        *,
        dtype: np.dtype[Any] | type[np.floating[Any]] = np.float32,
        round_to: str | None = None,
    ) -> None:
        """`round_to` is a dtype word (``BF16``, ``F16``): what each adapter leaves is rounded to it, as peft does."""
        self.shape = shape
        self.by_rows = all(edit.by_rows for edit in edits)
        """Whether `rows` takes less than all rows at once."""
        self._round = rounding(round_to)
        self._dtype = np.dtype(dtype)
        self._changes = [edit.load(shape, self._dtype) for edit in edits]
        self._replaces = [isinstance(edit, Replace) for edit in edits]
        later = next((at for at, replaces in enumerate(self._replaces) if not replaces), len(edits))
        self._keep = any(_needs_base(edit) for edit in edits[later + 1 :])

    def rows(self, W: np.ndarray, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Merge rows `start`…`stop` of the base tensor, given as `W`, in place where its dtype allows it."""
        stop = self.shape[0] if stop is None and self.shape else (stop or 0)
        if not self.by_rows and (start, stop) != (0, self.shape[0]):
            raise ValueError(f"this merge needs all {self.shape[0]} rows at once, not {start}…{stop}")
        W = np.asarray(W, dtype=self._dtype, order="C")
        base = W
        replacing = True
        for change, replaces in zip(self._changes, self._replaces, strict=True):
            if replacing and not replaces:
                replacing = False
                base = W.copy() if self._keep else W
            change(W, base, start, stop, self._round)
            if self._round is not None:
                W[...] = self._round(W)
        return W


def apply(edits: Sequence[Edit], W: np.ndarray, *, round_to: str | None = None) -> np.ndarray:
    """The merged tensor, float32, of the shape that the adapter leaves it in.

    `W` is the base tensor as numbers, of its stored shape; it is changed in place where it is float32 and keeps its
    shape. Raises `MatrixError` where a factor holds NaN or infinity.
    """
    shape = merged_shape(edits, W.shape)
    if shape != W.shape:
        W = np.empty(shape, dtype=np.float32)
    merger = Merger(edits, shape, round_to=round_to)
    W = np.asarray(W, dtype=np.float32, order="C")
    if not merger.by_rows or W.size <= _BLOCK or not W.ndim:
        return merger.rows(W, 0, shape[0] if shape else 0)
    step = max(1, _BLOCK // max(1, W[0].size))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        merger.rows(W[start:stop], start, stop)
    return W


def delta(edits: Sequence[Edit], W: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """ΔW, float64, of the merged shape. `W` (the base tensor) is needed unless every edit is `additive_only`."""
    if additive_only(edits):
        return Merger(edits, shape, dtype=np.float64).rows(np.zeros(shape))
    if W is None:
        raise AdapterError(f"ΔW of {edits[0].module} depends on the base tensor, which was not given")
    if merged_shape(edits, W.shape) != W.shape:
        raise AdapterError(
            f"{edits[0].adapter}: {edits[0].module} has another shape than the base's, so there is no ΔW"
        )
    before = W.astype(np.float64)
    return Merger(edits, shape, dtype=np.float64).rows(before.copy()) - before


def delta_factors(edits: Sequence[Edit], *, index: int | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    """(left, right), float64, with ΔW = left @ right for a 2-D tensor, or for slice `index` of a stack of matrices.

    The factors of several adapters stand side by side. None where ΔW is not a product of thin factors.
    """
    lefts, rights = [], []
    for edit in edits:
        if not isinstance(edit, LowRank) or edit.magnitude is not None:
            return None
        left, right = edit.factors(np.dtype(np.float64))
        if left.ndim == 3:
            if index is None:
                return None
            left, right = left[index], right[index]
        lefts.append(left)
        rights.append(right)
    return (np.concatenate(lefts, axis=1), np.concatenate(rights, axis=0)) if lefts else None


def additive_only(edits: Sequence[Edit]) -> bool:
    """Whether ΔW can be had without the base tensor."""
    return all(edit.additive and not _needs_base(edit) for edit in edits)


def merged_shape(edits: Sequence[Edit], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The tensor's shape after the edits: a replacement may bring another one."""
    for edit in edits:
        if isinstance(edit, Replace):
            shape = edit.tensor.shape
    return shape


def rounding(dtype: str | None) -> Round | None:
    """What rounds to the nearest number of a dtype word, ties to even; None where nothing is to be rounded."""
    if dtype == "F16":
        return lambda values: values.astype(np.float16).astype(values.dtype)
    return _to_bfloat16 if dtype == "BF16" else None


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.asarray(values, dtype=np.float32, order="C").view(np.uint32)
    rounded: np.ndarray = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    numbers: np.ndarray = rounded.view(np.float32)
    return numbers


def _needs_base(edit: Edit) -> bool:
    return edit.needs_base or (isinstance(edit, LowRank) and edit.magnitude is not None)
