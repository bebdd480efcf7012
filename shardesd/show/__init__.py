"""What a person sees: progress on stderr while a scan runs, and its table and report on stdout afterwards.

Pure functions of events and tables; the ranges of α and their sources are in `alpha`.
"""

from __future__ import annotations

from shardesd.show.alpha import AlphaRange, alpha_range
from shardesd.show.display import display
from shardesd.show.layers import layers_view
from shardesd.show.report import print_report, report, table

__all__ = ["AlphaRange", "alpha_range", "display", "layers_view", "print_report", "report", "table"]
