"""Records that nothing changes once they are made: mypy sees to that."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import dataclass

    def record(*, frozen, eq=True, **how):
        """`dataclass`, with instances that Python itself would let change.

        To refuse that it sets each field in a roundabout way: a row takes 4.5 instead of 1.3 µs. A scan of thousands of
        experts makes a dozen records for each, a tenth of what its threads do in Python (docs/tuning.md).
        """
        return dataclass(eq=eq, unsafe_hash=frozen and eq, **how)
