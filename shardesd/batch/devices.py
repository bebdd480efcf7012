"""The devices of a batch: the CPU, or GPUs that are watched for other people's work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from shardesd import spectra
from shardesd.engine import (
    Device,
    Engine,
    Neighbours,
    SharedEngine,
    Visible,
    available_memory,
    cuda_uuids,
    discover,
    has_context,
    load_nvml,
    visible_gpus,
)
from shardesd.events import BatchEvent, GpuChanged, Notice
from shardesd.options import GpuOptions, ScanOptions
from shardesd.scanner import make_engine


@contextmanager
def shared_engine(
    scan: ScanOptions,
    gpu: GpuOptions | None,
    *,
    emit: Callable[[BatchEvent], None],
    on_busy: Callable[[str, float], None],
    on_change: Callable[[], None],
) -> Iterator[tuple[SharedEngine, Neighbours | None]]:
    """One engine for all scans, and the watch over its GPUs, if it has any; nothing is opened where `gpu` is None.

    `on_busy` is told of each task's device and seconds, `on_change` that the devices are others than before. Raises
    `OptionError` where CUDA is asked for and missing.
    """

    def make(devices: tuple[Device, ...]) -> Engine:
        _give_back()
        return make_engine(scan, devices, lambda text: emit(Notice(message=text)))

    def use(devices: tuple[Device, ...]) -> None:
        engine.use(devices)
        on_change()

    budget = scan.max_memory or available_memory() // 2
    engine = SharedEngine(make, (), budget=budget, on_busy=on_busy, on_idle=_give_back)
    with ExitStack() as stack:
        watch = None if gpu is None else stack.enter_context(_watched(scan, gpu, emit=emit, use=use))
        stack.enter_context(engine)
        yield engine, watch


@contextmanager
def _watched(
    scan: ScanOptions,
    options: GpuOptions,
    *,
    emit: Callable[[BatchEvent], None],
    use: Callable[[tuple[Device, ...]], None],
) -> Iterator[Neighbours | None]:
    """The watch over the GPUs that ``--device`` names; None where it names the CPU, or they can't be watched.

    While the context lasts, `use` is told which devices may be used whenever that changes. Raises `OptionError` where
    CUDA is asked for and missing.
    """
    # The order of NVML, and of numbers in CUDA_VISIBLE_DEVICES; it must be set before CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    indices = _indices(scan.device)
    found = _nvml(emit) if indices else None
    if found is None:
        use(discover(scan.device, scan.gpu_memory_fraction))
        yield None
        return
    nvml, gpus = found
    taken: dict[int, Device] = {}

    def changed(change: GpuChanged) -> None:
        emit(change)
        ours = watch.ours
        for index in [index for index in taken if index not in ours]:
            del taken[index]
        for index in ours:
            # Asking what is free on a GPU takes memory on it: not before it is ours. What was refused may have passed.
            if index not in taken or not taken[index].budget:
                (taken[index],) = discover(f"cuda:{index}", scan.gpu_memory_fraction)
        use(tuple(taken[index] for index in ours))

    chosen = [gpu for gpu in gpus if gpu.index in indices]
    watch = Neighbours(nvml, chosen, options, on_change=changed, own=_allocated)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def _give_back() -> None:
    """Hands what torch keeps for later back to the GPUs: one of them may have been left to others."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU is lost, and after that torch asks none of them
            spectra.drop_buffers()
            torch.cuda.empty_cache()


def _indices(choice: str) -> list[int]:
    """CUDA numbers of the GPUs that `choice` names, without a context on any of them; none for the CPU."""
    if choice == "cpu":
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice in ("auto", "cuda"):
        return list(range(count))
    wanted = [int(name.removeprefix("cuda:")) for name in choice.split(",")]
    return wanted if all(index < count for index in wanted) else []  # `discover` has the words for it


def _nvml(emit: Callable[[BatchEvent], None]) -> tuple[Any, Any] | None:
    import torch

    try:
        nvml = load_nvml()
        gpus = visible_gpus(nvml)
    except Exception as error:  # ImportError, and NVML's own
        emit(Notice(message=f"NVML can't be asked ({error}): GPUs are used without regard to others' work"))
        return None
    matched = _as_cuda_counts(gpus, torch.cuda.device_count())
    if matched is None:
        emit(Notice(message="NVML and CUDA see different GPUs: they are used without regard to others' work"))
        return None
    return nvml, matched


def _as_cuda_counts(gpus: list[Visible], count: int) -> list[Visible] | None:
    """NVML's GPUs by the numbers that CUDA gives them, whatever order it has been told; None where they aren't the
    same. (A part of a GPU, by MIG, has a UUID of its own.)"""
    uuids = cuda_uuids(count)
    if uuids is None or any(gpu.uuid.startswith("MIG-GPU-") for gpu in gpus):  # by the GPU's, in old drivers
        return gpus if len(gpus) == count else None
    known = {gpu.uuid.partition("-")[2].replace("-", "").lower(): gpu for gpu in gpus}
    if not all(uuid in known for uuid in uuids):
        return None
    return [replace(known[uuid], index=index) for index, uuid in enumerate(uuids)]


def _allocated(index: int) -> int | None:
    """What torch has allocated on a GPU, in bytes; None where this process has no context there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not has_context(index):
        return None
    return int(torch.cuda.memory_reserved(index))
