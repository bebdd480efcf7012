"""IA3 (peft ia3/layer.py): W' = W ⊙ l along the outputs, the bias too, or along a feed-forward layer's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardesd.adapters.edits import Change, Edit, Round
from shardesd.adapters.names import Group
from shardesd.adapters.patterns import Matcher
from shardesd.adapters.target import Placed, Setting
from shardesd.errors import MalformedAdapter
from shardesd.records import TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale(Edit):
    """Every entry of one axis of the stored tensor times its own number."""

    vector: TensorRef
    axis: int

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.vector,)

    def load(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Change:
        vector = self.read(self.vector).astype(dtype, copy=False).reshape(-1)
        tail = (1,) * (len(shape) - 2)

        def change(W: np.ndarray, base: np.ndarray, start: int, stop: int, round_: Round | None) -> None:
            if self.axis == 0:
                W *= vector[start:stop].reshape(-1, *(1,) * (W.ndim - 1))
            elif vector.size == shape[1]:
                W *= vector.reshape(1, -1, *tail)
            else:
                # A grouped convolution's filters each see their own group of the inputs.
                groups = vector.size // shape[1]
                group = np.arange(start, stop) // (shape[0] // groups)
                W *= vector.reshape(groups, shape[1])[group].reshape(stop - start, -1, *tail)

        return change


def plan_ia3(group: Group, setting: Setting) -> Placed:
    (vector,) = setting.take(group, "ia3_l")
    if len(vector.shape) < 2 or 0 in vector.shape:
        raise MalformedAdapter(
            f"{setting.where}: {vector.name} has shape {list(vector.shape)}; (out, 1) or (1, in) expected"
        )
    size = vector.numel
    convolution = len(vector.shape) > 2
    feedforward = _is_feedforward(group.module, setting.config.feedforward_modules)
    if not convolution and size > 1:
        feedforward = vector.shape[0] == 1

    def fits(shape: tuple[int, ...]) -> bool:
        if convolution:
            # A grouped convolution stores in/groups of its inputs.
            return len(shape) == len(vector.shape) and (
                size % shape[1] == 0 and shape[0] % (size // shape[1]) == 0 if feedforward else size == shape[0]
            )
        return len(shape) == 2 and size in shape

    what = "inputs" if feedforward else "outputs"
    name = setting.weight(group, fits, source=vector, needs=f"a tensor with {size} {what}")
    shape = setting.index.shape(name)
    axis = 1 if feedforward else 0
    if not convolution and (
        shape[axis] != size or (shape[0] == shape[1] and setting.transposed(group, name, size, size))
    ):
        axis = 1 - axis
    placed: Placed = [(name, Rescale(vector=vector, axis=axis, **setting.common(group)))]
    bias = f"{name.rpartition('.')[0]}.bias"
    if not feedforward and bias in setting.index:
        placed.append((bias, Rescale(vector=vector, axis=0, **setting.common(group))))
    return placed


def _is_feedforward(module: str, named: Matcher | tuple[str, ...]) -> bool:
    if callable(named):
        return bool(named(module))
    return any(module == name or module.endswith(f".{name}") for name in named)
