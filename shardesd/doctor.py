"""`shardesd doctor`: whether this machine can do the main job, and what to do about what it finds."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardesd.engine import available_memory, cpu_count, load_nvml, visible_gpus
from shardesd.errors import ResultsError
from shardesd.results import make_folders
from shardesd.source import cache_folder, endpoint, fault_of

Grade = Literal["ok", "note", "bad"]
"""``bad``: the main job, a scan, can't run. ``note``: it can, but something is missing or slow."""

PACKAGES = ("numpy", "scipy", "torch", "polars", "safetensors", "huggingface_hub", "nvidia-ml-py")
_LITTLE_MEMORY = 2_000_000_000
_LITTLE_DISK = 10_000_000_000
_SIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    name: str
    grade: Grade
    found: str
    remedy: str = ""


def examine(out: Path, *, network: bool = True) -> Iterator[Finding]:
    """The findings, one after the other. Without `network` the Hub is not asked.

    Nothing stays on the disk but compiled kernels, where a scan finds them (`spectra.two_stage`).
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("cpu", _cpu),
        ("memory", _memory),
        ("gpus", _gpus),
        ("output", lambda: _output(out)),
        ("cache", _cache),
    ]
    if network:
        checks.append(("hub", _hub))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            # A check that fails in a way that nobody foresaw is a finding too, and the others go on.
            yield Finding(
                name=name,
                grade="note",
                found=f"could not be looked at: {type(error).__name__}: {_line(error)}",
                remedy="please report it",
            )


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding(name="python", grade="ok", found=found)  # an older one could not have installed shardesd


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        lost = ", ".join(missing)
        yield Finding(name="packages", grade="bad", found=f"missing: {lost}", remedy=f"pip install {' '.join(missing)}")
    yield Finding(name="packages", grade="ok", found=", ".join(found))


def _cpu() -> Iterator[Finding]:
    cores, host = cpu_count(), os.cpu_count() or 1
    less = f" of {host} (affinity, OMP_NUM_THREADS or the cgroup's quota)" if cores < host else ""
    error, seconds = _solve("cpu")
    if error > 1e-10:
        found = f"a tiny solve on {cores} cores is off by {error:.1e}"
        yield Finding(name="cpu", grade="bad", found=found, remedy="reinstall numpy and scipy")
        return
    unit = "core" if cores == 1 else "cores"
    yield Finding(name="cpu", grade="ok", found=f"{cores} {unit}{less}, a tiny solve took {seconds * 1000:.0f} ms")


def _memory() -> Iterator[Finding]:
    import psutil

    free, total = available_memory(), psutil.virtual_memory().total
    limit = _cgroup_limit()
    bound = f", the cgroup allows {limit / 1e9:.1f} GB" if limit is not None and limit < total else ""
    found = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB{bound}"
    if free < _LITTLE_MEMORY:
        remedy = "free some, or set --max-memory so that large matrices fail by themselves and not the scan"
        yield Finding(name="memory", grade="note", found=found, remedy=remedy)
    else:
        yield Finding(name="memory", grade="ok", found=found)


def _cgroup_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gpus() -> Iterator[Finding]:
    import torch

    usable = torch.cuda.is_available()
    try:
        nvml: Any = load_nvml()
        visible = visible_gpus(nvml)
    except Exception as error:  # no driver, no library, or NVML's own errors
        nvml, visible = None, []
        why = _line(error)
    if nvml is None and not usable:
        yield Finding(name="gpus", grade="note", found=f"no NVIDIA driver ({why}): the CPU does the work")
        return
    if not usable:
        cuda = torch.version.cuda
        remedy = (
            "install a CUDA build of torch: https://pytorch.org/get-started"
            if cuda is None
            else f"install a driver for CUDA {cuda}, or look at CUDA_VISIBLE_DEVICES"
        )
        seen = f"{len(visible)} visible to the driver, none usable by torch {torch.__version__}"
        yield Finding(name="gpus", grade="note", found=seen, remedy=remedy)
        return
    if nvml is None:
        remedy = "pip install nvidia-ml-py; until then a batch can't see whether others use a GPU"
        yield Finding(name="gpus", grade="note", found=f"NVML can't be asked: {why}", remedy=remedy)
    else:
        driver = nvml.nvmlSystemGetDriverVersion()
        driver = driver.decode() if isinstance(driver, bytes) else driver
        yield Finding(name="gpus", grade="ok", found=f"driver {driver}, CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _gpu(index: int) -> Finding:
    import torch

    from shardesd import spectra

    name = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        model = torch.cuda.get_device_name(index)
        error, seconds = _solve(name)
    except Exception as fault:  # torch reports most of what can be wrong with a GPU as a RuntimeError
        remedy = f"leave it out with --device or CUDA_VISIBLE_DEVICES ({name} can't solve)"
        return Finding(name=name, grade="note", found=_line(fault), remedy=remedy)
    found = f"{model}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if error > 1e-10:
        found += f": a tiny solve differs from the CPU's by {error:.1e}"
        return Finding(name=name, grade="note", found=found, remedy="leave it out, and have it looked at")
    found += f", a tiny solve took {seconds * 1000:.0f} ms, equal to the CPU's"
    try:
        without = spectra.why_not_batched(index)
    except Exception as fault:
        full = spectra.trouble(fault) == "memory"
        remedy = "wait until its memory is free, or choose other GPUs with --device" if full else ""
        return Finding(name=name, grade="note", found=f"{found}; no batched solver now: {_line(fault)}", remedy=remedy)
    if without:
        found += f"; no batched solver: {without}"
    return Finding(name=name, grade="note" if spectra.missing_batched(index) else "ok", found=found)


def _solve(device: str) -> tuple[float, float]:
    """(largest error relative to λmax, seconds) of a small matrix's λ on a device, against numpy's SVD."""
    from shardesd import spectra
    from shardesd.checkpoint import StoredMatrix

    W_MN = np.random.default_rng(0).standard_normal((_SIDE, _SIDE // 2))
    expected = np.sort(np.linalg.svd(W_MN, compute_uv=False) ** 2)
    started = time.perf_counter()
    found = spectra.compute([StoredMatrix(W_MN, "F64")], device=device)
    seconds = time.perf_counter() - started
    return float(np.abs(found.eigs - expected).max() / expected[-1]), seconds


def _output(out: Path) -> Iterator[Finding]:
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        make_folders([out])
    except ResultsError as error:
        yield Finding(name="output", grade="bad", found=str(error), remedy="choose another --out")
        return
    free = shutil.disk_usage(out).free
    with suppress(OSError):  # another process has begun to use it
        for folder in new:
            folder.rmdir()
    yield Finding(name="output", grade="ok", found=f"{out} can be written, {free / 1e9:.1f} GB free")


def _cache() -> Iterator[Finding]:
    folder = Path(cache_folder())
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{folder}, {free / 1e9:.1f} GB free"
    if not os.access(place, os.W_OK):
        remedy = "set HF_HOME to a folder that can be written"
        yield Finding(name="cache", grade="note", found=f"{folder} can't be written", remedy=remedy)
    elif free < _LITTLE_DISK:
        remedy = "free some, set HF_HOME to a folder on a larger disk, or scan with --evict or --fetch ranges"
        yield Finding(name="cache", grade="note", found=found, remedy=remedy)
    else:
        yield Finding(name="cache", grade="ok", found=found)


def _hub() -> Iterator[Finding]:
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding(
            name="hub", grade="note", found="HF_HUB_OFFLINE is set", remedy="unset it to scan what is not cached"
        )
        return
    token = get_token()
    try:
        if token:
            who = HfApi().whoami(token).get("name", "?")
            yield Finding(name="hub", grade="ok", found=f"{endpoint()} answers, the token is {who}'s")
            return
        next(iter(HfApi().list_models(limit=1)), None)
    except Exception as error:
        fault = fault_of(error)
        if fault.status == 401:
            remedy = "make a new token at https://huggingface.co/settings/tokens, or unset HF_TOKEN"
            yield Finding(name="hub", grade="note", found=f"{endpoint()} refuses the token", remedy=remedy)
        else:
            remedy = "check the network, the proxy and HF_ENDPOINT; local folders can be scanned all the same"
            yield Finding(
                name="hub", grade="note", found=f"{endpoint()} can't be reached: {fault.detail}", remedy=remedy
            )
        return
    remedy = "set HF_TOKEN or run `hf auth login` for gated models and more requests"
    yield Finding(name="hub", grade="note", found=f"{endpoint()} answers, there is no token", remedy=remedy)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
