"""Where the work arrays of one batch lie in the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

WIDTH = 32  # bandwidth after the first stage, and columns of a panel
BAND_ROWS = 64  # stored offsets of a band column
GROUP = 4  # sweeps that one block chases together


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of the arrays, for `n` padded to `padded` and panels aggregated by `panels`."""

    n: int
    batch: int
    padded: int
    panels: int
    groups: int
    tiles: int
    offsets: dict[str, int]
    nbytes: int

    @property
    def pair_columns(self) -> int:
        return 2 * WIDTH * self.panels

    @property
    def band_columns(self) -> int:
        return self.padded + 2 * WIDTH


def aggregated_panels(padded: int) -> int:
    """Panels whose updates are applied to the trailing matrix together."""
    return 4 if padded >= 2048 else 2


@lru_cache(maxsize=256)
def layout(n: int, batch: int, panels: int | None = None) -> Layout:
    padded = -(-n // WIDTH) * WIDTH
    panels = panels or aggregated_panels(padded)
    groups = -(-n // GROUP)
    tiles = padded // WIDTH * (padded // WIDTH + 1) // 2
    pair = 2 * WIDTH * panels
    sizes = {
        "matrix": padded * padded * 8,
        "xv": padded * pair * 8,
        "vx": padded * pair * 8,
        "w": padded * WIDTH * 8,
        "z": padded * WIDTH * 8,
        "products": pair * WIDTH * 8,
        "moments": tiles * 16,
        "d": padded * 8,
        "e": padded * 8,
        "eigs": padded * 8,
        "de": padded * 16,
        "range": 24,
        "counts": padded * 4,
        # zeroed at the start of every solve, so they lie together
        "band": (padded + 2 * WIDTH) * BAND_ROWS * 8,
        "largest": 8,
        "progress": groups * 4,
        "ticket": 4,
    }
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[name] = at
        at += -(-size * batch // 256) * 256
    return Layout(n, batch, padded, panels, groups, tiles, offsets, at)
