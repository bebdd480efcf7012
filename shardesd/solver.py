"""One matrix of an open shard → its λ and metrics: taken from what is kept, or solved and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from shardesd import matrices, metrics, spectra
from shardesd.checkpoint import RangedShard, Shard, ShardMatrix, StoredMatrix, element_word
from shardesd.errors import bare
from shardesd.keep import Recall, digest
from shardesd.options import ScanOptions
from shardesd.records import Matrix, MatrixRef, Spectrum, TensorRef

_T = TypeVar("_T")
Solved = tuple[Spectrum, dict[str, Any], bool]
"""λ, the metric columns, and whether the λ are kept ones."""
Solving = Solved | Callable[[], Solved]
"""Or what gives that, waiting for it: a GPU's λ are fitted while it solves the next ones."""
_PIECE_BYTES = 4_000_000  # read at a time where a tensor's elements are digested
_DIGESTS_AT_ONCE = 8  # of a group


class Counter(Protocol):
    """Of the elements of tensors, for ``--stats``."""

    def counting(self, shard: Shard, tensor: TensorRef) -> Shard:
        """`shard`, counting what is read of the tensor in order."""
        ...

    def tallied(self, matrix: Matrix, tensor: TensorRef) -> Matrix:
        """`matrix`, which is all of the tensor, counted by the GPU that makes its Gram."""
        ...

    def read(self, tensors: Iterable[TensorRef], shard: Shard) -> None:
        """Reads tensors for this alone."""
        ...


@dataclass(frozen=True, slots=True)
class Solver:
    """Solves with `options`, within `budget` bytes of memory. For any number of threads."""

    options: ScanOptions
    recall: Recall
    budget: int
    fitting: Executor
    """Fits and keeps the λ of `solve_many`."""
    counter: Callable[[MatrixRef], Counter | None] = lambda item: None
    """What counts the elements of a matrix; None where nothing does."""

    def by_blocks(self, item: MatrixRef, shard: Shard, device: str = "cpu") -> bool:
        """Whether it is read block by block: rows once; columns, which a CPU needs of a wide one, again and again."""
        if not self._plain(item) or self.options.solver == "svd" or not shard.in_blocks(item.tensor):
            return False
        return item.M >= item.N or device != "cpu" or item.tensor.nbytes > self.budget // 8

    def solve(self, item: MatrixRef, shard: Shard, device: str) -> Solved:
        """One matrix. Raises `MatrixError`, `CheckpointError` or `SourceError`, and what a device raises."""
        contents: dict[str, str] = {}
        pair = factors(item, shard)
        if pair is not None:
            contents[item.longname] = f"factors {digest(pair)}"
            known = self.recall.get(contents[item.longname], item)
            return self._finished(
                item, shard, contents, known or spectra.compute_product(*pair), kept=known is not None
            )
        known = self._known(item, shard, device, contents)
        if known is not None:
            return self._finished(item, shard, contents, known, kept=True)
        looked = item.longname in contents
        with self._opened(item, shard, device, contents)() as parts:
            known = None if looked else self.recall.get(contents.get(item.longname), item)
            spectrum = known or spectra.compute(parts, scale=item.scale, device=device, **self._how())
        return self._finished(item, shard, contents, spectrum, kept=known is not None)

    def solve_many(
        self, pairs: Sequence[tuple[MatrixRef, Shard]], device: str
    ) -> list[tuple[Solving | Exception, float]]:
        """Several matrices of one shorter side, solved together on a GPU: for each what came of it, and its seconds.

        Raises what means trouble for all of them.
        """
        contents: dict[str, str] = {}
        found: dict[int, tuple[Solving | Exception, float]] = {}
        left: list[int] = []

        def look(at: int) -> tuple[Solved | Exception, float] | None:
            started = time.perf_counter()
            item, shard = pairs[at]
            try:
                known = self._known(item, shard, device, contents)
                if known is None:
                    return None
                result: Solved | Exception = self._finished(item, shard, contents, known, kept=True)
            except Exception as error:
                if spectra.trouble(error) != "task":
                    raise
                result = bare(error)
            return result, time.perf_counter() - started

        if self.recall.active:  # at once, or a GPU would wait for one digest after the other
            with ThreadPoolExecutor(_DIGESTS_AT_ONCE) as pool:
                looked = list(pool.map(look, range(len(pairs))))
        else:
            looked = [None] * len(pairs)
        for at, one in enumerate(looked):
            if one is None:
                left.append(at)
            else:
                found[at] = one
        if left:
            opened = [self._opened(*pairs[at], device, contents) for at in left]
            n = min(pairs[left[0]][0].M, pairs[left[0]][0].N)
            done = spectra.compute_many(opened, n=n, device=device, **self._how())
            solved = {at: given for at, given in zip(left, done, strict=True) if not isinstance(given, Exception)}
            # Each step of a fit lets go of the interpreter's lock, and waits to have it back: a thread that feeds a GPU
            # would do so for as long as the GPU needs for the next ones.
            fits = self._submit(self._all_finished, pairs, contents, solved)
            for at, given in zip(left, done, strict=True):
                found[at] = (given, 0.0) if isinstance(given, Exception) else (partial(_of, fits, at), given.seconds)
        return [found[at] for at in range(len(pairs))]

    def measured(self, item: MatrixRef, spectrum: Spectrum, *, kept: bool) -> Solved:
        """λ with the metrics that `options` ask for."""
        return spectrum, metrics.measure(spectrum.eigs, N=item.N, options=self.options), kept

    def _known(self, item: MatrixRef, shard: Shard, device: str, contents: dict[str, str]) -> Spectrum | None:
        """Kept λ of a matrix whose bytes cost little to read, the digest of which goes into `contents`.

        They are read for the digest alone: the λ may then need no other reading. What comes over the network is read
        once, and its λ looked for once it is here (`_matrices`).
        """
        if not self.recall.active or isinstance(shard, RangedShard):
            return None
        content = self.recall.content(item.tensor, shard)
        by_host, by_card = self._counters(item, shard, device)
        if not content:
            content = digest(self._pieces(item, by_host.counting(shard, item.tensor) if by_host else shard))
        contents[item.longname] = content
        known = self.recall.get(content, item)
        if known is not None and by_card:  # no GPU will see them
            by_card.read([item.tensor], shard)
        return known

    def _counters(self, item: MatrixRef, shard: Shard, device: str) -> tuple[Counter | None, Counter | None]:
        """What counts a matrix's elements: as the host reads them, or where their Gram is made. One is None, or both.

        A GPU counts them where they are all of the tensor; but not what comes over the network, which is read once,
        before it is known whether a Gram is needed.
        """
        counter = self.counter(item)
        if counter is None:
            return None, None
        grams = device != "cpu" and self.options.solver != "svd"
        by_card = grams and self._plain(item) and not isinstance(shard, RangedShard)
        return (None, counter) if by_card else (counter, None)

    def _opened(self, item: MatrixRef, shard: Shard, device: str, contents: dict[str, str]) -> spectra.Open:
        """What opens a matrix; as much as can be done before its turn comes is done at once."""
        by_host, by_card = self._counters(item, shard, device)
        counting = by_host.counting(shard, item.tensor) if by_host and item.longname not in contents else shard
        if self.by_blocks(item, shard, device):
            matrix = ShardMatrix(counting, item.tensor)
            opened = nullcontext([by_card.tallied(matrix, item.tensor) if by_card else matrix])
            return lambda: opened
        return partial(self._read, item, counting, contents, by_card)

    @contextmanager
    def _read(
        self, item: MatrixRef, shard: Shard, contents: dict[str, str], by_card: Counter | None
    ) -> Iterator[Sequence[Matrix]]:
        with shard.read(item.tensor) as raw:
            if self.recall.active and item.longname not in contents:
                contents[item.longname] = digest([raw])
            word = element_word(raw, item.tensor.dtype)
            parts = [StoredMatrix(part, word) for part in matrices.slices(item, raw)]
            yield [by_card.tallied(part, item.tensor) for part in parts] if by_card else parts

    def _pieces(self, item: MatrixRef, shard: Shard) -> Iterator[np.ndarray]:
        """The elements of the matrix's tensor as they are when read, in order, each piece valid until the next."""
        tensor = item.tensor
        if not (tensor.nbytes and shard.in_blocks(tensor)):
            with shard.read(tensor) as raw:
                yield raw
            return
        M = tensor.shape[0]
        step = max(1, _PIECE_BYTES // (tensor.nbytes // M))
        for row in range(0, M, step):
            with shard.read(tensor.rows(row, min(row + step, M))) as raw:
                yield raw

    @staticmethod
    def _plain(item: MatrixRef) -> bool:
        """Whether the matrix is its tensor as it lies there."""
        return item.fold is None and item.pick is None and item.slices == 1

    def _finished(
        self, item: MatrixRef, shard: Shard, contents: dict[str, str], spectrum: Spectrum, *, kept: bool
    ) -> Solved:
        self._note(item, shard, contents, spectrum, kept=kept)
        return self.measured(item, spectrum, kept=kept)

    def _note(self, item: MatrixRef, shard: Shard, contents: dict[str, str], spectrum: Spectrum, *, kept: bool) -> None:
        """Has λ kept, where they are."""
        if content := contents.get(item.longname):
            self.recall.note(item.tensor, shard, content)
            if not kept:
                self.recall.put(content, item, spectrum)

    def _submit(self, work: Callable[..., _T], *given: Any) -> Future[_T]:
        """Has `fitting` do it; at once where that has been shut down, since the scan has ended meanwhile."""
        try:
            return self.fitting.submit(work, *given)
        except RuntimeError:
            done: Future[_T] = Future()
            done.set_result(work(*given))
            return done

    def _all_finished(
        self, pairs: Sequence[tuple[MatrixRef, Shard]], contents: dict[str, str], solved: Mapping[int, Spectrum]
    ) -> dict[int, Solved | Exception]:
        found: dict[int, Solved | Exception] = {}
        for at, spectrum in solved.items():
            try:
                self._note(*pairs[at], contents, spectrum, kept=False)
            except Exception as error:  # costs one row
                found[at] = bare(error)
        left = [at for at in solved if at not in found]
        try:
            eigs_BN = np.stack([solved[at].eigs for at in left])
            rows = metrics.measure_many(eigs_BN, N=[pairs[at][0].N for at in left], options=self.options)
            return found | {at: (solved[at], values, False) for at, values in zip(left, rows, strict=True)}
        except Exception:  # of one of them, or for want of memory for all
            for at in left:
                try:
                    found[at] = self.measured(pairs[at][0], solved[at], kept=False)
                except Exception as error:
                    found[at] = bare(error)
            return found

    def _how(self) -> dict[str, Any]:
        options = self.options
        return {"solver": options.solver, "precision": options.precision, "resolve": options.resolve}


def factors(item: MatrixRef, shard: Shard) -> tuple[np.ndarray, np.ndarray] | None:
    """See `Shard.factors`; None for what is cut out of a tensor."""
    return shard.factors(item.tensor) if item.fold is None and item.slices == 1 else None


def settled(solving: Solving | None, error: Exception | None) -> tuple[Solved | None, Exception | None]:
    """What came of a matrix, once its λ are fitted: waits for that."""
    if callable(solving):
        try:
            return solving(), None
        except Exception as failure:
            return None, failure
    return solving, error


def _of(fits: Future[dict[int, Solved | Exception]], at: int) -> Solved:
    found = fits.result()[at]
    if isinstance(found, Exception):
        raise found
    return found
