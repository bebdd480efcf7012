"""HiRA: W' = W + W₀ ⊙ (B·A), with no α (peft hira/layer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardesd.adapters.edits import Change, Edit, Round
from shardesd.adapters.names import Group
from shardesd.adapters.target import Placed, Setting, columns, linear_fits
from shardesd.records import TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Hira(Edit):
    A: TensorRef
    B: TensorRef
    transposed: bool
    needs_base: ClassVar[bool] = True

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.A, self.B)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        A, B = (self.read(ref).astype(dtype, copy=False) for ref in (self.A, self.B))
        A, B = A.reshape(A.shape[0], -1), B.reshape(B.shape[0], -1)
        left, right = (A.T, B.T) if self.transposed else (B, A)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            product = (left[start:stop] @ right).reshape(W.shape)
            if round_:
                W += round_(base * round_(product))
            else:
                W += base * product

        return change


def plan_hira(group: Group, setting: Setting) -> Placed:
    embedding = "hira_embedding_A" in group.tensors
    A, B = setting.factors(group, *(("hira_embedding_A", "hira_embedding_B") if embedding else ("hira_A", "hira_B")))
    setting.check_rank(group, A, A.shape[0])
    rows, cols = B.shape[0], columns(A.shape)
    fits = (lambda shape: shape == (cols, rows)) if embedding else linear_fits(rows, cols)
    name = setting.weight(group, fits, source=A, needs=f"{rows}×{cols}")
    transposed = embedding or setting.transposed(group, name, rows, cols)
    return [(name, Hira(A=A, B=B, transposed=transposed, **setting.common(group)))]
