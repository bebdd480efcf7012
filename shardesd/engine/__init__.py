"""Devices, the memory budget and the queue that carry the work. Knows nothing of what the work computes."""

from shardesd.engine.devices import (
    Device,
    available_memory,
    cpu_count,
    cpu_device,
    cuda_uuids,
    discover,
    has_context,
    peak_memory,
)
from shardesd.engine.neighbours import GpuUse, Neighbours, Visible, load_nvml, visible_gpus
from shardesd.engine.queue import Engine
from shardesd.engine.shared import SharedEngine
from shardesd.engine.threads import close_at_exit
from shardesd.engine.work import DeviceState, Outcome, State, Task, Trouble

__all__ = [
    "Device",
    "DeviceState",
    "Engine",
    "GpuUse",
    "Neighbours",
    "Outcome",
    "SharedEngine",
    "State",
    "Task",
    "Trouble",
    "Visible",
    "available_memory",
    "close_at_exit",
    "cpu_count",
    "cpu_device",
    "cuda_uuids",
    "discover",
    "has_context",
    "load_nvml",
    "peak_memory",
    "visible_gpus",
]
