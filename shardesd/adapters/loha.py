"""LoHa: ΔW = (w1_a·w1_b) ⊙ (w2_a·w2_b) · α/r, or its CP form for convolutions (peft loha/layer.py)."""

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
class Loha(Edit):
    w1: tuple[TensorRef, TensorRef]
    w2: tuple[TensorRef, TensorRef]
    t1: TensorRef | None
    t2: TensorRef | None
    scale: Scale
    additive: ClassVar[bool] = True

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return tuple(ref for ref in (*self.w1, *self.w2, self.t1, self.t2, self.scale.alpha_ref) if ref is not None)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        scale = dtype.type(self.scale.value(self.read))
        one, two = self._half(self.w1, self.t1, dtype), self._half(self.w2, self.t2, dtype)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            product = one(start, stop)
            product *= two(start, stop)
            product *= scale
            W += product.reshape(W.shape)

        return change

    def _half(self, pair: tuple[TensorRef, TensorRef], core: TensorRef | None, dtype: np.dtype[Any]) -> Any:
        a, b = (self.read(ref).astype(dtype, copy=False) for ref in pair)
        if core is None:
            return lambda start, stop: a[start:stop] @ b
        # einsum "ijkl, jr, ip -> prkl": the inputs can be contracted once for all rows.
        inner = np.einsum("ijkl,jr->irkl", self.read(core).astype(dtype, copy=False), b)
        return lambda start, stop: np.tensordot(a[:, start:stop], inner, axes=(0, 0))


def plan_loha(group: Group, setting: Setting) -> Placed:
    w1a, w1b, w2a, w2b = setting.take(group, "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    t1, t2 = group.tensors.pop("hada_t1", None), group.tensors.pop("hada_t2", None)
    for ref in (w1a, w1b, w2a, w2b):
        if len(ref.shape) != 2 or 0 in ref.shape:
            raise MalformedAdapter(f"{setting.where}: {ref.name} has shape {list(ref.shape)}; a matrix was expected")
    if t1 is None or t2 is None:
        rows, cols, rank = w1a.shape[0], w1b.shape[1], w1b.shape[0]
    else:
        rows, cols, rank = w1a.shape[1], w1b.shape[1] * t1.shape[2] * t1.shape[3], w1a.shape[0]
    if (w2a.shape, w2b.shape) != (w1a.shape, w1b.shape) or (t1 is None and w1a.shape[1] != rank):
        raise MalformedAdapter(f"{setting.where}: the factors of {group.module} don't fit each other")
    setting.check_rank(group, w1b, rank)

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) >= 2 and shape[0] == rows and columns(shape) == cols

    name = setting.weight(group, fits, source=w1a, needs=f"{rows}×{cols}", outputs_first=True)
    edit = Loha(w1=(w1a, w1b), w2=(w2a, w2b), t1=t1, t2=t2, scale=setting.scale(group, rank), **setting.common(group))
    return [(name, setting.as_stored(group, name, edit))]
