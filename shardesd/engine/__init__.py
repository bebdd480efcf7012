"""Devices, the memory budget and the queue that carry the work. Knows nothing of what the work computes."""

from shardesd.engine.devices import Device, available_memory, cpu_count, cpu_device, discover, peak_memory
from shardesd.engine.queue import Engine
from shardesd.engine.work import DeviceState, Outcome, State, Task, Trouble

__all__ = [
    "Device",
    "DeviceState",
    "Engine",
    "Outcome",
    "State",
    "Task",
    "Trouble",
    "available_memory",
    "cpu_count",
    "cpu_device",
    "discover",
    "peak_memory",
]
