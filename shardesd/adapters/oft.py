"""OFT and BOFT: the inputs of W are rotated by orthogonal matrices made from the saved ones.

OFT (peft oft/layer.py): W' = W·Rᵀ with R block-diagonal, each block the Cayley transform of a skew-symmetric matrix, or
the first terms of its Neumann series. BOFT (peft boft/layer.py): R is a product of such matrices, each with its inputs
permuted (butterfly), and every output is scaled besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardesd.adapters.edits import Change, Edit, Round
from shardesd.adapters.names import Group
from shardesd.adapters.target import Placed, Setting, columns
from shardesd.errors import MalformedAdapter, UnsupportedAdapter
from shardesd.records import TensorRef

_MOST_TERMS = 1000  # each is a product of matrices; peft's default is 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Oft(Edit):
    blocks: TensorRef
    """(blocks or 1, b(b−1)/2): the upper triangles of the skew-symmetric matrices."""
    embedding: bool
    neumann_terms: int
    """0 for the Cayley transform itself."""
    eps: float | None
    """Constrained OFT: how far the matrices may be from zero, in norm."""

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.blocks,)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        upper = self.read(self.blocks).astype(dtype, copy=False)
        size = block_size(upper.shape[1])
        skew = np.zeros((upper.shape[0], size, size), dtype=dtype)
        rows, cols = np.triu_indices(size, 1)
        skew[:, rows, cols] = upper
        skew -= skew.swapaxes(1, 2)
        if self.eps is not None:
            skew = _constrain(skew, self.eps)
        R = _cayley(skew) if self.neumann_terms == 0 else _neumann(skew, self.neumann_terms)
        # peft rotates an embedding by R and everything else by its transpose.
        turn = R if self.embedding else R.swapaxes(1, 2)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            X = W.reshape(stop - start, -1, size).swapaxes(0, 1)
            W[...] = np.matmul(X, turn).swapaxes(0, 1).reshape(W.shape)

        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class Boft(Edit):
    R: TensorRef
    """(butterfly factors, blocks, b, b)."""
    s: TensorRef

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.R, self.s)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        raw = self.read(self.R).astype(dtype, copy=False)
        factors, count, size, _ = raw.shape
        R = _cayley((raw - raw.swapaxes(-1, -2)).reshape(-1, size, size) / 2).reshape(raw.shape)
        orders = [_butterfly(count * size, count // 2**at, size // 2, factors - 1) for at in range(factors)]
        s = self.read(self.s).astype(dtype, copy=False).reshape(-1)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            X = W.reshape(stop - start, -1)
            # W·Mᵀ for M = P·blocks·Pᵀ, factor after factor: gather the columns, turn the blocks, put them back.
            for order, blocks in zip(orders, R, strict=True):
                inverse = np.argsort(order)
                Z = X[:, inverse].reshape(stop - start, count, size).swapaxes(0, 1)
                X = np.matmul(Z, blocks.swapaxes(1, 2)).swapaxes(0, 1).reshape(stop - start, -1)[:, order]
            W[...] = (X * s[start:stop, None]).reshape(W.shape)

        return change


def plan_oft(group: Group, setting: Setting) -> Placed:
    if "oft_r" in group.tensors:
        raise UnsupportedAdapter(
            f"{setting.where}: {group.tensors['oft_r'].name} is in the format of peft before 0.16, which peft itself "
            "no longer reads; convert it with the version that made it"
        )
    embedding = "oft_embedding_R" in group.tensors
    (blocks,) = setting.take(group, "oft_embedding_R" if embedding else "oft_R")
    size = block_size(blocks.shape[1]) if len(blocks.shape) == 2 else 0
    if size < 1 or 0 in blocks.shape:
        raise MalformedAdapter(f"{setting.where}: {blocks.name} {list(blocks.shape)} holds no skew-symmetric matrices")
    raw = setting.config.raw
    inputs = 0 if raw.flag("block_share") else size * blocks.shape[0]

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) >= 2 and (columns(shape) == inputs if inputs else columns(shape) % size == 0)

    needs = f"a tensor with {inputs} inputs" if inputs else f"a tensor whose inputs are a multiple of {size}"
    name = setting.weight(group, fits, source=blocks, needs=needs, outputs_first=True)
    by_terms, eps = raw.flag("use_cayley_neumann", True), raw.number("eps")
    edit = Oft(
        blocks=blocks,
        embedding=embedding,
        neumann_terms=(raw.count("num_cayley_neumann_terms", _MOST_TERMS) or 5) if by_terms else 0,
        eps=(6e-5 if eps is None else eps) if raw.flag("coft") else None,
        **setting.common(group),
    )
    return [(name, setting.as_stored(group, name, edit))]


def plan_boft(group: Group, setting: Setting) -> Placed:
    R, s = setting.take(group, "boft_R", "boft_s")
    if len(R.shape) != 4 or 0 in R.shape or R.shape[2] != R.shape[3]:
        raise MalformedAdapter(f"{setting.where}: {R.name} {list(R.shape)} is not (factors, blocks, b, b)")
    rows, cols = s.numel, R.shape[1] * R.shape[2]

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) >= 2 and shape[0] == rows and columns(shape) == cols

    name = setting.weight(group, fits, source=R, needs=f"{rows}×{cols}", outputs_first=True)
    return [(name, setting.as_stored(group, name, Boft(R=R, s=s, **setting.common(group))))]


def block_size(elements: int) -> int:
    """b, where b(b−1)/2 elements make an upper triangle; 0 where no b does."""
    size = (1 + math.isqrt(1 + 8 * elements)) // 2
    return size if size * (size - 1) // 2 == elements else 0


def _cayley(skew: np.ndarray) -> np.ndarray:
    """(I − S)(I + S)⁻¹, orthogonal."""
    eye = np.eye(skew.shape[-1], dtype=skew.dtype)
    # solve(left=False): X (I + S) = I − S.
    turned: np.ndarray = np.linalg.solve((eye + skew).swapaxes(-1, -2), (eye - skew).swapaxes(-1, -2))
    back: np.ndarray = turned.swapaxes(-1, -2)
    return back


def _neumann(skew: np.ndarray, terms: int) -> np.ndarray:
    """I + 2S + 2S² + … + Sⁿ, as peft sums it."""
    R: np.ndarray = np.broadcast_to(np.eye(skew.shape[-1], dtype=skew.dtype), skew.shape).copy()
    if terms > 1:
        R += 2 * skew
    if terms > 2:
        power = skew @ skew
        R += 2 * power
        for _ in range(3, terms - 1):
            power = power @ skew
            R += 2 * power
        R += power @ skew
    return R


def _constrain(skew: np.ndarray, eps: float) -> np.ndarray:
    limit = eps / math.sqrt(skew.shape[0])
    norm = np.sqrt(np.square(skew).sum(axis=(1, 2), keepdims=True))
    return np.where(norm <= limit, skew, limit * skew / np.where(norm == 0, 1, norm)).astype(skew.dtype)


def _butterfly(n: int, blocks: int, half: int, factors: int) -> np.ndarray:
    """peft's `block_butterfly_perm`: where the inputs of one butterfly factor come from."""
    order = np.arange(n)
    if factors == 0:
        return order
    size = n // blocks
    chunks = np.arange(size).reshape(-1, half)
    inner = np.concatenate([chunks[0::2], chunks[1::2]]).reshape(-1)
    return (order.reshape(-1, size)[:, inner]).reshape(-1)
