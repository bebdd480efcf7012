"""Many models from a list, unattended: planned, claimed, scanned one after the other or side by side, and summed up."""

from __future__ import annotations

from shardesd.batch.claims import Claim, Claims
from shardesd.batch.control import Metrics, configuration
from shardesd.batch.failures import Failure, classify
from shardesd.batch.listing import ModelList, Problem, as_list, read_list
from shardesd.batch.log import log_file
from shardesd.batch.many import scan_many
from shardesd.batch.model import ADAPTER_RELATIONS, ListRow, identified
from shardesd.batch.plan import Plan, Planned, make_plan, unmet
from shardesd.batch.runner import Batch
from shardesd.batch.tables import Ledger, read_failures

__all__ = [
    "ADAPTER_RELATIONS",
    "Batch",
    "Claim",
    "Claims",
    "Failure",
    "Ledger",
    "ListRow",
    "Metrics",
    "ModelList",
    "Plan",
    "Planned",
    "Problem",
    "as_list",
    "classify",
    "configuration",
    "identified",
    "log_file",
    "make_plan",
    "read_failures",
    "read_list",
    "scan_many",
    "unmet",
]
