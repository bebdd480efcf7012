"""LoKr: ΔW = w1 ⊗ w2 · α/r, each factor whole, or a product, or in CP form (peft lokr/layer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardesd.adapters.edits import Change, Edit, Round, Scale
from shardesd.adapters.names import Group
from shardesd.adapters.target import Placed, Setting, columns
from shardesd.errors import MalformedAdapter
from shardesd.records import TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Lokr(Edit):
    w1: tuple[TensorRef, ...]
    """w1 itself, or the two matrices whose product it is."""
    w2: tuple[TensorRef, ...]
    t2: TensorRef | None
    scale: Scale
    additive: ClassVar[bool] = True

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return tuple(ref for ref in (*self.w1, *self.w2, self.t2, self.scale.alpha_ref) if ref is not None)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        first = self._factor(self.w1, dtype)
        second = self._factor(self.w2, dtype) if self.t2 is None else self._cp(self.t2, dtype)
        first *= dtype.type(self.scale.value(self.read))
        if second.ndim == 3:
            # peft leaves a 1-D convolution's w1 with two dimensions, so that kron pairs its axes with w2's last two.
            full = np.kron(first, second).reshape(shape)

            def add(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
                W += full[start:stop]

            return add
        height = second.shape[0]

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            rows = np.arange(start, stop)
            outer, inner = first[rows // height], second[rows % height]
            spread = outer.reshape(*outer.shape, *(1,) * (inner.ndim - 1))
            W += (spread * inner[:, None]).reshape(W.shape)

        return change

    def _factor(self, refs: tuple[TensorRef, ...], dtype: np.dtype[Any]) -> np.ndarray:
        parts = [self.read(ref).astype(dtype) for ref in refs]
        return parts[0] if len(parts) == 1 else parts[0] @ parts[1]

    def _cp(self, core: TensorRef, dtype: np.dtype[Any]) -> np.ndarray:
        a, b = (self.read(ref).astype(dtype) for ref in self.w2)
        whole: np.ndarray = np.einsum("ijkl,ip,jr->prkl", self.read(core).astype(dtype), a, b, optimize=True)
        return whole


def plan_lokr(group: Group, setting: Setting) -> Placed:
    w1, rank_1 = _take(group, setting, "lokr_w1")
    w2, rank_2 = _take(group, setting, "lokr_w2")
    t2 = group.tensors.pop("lokr_t2", None)
    if t2 is not None and (len(w2) != 2 or len(t2.shape) != 4):
        raise MalformedAdapter(
            f"{setting.where}: {t2.name} {list(t2.shape)} doesn't fit the other factors of its module"
        )
    out_1, in_1 = w1[0].shape[0], w1[-1].shape[1]
    if t2 is not None:
        out_2, in_2 = w2[0].shape[1], w2[1].shape[1] * t2.shape[2] * t2.shape[3]
    else:
        out_2, in_2 = w2[0].shape[0], columns(w2[-1].shape)
    rows, cols = out_1 * out_2, in_1 * in_2

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) >= 2 and shape[0] == rows and columns(shape) == cols

    name = setting.weight(group, fits, source=w1[0], needs=f"{rows}×{cols}", outputs_first=True)
    rank = rank_1 or rank_2
    if rank:
        setting.check_rank(group, w1[0] if rank_1 else w2[0], rank)
    else:
        # Neither factor was decomposed, so the tensors don't show r; peft divides by the config's all the same.
        rank = setting.config.rank_of(group.module) or 0
    if not rank:
        group.tensors.pop("alpha", None)  # LyCORIS takes α = r where nothing was decomposed
    scale = setting.scale(group, rank) if rank else Scale()
    edit = Lokr(w1=w1, w2=w2, t2=t2, scale=scale, **setting.common(group))
    return [(name, setting.as_stored(group, name, edit))]


def _take(group: Group, setting: Setting, role: str) -> tuple[tuple[TensorRef, ...], int]:
    """One Kronecker factor's tensors, and the rank they show (0 for a whole one)."""
    if role in group.tensors:
        refs = tuple(setting.take(group, role))
        rank = 0
    else:
        refs = tuple(setting.take(group, f"{role}_a", f"{role}_b"))
        rank = refs[1].shape[0] if refs[1].shape else 0
    for ref in refs:
        if len(ref.shape) < 2 or 0 in ref.shape:
            raise MalformedAdapter(f"{setting.where}: {ref.name} has shape {list(ref.shape)}; a matrix was expected")
    return refs, rank
