"""Small matrices that travel to a GPU together, and what is known of all that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from shardesd.records import Matrix

if TYPE_CHECKING:
    import numpy as np
    import torch

    from shardesd.spectra.staging import Buffer


class Member(NamedTuple):
    """A matrix, or some of its rows, among the bytes that are sent at once."""

    at: int
    """Its number among those that were to be sent."""
    matrix: Matrix
    begin: int
    """Its first byte."""
    dtype: torch.dtype
    rows: int


class Failed(NamedTuple):
    """A matrix that can't be read, or not to its end."""

    at: int
    error: Exception


class Loaded(NamedTuple):
    """What is to be sent."""

    where: Buffer | torch.Tensor
    """In a buffer, of which it is the first `nbytes`, or in bytes of its own."""
    nbytes: int
    held: Buffer | None
    """Which one can be read into again once it is sent, whether it lies there or not: or all would be read ahead."""
    members: Sequence[Member]
    packed: bool


Come = Callable[[], Iterator[Loaded | Failed]]
"""Waits for what is being read."""


class Pack:
    """Whole matrices, one behind the other in one buffer; those that lie so in their file are read at once."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._members: list[Member] = []
        self._others: list[Loaded | Failed] = []
        self._end = 0
        self._awaited: list[_Place] = []
        """Of those that are not yet read: one, or stretches that follow each other."""
        self._gapless = True
        """Whether the last one's end is where the next one begins."""
        self._begun: list[tuple[list[_Place], np.ndarray, Callable[[], torch.Tensor]]] = []

    def has_room(self, size: int) -> bool:
        return self._end + size <= len(self._buffer.memory)

    def add(self, at: int, matrix: Matrix, size: int) -> None:
        """Reads it, of `size` bytes, now or, of a stretch, before `begun` gives it."""
        if self._awaited and not (self._gapless and self._awaited[-1].matrix.precedes(matrix)):
            self._begin()
        self._awaited.append(_Place(at, matrix, self._end))
        self._end += aligned(size)
        self._gapless = aligned(size) == size
        if not matrix.is_stretch:
            self._begin()

    def begun(self) -> Come:
        """All that is not yet read is begun."""
        self._begin()
        return self._come

    def wait(self) -> None:
        """Until nothing more is read into the buffer."""
        for _ in self._come():
            pass

    def _come(self) -> Iterator[Loaded | Failed]:
        """The buffer, and what could not be put into it."""
        for places, memory, begun in self._begun:
            self._put(places, memory, begun)
        self._members.sort(key=_number)  # some were put here before others came
        yield from self._others
        end = self._end if self._members else 0
        yield Loaded(self._buffer, end, self._buffer, self._members, packed=True)

    def _begin(self) -> None:
        places, self._awaited = self._awaited, []
        if not places:
            return
        first, last = places[0], places[-1]
        try:
            matrix = first.matrix.through(last.matrix) if len(places) > 1 else first.matrix
            memory = self._buffer.memory[first.begin : first.begin + nbytes(matrix)]
            begun = matrix.begin(0, matrix.shape[0], memory)
        except Exception as error:
            self._others += [Failed(place.at, error) for place in places]
        else:
            if matrix.is_stretch:
                self._begun.append((places, memory, begun))
            else:  # while it is open
                self._put(places, memory, begun)

    def _put(self, places: Sequence[_Place], memory: np.ndarray, begun: Callable[[], torch.Tensor]) -> None:
        try:
            rows = begun()
            if lies_in(memory, rows):
                self._members += [Member(at, one, start, rows.dtype, one.shape[0]) for at, one, start in places]
            else:  # it is wider than it is stored, since an adapter is merged into it
                ((at, matrix, _),) = places
                member = Member(at, matrix, 0, rows.dtype, matrix.shape[0])
                self._others.append(Loaded(flat_bytes(rows), rows.nbytes, None, [member], packed=True))
        except Exception as error:  # whatever it is: no Gram may be taken for made that isn't
            self._others += [Failed(place.at, error) for place in places]


_number = attrgetter("at")


class _Place(NamedTuple):
    """Of a matrix in a pack."""

    at: int
    matrix: Matrix
    begin: int
    """Its first byte."""


def lies_in(place: np.ndarray, rows: torch.Tensor) -> bool:
    """Has `place` begin with `rows`, copied into it if they aren't there; False where they are more than it holds."""
    import torch

    if rows.nbytes > len(place):
        return False
    if rows.data_ptr() != place.ctypes.data:
        torch.from_numpy(place[: rows.nbytes]).view(rows.dtype).view(rows.shape).copy_(rows)
    return True


def flat_bytes(rows: torch.Tensor) -> torch.Tensor:
    import torch

    return rows.contiguous().view(-1).view(torch.uint8)


def nbytes(matrix: Matrix) -> int:
    """Of its elements as they are stored."""
    M, N = matrix.shape
    return M * N * matrix.itemsize


def aligned(size: int) -> int:
    """Bytes from one matrix of a pack to the next: a GPU reads from where its elements may begin."""
    return -(-size // 16) * 16
