"""The words that all rooms share: plain frozen records, with no behaviour beyond what their fields say.

Shapes in names: ``W_MN`` is rows × columns, ``eigs_K`` the kept eigenvalues. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from shardesd.frozen import record

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "skipped", "failed"]


@record(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """One file of a checkpoint."""

    name: str
    """Path inside the source, with forward slashes."""
    size: int | None = None
    """Bytes, where the source knows them before the file is there."""
    sha256: str | None = None
    """The content's digest, where the source knows it (the Hub does for LFS files)."""


class Encoding(Protocol):
    """How a quantised weight is stored, and so how it is decoded; made by the checkpoint room."""

    @property
    def label(self) -> str:
        """``fp8_e4m3[128x128]``, ``gptq4[g128]`` …"""
        ...

    @property
    def quantised(self) -> bool:
        """False for one that only lies in another order."""
        ...

    @property
    def parts(self) -> tuple[TensorRef, ...]:
        """The stored tensors that it is decoded from: codes, scales, zero points …"""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole decoded weight, which is float32."""
        ...


@record(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One tensor, known from headers alone: as stored, or as a quantised weight is once decoded."""

    name: str
    dtype: str
    """The format's own word: ``F32``, ``BF16``, ``F8_E4M3`` …"""
    shape: tuple[int, ...]
    shard: str
    """Name of the `ShardRef` that holds it."""
    start: int = 0
    """First byte, counted from the beginning of the file."""
    end: int = 0
    """One past the last byte."""
    encoding: Encoding | None = None
    """Of a quantised weight. `dtype`, `shape`, `start` and `end` are then those of its decoded elements."""
    problem: str = ""
    """Why its elements can't be had, of a weight that ought to be analysed; `dtype` and `shape` are its codes'."""

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def quantised(self) -> bool:
        """Whether it is a quantised weight, decoded or not."""
        return bool(self.problem) or (self.encoding is not None and self.encoding.quantised)

    @property
    def label(self) -> str:
        """The element type as a user should see it."""
        return self.dtype if self.encoding is None else self.encoding.label

    @property
    def stored_nbytes(self) -> int:
        """Bytes that are read for it; for a part of a quantised weight, its share of the whole."""
        if self.encoding is None:
            return self.nbytes
        return sum(part.nbytes for part in self.encoding.parts) * self.nbytes // max(1, 4 * prod(self.encoding.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def part(self, shape: tuple[int, ...], start: int, end: int) -> TensorRef:
        """The bytes `start`…`end` of the file, elements of this tensor, in a shape of their own."""
        return TensorRef(  # not `replace`, which takes four times as long: there are thousands of experts
            name=self.name,
            dtype=self.dtype,
            shape=shape,
            shard=self.shard,
            start=start,
            end=end,
            encoding=self.encoding,
            problem=self.problem,
        )

    def rows(self, start: int, stop: int) -> TensorRef:
        """Rows `start`…`stop`, counted along its first axis."""
        size = self.nbytes // self.shape[0] if self.shape[0] else 0
        return self.part((stop - start, *self.shape[1:]), self.start + start * size, self.start + stop * size)


@record(frozen=True, slots=True, kw_only=True)
class MatrixRef:
    """One matrix whose spectrum is computed: which tensor to read, and what to take of it.

    The tensor's elements, reshaped to `fold`, indexed by `pick` and reshaped to (M, N, slices) are the matrix
    (`slices` of them pooled into one ESD for a convolution). `fold = pick = None` is the tensor as it lies there.
    """

    longname: str
    tensor: TensorRef
    """For one expert of a stack: narrowed to that expert's bytes, with the expert's own shape."""
    M: int
    N: int
    block_type: str
    layer_index: int | None = None
    fold: tuple[int, ...] | None = None
    pick: tuple[int | slice, ...] | None = None
    slices: int = 1
    scale: float = 1.0
    """Every λ is multiplied by it (0.5 for a convolution, else 1)."""
    whole: bool = True
    """False where the tensor holds other matrices too (q, k, v; experts): then no bias is counted in `params`."""
    note: str = ""
    """Goes into the row's `reason`, for what a user should know of a matrix that was analysed all the same."""

    @property
    def numel(self) -> int:
        return self.M * self.N * self.slices


@record(frozen=True, slots=True, kw_only=True)
class Skip:
    """A tensor, or a part of one, that is left out, and why."""

    longname: str
    reason: str
    """From a small vocabulary, so that skips can be counted: see `matrices.eligible`."""
    tensor: TensorRef
    block_type: str = "other"
    layer_index: int | None = None
    status: Literal["skipped", "failed"] = "skipped"
    """``failed`` for a weight that ought to be analysed and can't be (an element type that is not supported)."""


class Matrix(Protocol):
    """The elements of one matrix, wherever they lie. What `spectra` is given."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def block(self, axis: Literal[0, 1], start: int, stop: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Rows (axis 0) or columns (axis 1) `start`…`stop` as a fresh, contiguous array of float32 or float64."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element."""
        ...

    def begin(self, start: int, stop: int, buffer: np.ndarray) -> Callable[[], torch.Tensor]:
        """Begins to read rows `start`…`stop`; what it returns waits for them, and is to be called, once, in any case.

        They come as stored (float64, float32, float16, bfloat16), valid until `buffer` is used again: flat uint8, which
        may be read into, and is left alone where the elements are in memory already.
        """
        ...

    @property
    def is_stretch(self) -> bool:
        """Whether it is bytes of an open file, nothing done to them: it can be read for as long as the file is open."""
        ...

    def precedes(self, other: Matrix) -> bool:
        """Whether both are stretches, and `other` lies right behind this one in the same file."""
        ...

    def through(self, last: Matrix) -> Matrix:
        """All elements from this one's first to the last one's, as one column."""
        ...


Routine = Literal["two_stage", "cusolver_batched", "eigvalsh", "svd"]
"""What computed λ: the batched two-stage solver, cuSOLVER's batched one, `torch.linalg.eigvalsh`, or an SVD."""


@record(frozen=True, slots=True, kw_only=True, eq=False)
class Spectrum:
    """The λ of one matrix, and how they were obtained."""

    eigs: np.ndarray
    """Squared singular values, ascending, float64, no 1/N, nothing filtered."""
    solver: Literal["gram", "svd"]
    precision: Literal["float32", "float64"]
    device: str
    seconds: float
    routine: Routine | None = None
    """None for kept λ."""
    recomputed: bool = False
    """The result of a batched solver failed its check, and `routine` took its place."""


@record(frozen=True, slots=True, kw_only=True)
class Fit:
    """A power law on the tail of a spectrum. Formulas: `metrics.powerlaw`."""

    alpha: float
    D: float
    fit_xmin: float | None
    fit_xmax: float | None
    n_tail: int | None
    sigma: float | None
    fit_status: str


@record(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a model's table; the fields, in this order, are its columns."""

    model_id: str
    revision: str | None = None
    is_adapter: bool = False
    source_model: str | None = None
    longname: str
    layer_index: int | None = None
    block_type: str = "other"
    dtype: str = ""
    M: int = 0
    N: int = 0
    num_evals: int = 0
    alpha: float | None = None
    D: float | None = None
    fit_xmin: float | None = None
    fit_xmax: float | None = None
    n_tail: int | None = None
    sigma: float | None = None
    fit_status: str | None = None
    alpha_weighted: float | None = None
    log_alpha_norm: float | None = None
    norm: float | None = None
    log_norm: float | None = None
    spectral_norm: float | None = None
    log_spectral_norm: float | None = None
    stable_rank: float | None = None
    matrix_rank: int | None = None
    entropy: float | None = None
    xmin: float | None = None
    xmax: float | None = None
    params: int = 0
    solver: str | None = None
    precision: str | None = None
    device: str | None = None
    seconds: float | None = None
    status: Status = "ok"
    reason: str = ""
    quantised: bool = False
    """The weight was decoded from a quantised one (or could not be): what quantisation did to it is in the numbers."""


@record(frozen=True, slots=True, kw_only=True)
class StatsRow:
    """One tensor in the table of ``--stats``; the fields, in this order, are its columns (docs/stats.md)."""

    model_id: str
    revision: str | None = None
    tensor: str
    """Its name as stored."""
    layer_index: int | None = None
    block_type: str = "other"
    dtype: str = ""
    shape: str = ""
    numel: int = 0
    mean: float | None = None
    std: float | None = None
    var: float | None = None
    min: float | None = None
    max: float | None = None
    sparsity: float | None = None
    matrices: int | None = None
    """How many were analysed; None, as all that follows, where a part of the tensor was not."""
    design_rank: int | None = None
    actual_rank: int | None = None
    rank_ratio: float | None = None
    svd_90_percent_rank: int | None = None
    svd_90_percent_ratio: float | None = None


ROW_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Row))

NEEDS, NO_MEMORY, NO_ANSWER, NO_DEVICE = "needs ", "no memory: ", "no answer in time: ", "device lost: "
"""How the reason of a failure begins that lies in the machine, or in the options that say how much of it may be
used, and not in the matrix."""


def is_done(item: MatrixRef | Skip, done: Mapping[str, str | None]) -> bool:
    """Whether there is a row of it among `done` (longname → tensor, or None where that isn't known).

    Another tensor's row may be called so: names can meet that are not all known from the beginning.
    """
    return item.longname in done and is_of(done[item.longname], item.tensor.name)


def is_of(noted: str | None, tensor: str | None) -> bool:
    """Whether a row is of `tensor` (None: no tensor is called as the row is), as far as is `noted` (None: nothing)."""
    return tensor is not None and noted in (None, tensor)


def may_pass(row: Row) -> bool:
    """Whether a failed row is worth another try: its reason is one that may be gone the next time."""
    return row.status == "failed" and row.reason.startswith((NEEDS, NO_MEMORY, NO_ANSWER, NO_DEVICE))
