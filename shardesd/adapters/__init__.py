"""Adapters: the delta for one base tensor at a time, exactly as peft would merge it, or the reason why not.

`resolve_chain` or `load_adapter` opens what lies on disk, `plan_merge` decides everything from headers, and `apply`,
`Merger`, `delta` and `delta_factors` do the arithmetic of one tensor.
"""

from shardesd.adapters.base import BaseReference, Chain, base_reference, resolve_chain
from shardesd.adapters.config import AdapterConfig, parse_config
from shardesd.adapters.edits import (
    Edit,
    Merger,
    additive_only,
    apply,
    delta,
    delta_factors,
    merged_shape,
    rounding,
)
from shardesd.adapters.load import Adapter, adapter_from_tensors, adapters_from_peft, is_adapter, load_adapter
from shardesd.adapters.merged import MergedCheckpoint, open_peft
from shardesd.adapters.names import base_name, looks_like_adapter
from shardesd.adapters.plan import MergePlan, Virtual, plan_merge
from shardesd.adapters.values import CONFIG_NAME

__all__ = [
    "CONFIG_NAME",
    "Adapter",
    "AdapterConfig",
    "BaseReference",
    "Chain",
    "Edit",
    "MergePlan",
    "MergedCheckpoint",
    "Merger",
    "Virtual",
    "adapter_from_tensors",
    "adapters_from_peft",
    "additive_only",
    "apply",
    "base_name",
    "base_reference",
    "delta",
    "delta_factors",
    "is_adapter",
    "load_adapter",
    "looks_like_adapter",
    "merged_shape",
    "open_peft",
    "parse_config",
    "plan_merge",
    "resolve_chain",
    "rounding",
]
