"""What a person sees: progress on stderr while a scan runs, and its table and report on stdout afterwards.

Pure functions of events and tables; the ranges of α and their sources are in `alpha`.
"""

from __future__ import annotations

from shardesd.show.alpha import AlphaRange, alpha_range
from shardesd.show.batch_display import batch_display
from shardesd.show.batch_plain import plan_lines
from shardesd.show.digest import digest_lines
from shardesd.show.display import display
from shardesd.show.inspection import inspection_lines
from shardesd.show.layers import layers_view
from shardesd.show.report import print_report, report, table

__all__ = [
    "AlphaRange",
    "alpha_range",
    "batch_display",
    "digest_lines",
    "display",
    "inspection_lines",
    "layers_view",
    "plan_lines",
    "print_report",
    "report",
    "table",
]
