"""One scan's use of the folder: what its options ask for, and whether what is there answers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shardesd import spectra
from shardesd.keep.keys import spectrum_key
from shardesd.keep.spectra import Keep
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, ShardRef, Spectrum, TensorRef


class Placed(Protocol):
    """What is to be known of an open shard."""

    @property
    def ref(self) -> ShardRef: ...

    def delta(self, tensor: TensorRef) -> str | None:
        """What is done to a tensor's stored bytes when it is read: empty for nothing, else a digest of it (an
        adapter's). None where bytes elsewhere count too."""
        ...


class Recall:
    """Spectra of `keep` for scans with `options`; without a `keep` nothing is found and nothing is kept."""

    def __init__(self, keep: Keep | None, options: ScanOptions, devices: Iterable[str] = ("cpu",)) -> None:
        self._keep = keep
        self._options = options
        # Of λ from a device where ``auto`` means float32, nothing is taken where it would mean float64.
        self._precisions = {spectra.choose_precision(options.precision, device) for device in devices}

    @property
    def active(self) -> bool:
        """Whether there is a folder to ask."""
        return self._keep is not None

    def content(self, tensor: TensorRef, shard: Placed) -> str | None:
        """The digest of a tensor's elements, if it is known without reading them, and they needn't be read all the same
        (for ``--stats``)."""
        if self._keep is None or self._options.stats or (delta := shard.delta(tensor)) is None:
            return None
        return self._keep.content(shard.ref.sha256, tensor.start, tensor.end, delta)

    def unread(self, matrix: MatrixRef, shard: Placed) -> Spectrum | None:
        """The spectrum of a matrix none of whose bytes has been read: only where the shard's digest is known."""
        return self.get(self.content(matrix.tensor, shard), matrix)

    def get(self, content: str | None, matrix: MatrixRef) -> Spectrum | None:
        """The spectrum of a matrix whose tensor's elements have this digest; None where that is None, too."""
        if self._keep is None or not content:
            return None
        found = self._keep.get(self._key(content, matrix))
        if found is None or (found.precision == "float32" and "float32" not in self._precisions):
            return None
        options = self._options
        # Solved for another --evals-thresh, its small λ may be no more than rounding where this one needs them.
        if found.solver == "gram" and spectra.drowned(found.eigs, options.solver, found.precision, options.resolve):
            return None
        return found

    def put(self, content: str, matrix: MatrixRef, spectrum: Spectrum) -> None:
        """Keeps a spectrum that was computed from a tensor of this digest."""
        if self._keep is not None:
            self._keep.put(self._key(content, matrix), spectrum)

    def note(self, tensor: TensorRef, shard: Placed, content: str) -> None:
        """Remembers the digest of a tensor's elements by where they lie, so that they needn't be read to be known."""
        if self._keep is not None and (delta := shard.delta(tensor)) is not None:
            self._keep.remember(shard.ref.sha256, tensor.start, tensor.end, delta, content)

    def _key(self, content: str, matrix: MatrixRef) -> str:
        options = self._options
        return spectrum_key(content, matrix, solver=options.solver, precision=options.precision)
