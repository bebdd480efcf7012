"""Devices, the memory budget and the queue that carry the work. Knows nothing of what the work computes."""

from shardesd.engine.devices import Device, available_memory, cpu_count, discover, peak_memory
from shardesd.engine.queue import Engine, Outcome, Task

__all__ = ["Device", "Engine", "Outcome", "Task", "available_memory", "cpu_count", "discover", "peak_memory"]
