"""Mean, variance, extremes and near-zeros of a matrix's elements, counted on the GPU that makes its Gram.

A CPU takes a nanosecond for each, and so longer than the GPU for all of its solve. A GPU takes as long as its memory
takes to be read: what 16 bits tell as well is counted as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardesd.records import Matrix
from shardesd.spectra import driver

if TYPE_CHECKING:
    import numpy as np
    import torch


class Part(NamedTuple):
    """Of `size` elements. NaN and Inf go into all values that they would make so in numpy."""

    size: int
    mean: float
    m2: float
    """Sum of squared distances from the mean."""
    low: float
    high: float
    zeros: int
    """Elements with |x| ≤ `Tallied.nearly_zero`."""


class Tallied:
    """A `Matrix` of which `done` is told, part by part, what its elements are like, if a GPU makes its Gram."""

    def __init__(self, matrix: Matrix, nearly_zero: float, done: Callable[[Sequence[Part]], None]) -> None:
        self._matrix = matrix
        self.shape, self.itemsize = matrix.shape, matrix.itemsize
        self.nearly_zero = nearly_zero
        self.done = done

    def block(self, axis: Literal[0, 1], start: int, stop: int, dtype: np.dtype[Any]) -> np.ndarray:
        """See `Matrix`."""
        return self._matrix.block(axis, start, stop, dtype)

    @property
    def is_stretch(self) -> bool:
        """See `Matrix`."""
        return self._matrix.is_stretch

    def precedes(self, other: Matrix) -> bool:
        """See `Matrix`."""
        return self._matrix.precedes(_bare(other))

    def through(self, last: Matrix) -> Matrix:
        """See `Matrix`."""
        return self._matrix.through(_bare(last))

    def begin(self, start: int, stop: int, buffer: np.ndarray) -> Callable[[], torch.Tensor]:
        """See `Matrix`."""
        return self._matrix.begin(start, stop, buffer)


def _bare(matrix: Matrix) -> Matrix:
    return matrix._matrix if isinstance(matrix, Tallied) else matrix


class Tallies:
    """Of the matrices of one batch. What is counted stays on the device until `tell`, so that nothing waits for it."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[Matrix], int, torch.Tensor]] = []

    def add(self, matrices: Sequence[Matrix], elements: torch.Tensor, wide: torch.Tensor | None = None) -> None:
        """A part of each matrix: `elements` is (K, N) for one, in any order, and (B, …) for B of them; `wide` is the
        same in float64, where it is there."""
        nearly_zero = next((matrix.nearly_zero for matrix in matrices if isinstance(matrix, Tallied)), None)
        if nearly_zero is None:
            return
        each_BK = _flat(elements, len(matrices))
        wide_BK = each_BK.double() if wide is None else _flat(wide, len(matrices))
        self._parts.append((matrices, each_BK.shape[1], _count(each_BK, wide_BK, nearly_zero)))

    def tell(self) -> None:
        """Tells each matrix's `done`; not of one that could not be read to its end. Synchronises."""
        import torch

        if not self._parts:
            return
        values_B5 = torch.cat([values for _, _, values in self._parts])
        driver.until_done(values_B5.device)
        rows = iter(values_B5.tolist())
        found: dict[Tallied, list[Part]] = {}
        for matrices, size, _ in self._parts:
            for matrix in matrices:
                mean, var, low, high, zeros = next(rows)
                if isinstance(matrix, Tallied):
                    found.setdefault(matrix, []).append(Part(size, mean, var * size, low, high, int(zeros)))
        self._parts = []
        for matrix, parts in found.items():
            if sum(part.size for part in parts) == matrix.shape[0] * matrix.shape[1]:
                matrix.done(parts)


def _flat(elements: torch.Tensor, count: int) -> torch.Tensor:
    """A row for each of `count` matrices; of one, in the order in which they lie, so that nothing is copied."""
    if count == 1 and elements.mT.is_contiguous():
        elements = elements.mT
    return elements.reshape(count, -1)


def _count(elements_BK: torch.Tensor, wide_BK: torch.Tensor, nearly_zero: float) -> torch.Tensor:
    """(B, 5) in float64: mean, variance (ddof = 0), least, largest, near-zeros. `wide_BK` are the same in float64, in
    any order."""
    import torch

    low_B, high_B = torch.aminmax(elements_BK, dim=1)
    mean_B = elements_BK.sum(dim=1, dtype=torch.float64) / elements_BK.shape[1]  # `var_mean` makes NaN of Inf's mean
    var_B = torch.var(wide_BK, dim=1, correction=0)
    zeros_B = torch.count_nonzero(elements_BK.abs() <= _at_most(nearly_zero, elements_BK.dtype), dim=1)
    return torch.stack([mean_B, var_B, low_B.double(), high_B.double(), zeros_B.double()], dim=1)


@cache
def _at_most(bound: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` up to a positive `bound`: torch would round that to the nearest."""
    import torch

    nearest = torch.tensor(bound, dtype=torch.float64).to(dtype)
    if float(nearest) > bound:
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]  # of positive numbers they are in the same order
        nearest = (nearest.view(bits) - 1).view(dtype)
    return float(nearest)
