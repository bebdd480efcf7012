"""One checkpoint on GPUs, shardesd beside what a user would run instead. Needs CUDA.

    python benchmarks/gpu_scan.py dense [--layers 6]     7B-shaped: hidden 4096, MLP 11008, bf16
    python benchmarks/gpu_scan.py experts [--experts 512] 512 experts of 768 × 2048 beside a few dense matrices
    python benchmarks/gpu_scan.py devices                one GPU against two

Seconds are wall-clock after imports and CUDA's start, though not the batched solver's, from a warm page cache
(`--cold`: from the disk, as far as the machine lets go of what it holds); medians of `--repeat` processes, and
of the `--later` scans that follow in each. Host memory is a process's peak above what it had before the first scan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HEAD = """
import json, os, resource, sys, time
from pathlib import Path
import torch
for index in range(torch.cuda.device_count()):
    torch.linalg.eigvalsh(torch.eye(64, device=f"cuda:{index}", dtype=torch.float64))
    torch.linalg.svdvals(torch.eye(64, device=f"cuda:{index}"))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder, device = sys.argv[1], sys.argv[2]
files = sorted(Path(folder).glob("*.safetensors"))
if sys.argv[3] == "cold":
    for file in files:
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""
TAIL = """
torch.cuda.synchronize()
print(json.dumps({"seconds": [time.perf_counter() - started], "peak": peak() - before}))
"""
SHARDESD = (
    HEAD
    + """
import gc
import polars, shardesd, shardesd.scanner
from shardesd import spectra
gc.freeze()  # as the command does
before, seconds = peak(), []
for number in range(1 + int(sys.argv[4])):
    started = time.perf_counter()
    result = shardesd.scan(folder, device=device, cache=False)
    seconds.append(time.perf_counter() - started)
missing = [reason for i in range(torch.cuda.device_count()) if (reason := spectra.missing_batched(i))]
rows = {"rows": len(result.layers), "failed": len(result.failed), "missing": missing}
print(json.dumps({"seconds": seconds, "peak": peak() - before} | rows))
"""
)
LEFT_OUT = "spectra.two_stage.unavailable_reason = lambda device: 'left out'"
CUSOLVER = SHARDESD.replace("import spectra\n", f"import spectra\n{LEFT_OUT}\n")
KEPT = "import tempfile; kept = tempfile.TemporaryDirectory()" + SHARDESD.replace("cache=False", "cache_dir=kept.name")
READ = (
    HEAD
    + """
buffer = bytearray(1 << 24)
before, started = peak(), time.perf_counter()
for file in files:
    with open(file, "rb", buffering=0) as stream:
        while stream.readinto(buffer): pass
"""
    + TAIL
)
SEQUENTIAL = (
    HEAD
    + """
from safetensors import safe_open
before, started = peak(), time.perf_counter()
busy = 0.0
for file in files:
    with safe_open(file, "pt") as shard:
        for name in shard.keys():
            W = shard.get_tensor(name)
            for W in (W if W.ndim == 3 else [W] if W.ndim == 2 else []):
                W = W.to("cuda"); torch.cuda.synchronize(); t = time.perf_counter()
                W = W.double()
                torch.linalg.eigvalsh(W @ W.mT if W.shape[0] < W.shape[1] else W.mT @ W).cpu()
                busy += time.perf_counter() - t
"""
    + TAIL.replace('"peak"', '"busy": busy, "peak"')
)
COMMON = (
    HEAD
    + """
from safetensors.torch import load_file
before, started = peak(), time.perf_counter()
weights = {}
for file in files: weights.update(load_file(file))
weights = {name: W.float() for name, W in weights.items()}
for name, W in weights.items():
    for W in (W if W.ndim == 3 else [W] if W.ndim == 2 else []):
        (torch.linalg.svdvals(W.to("cuda")) ** 2).cpu()
"""
    + TAIL
)


def run(code: str, folder: Path, device: str, cold: bool, later: int) -> dict[str, Any] | None:
    words = [str(folder), device, "cold" if cold else "warm", str(later)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        print("    failed:", done.stderr.strip().splitlines()[-1:], flush=True)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(
    name: str, code: str, folder: Path, device: str, repeat: int, base: float, *, cold: bool = False, later: int = 0
) -> float:
    """A line of the table, one more for `later` scans of a process; gives what the next lines are compared with."""
    results = [result for _ in range(repeat) if (result := run(code, folder, device, cold, later))]
    if not results:
        return base
    peak = statistics.median(result["peak"] for result in results)
    more = {key: value for key, value in results[-1].items() if key not in ("seconds", "peak")}
    first = statistics.median(result["seconds"][0] for result in results)
    print(f"{name:<48}{first:>9.3f}{first / (base or first):>12.1f}{peak / 1e6:>10.0f}   {more or ''}", flush=True)
    if later:
        seconds = statistics.median(each for result in results for each in result["seconds"][1:])
        print(f"    {f'later ones of its process ({later})':<44}{seconds:>9.3f}", flush=True)
    return base or first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["dense", "experts", "devices"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3, help="processes")
    parser.add_argument("--later", type=int, default=24, help="scans more in each: of eight, medians move by a tenth")
    parser.add_argument("--model", type=Path, help="a checkpoint that is there, instead of making one")
    parser.add_argument("--cold", action="store_true", help="only: read from the disk, and scanned from it")
    parser.add_argument("--quick", action="store_true", help="leave the common procedure out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = given.model or Path(root) / "model"
        script = [sys.executable, str(Path(__file__).with_name("checkpoints.py"))]
        shape = ["llama", str(folder), "--hidden", "4096", "--mlp", "11008", "--layers", str(given.layers)]
        if given.kind == "experts":
            shape = ["experts", str(folder), "--experts", str(given.experts)]
        if not given.model:
            print(subprocess.run([*script, *shape], check=True, capture_output=True, text=True).stdout.strip())
        subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(), torch.__version__)"], check=True
        )
        print(f"{'procedure':<48}{'seconds':>9}{'× the first':>12}{'host MB':>10}")
        if given.cold:
            base = row("read every file once", READ, folder, "", given.repeat, 0.0, cold=True)
            row("shardesd scan --device cuda:0", SHARDESD, folder, "cuda:0", given.repeat, base, cold=True)
            return
        if given.kind == "devices":
            base = 0.0
            for devices in ("cuda:0", "cuda:0,cuda:1"):
                base = row(devices, SHARDESD, folder, devices, given.repeat, base, later=given.later)
            return
        base = row("shardesd scan --device cuda:0", SHARDESD, folder, "cuda:0", given.repeat, 0.0, later=given.later)
        row("the same, cuSOLVER alone", CUSOLVER, folder, "cuda:0", given.repeat, base, later=given.later)
        row("its spectra kept", KEPT, folder, "cuda:0", given.repeat, base)
        row("read every file once", READ, folder, "", given.repeat, base)
        row("one at a time: read, float64 Gram, eigvalsh", SEQUENTIAL, folder, "", 1, base)
        if not given.quick:
            row("load all, fp32 torch.linalg.svdvals", COMMON, folder, "", 1, base)


if __name__ == "__main__":
    sys.exit(main())
