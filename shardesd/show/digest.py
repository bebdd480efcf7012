"""What a folder of results says across its models, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shardesd.events import FAILURES, LASTING, PASSING
from shardesd.show.text import count, number, printable


class Spread(Protocol):
    """A distribution; see `results.Spread`."""

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def min(self) -> float: ...
    @property
    def q25(self) -> float: ...
    @property
    def median(self) -> float: ...
    @property
    def q75(self) -> float: ...
    @property
    def max(self) -> float: ...


class Outlier(Protocol):
    """See `results.digest.Outlier`."""

    @property
    def model(self) -> str: ...
    @property
    def measure(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def score(self) -> float: ...


class Digest(Protocol):
    """See `results.Digest`."""

    @property
    def models(self) -> int: ...
    @property
    def matrices(self) -> int: ...
    @property
    def failed_matrices(self) -> int: ...
    @property
    def measures(self) -> Sequence[Spread]: ...
    @property
    def relations(self) -> Sequence[Spread]: ...
    @property
    def block_types(self) -> Sequence[Spread]: ...
    @property
    def outliers(self) -> Sequence[Outlier]: ...
    @property
    def failures(self) -> dict[str, int]: ...
    @property
    def files(self) -> Sequence[str]: ...


_MOST = 12


def digest_lines(digest: Digest) -> list[str]:
    """The lines of `shardesd summarize`."""
    failed = f", {digest.failed_matrices:,} failed" if digest.failed_matrices else ""
    lines = [f"{count(digest.models, 'model')}, {count(digest.matrices, 'matrix', 'matrices')}{failed}"]
    for title, noun, spreads in (
        ("across models", "models", digest.measures),
        ("α median of models by relation", "models", digest.relations),
        ("α of matrices by block type", "matrices", digest.block_types),
    ):
        if spreads:
            lines += ["", *_table(title, noun, spreads)]
    if digest.outliers:
        lines += ["", f"outliers {len(digest.outliers):,}"]
        width = max(len(printable(outlier.model)) for outlier in digest.outliers[:_MOST])
        for outlier in digest.outliers[:_MOST]:
            words = f"{outlier.measure} {number(outlier.value, 3, 9)}, {outlier.score:.1f} deviations from the median"
            lines.append(f"  {printable(outlier.model):<{width}}  {words}")
        if len(digest.outliers) > _MOST:
            lines.append(f"  and {len(digest.outliers) - _MOST:,} more")
    if digest.failures:
        lines += ["", f"failed {sum(digest.failures.values()):,}"]
        for reason, n in digest.failures.items():
            why = f": {({**PASSING, **LASTING})[reason]}" if reason in FAILURES else ""
            lines.append(f"  {n:>5,}  {printable(reason)}{why}")
    return [*lines, "", *(f"written {printable(file)}" for file in digest.files)]


def _table(title: str, noun: str, spreads: Iterable[Spread]) -> list[str]:
    spreads = list(spreads)
    width = max(len(title), *(len(printable(spread.name)) for spread in spreads))
    head = f"{title:<{width}}  {noun:>8}" + "".join(f" {name:>9}" for name in ("min", "25 %", "median", "75 %", "max"))
    lines = [head]
    for spread in spreads:
        values = (spread.min, spread.q25, spread.median, spread.q75, spread.max)
        cells = "".join(f" {number(value, 3, 9):>9}" for value in values)
        lines.append(f"{printable(spread.name):<{width}}  {spread.count:>8,}{cells}")
    return lines
