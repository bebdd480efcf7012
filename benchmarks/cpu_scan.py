"""One Llama-shaped checkpoint on the CPU, shardesd beside what a user would run instead; and how memory grows.

    python benchmarks/cpu_scan.py [--layers 6] [--repeat 1] [--skip weightwatcher]

Each procedure runs in a process of its own. Seconds are wall-clock, imports included. Memory is the process's peak
less that of an idle `python -c "import torch"`. All load the whole checkpoint or, as shardesd, don't; all analyse the
same matrices, without the embedding. WeightWatcher is left out where it isn't installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IDLE = "import torch"

SVDVALS = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
weights = {}
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    weights.update(load_file(file))
weights = {name: W.float() for name, W in weights.items()}
for name, W in weights.items():
    if W.ndim == 2 and "embed" not in name:
        eigs = torch.linalg.svdvals(W) ** 2
"""

GRAM32 = SVDVALS.replace(
    "torch.linalg.svdvals(W) ** 2", "torch.linalg.eigvalsh(W @ W.T if W.shape[0] < W.shape[1] else W.T @ W)"
)

WEIGHTWATCHER = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
import weightwatcher
weights = {}
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    weights.update(load_file(file))
model = torch.nn.Module()
for name, W in weights.items():
    if W.ndim == 2 and "embed" not in name:
        layer = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(W.float(), requires_grad=False)
        model.add_module(name.removesuffix(".weight").replace(".", "_"), layer)
del weights
print(len(weightwatcher.WeightWatcher(model=model).analyze()))
"""

SHARDESD = """
import sys, tempfile, shardesd
with tempfile.TemporaryDirectory() as out:
    result = shardesd.scan(sys.argv[1], out=out, device="cpu", cache=False, max_memory=int(sys.argv[2]) or None)
    print(len(result.layers))
"""


def run(code: str, *arguments: str) -> tuple[float, int] | None:
    """Seconds and peak resident bytes of ``python -c code``; None where it failed."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print(f"    failed: {message.strip().splitlines()[-1] if message.strip() else process.returncode}")
        return None
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def generate(folder: Path, layers: int) -> float:
    """Makes the checkpoint, in a process of its own: a child's peak counts what its parent held when it was forked."""
    script = Path(__file__).with_name("checkpoints.py")
    command = [sys.executable, str(script), "llama", str(folder), "--layers", str(layers), "--vocab", "32000"]
    subprocess.run([*command, "--no-head"], check=True, stdout=subprocess.DEVNULL)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9


def compare(folder: Path, repeat: int, skip: list[str]) -> None:
    """Prints a row per procedure: median seconds, how often it takes shardesd's time, peak memory above idle.

    They take turns, so that what else the machine does falls on all of them; the ratio is the median of the turns'.
    """
    idle = min(peak for _, peak in filter(None, (run(IDLE) for _ in range(3))))
    print(f"idle `import torch`: {idle / 1e6:.0f} MB\n")
    procedures = {
        "shardesd scan (float64 Gram)": SHARDESD,
        "load all, fp32 Gram + eigvalsh": GRAM32,
        "load all, fp32 torch.linalg.svdvals": SVDVALS,
        "WeightWatcher analyze()": WEIGHTWATCHER,
    }
    for name in list(procedures):
        if any(word.lower() in name.lower() for word in skip):
            del procedures[name]
    turns = [{name: run(code, str(folder), "0") for name, code in procedures.items()} for _ in range(repeat)]
    first = next(iter(procedures))
    print(f"{'procedure':<44}{'seconds':>9}{'× shardesd':>12}{'MB above idle':>15}")
    for name in procedures:
        done = [(turn[name], turn[first]) for turn in turns if turn[name] and turn[first]]
        if done:
            seconds = statistics.median(own[0] for own, _ in done)
            ratio = statistics.median(own[0] / other[0] for own, other in done)
            peak = statistics.median(own[1] for own, _ in done)
            print(f"{name:<44}{seconds:>9.1f}{ratio:>12.2f}{(peak - idle) / 1e6:>15.0f}", flush=True)


def growth(root: Path, layers: int) -> None:
    """Prints shardesd's peak on models of 1, 2 and 4 times as many layers."""
    idle = min(peak for _, peak in filter(None, (run(IDLE) for _ in range(3))))
    print(f"\n{'layers':<10}{'GB':>8}{'MB above idle':>16}")
    for factor in (1, 2, 4):
        folder = root / f"growth-{factor}"
        size = generate(folder, layers * factor)
        result = run(SHARDESD, str(folder), "0")
        if result:
            print(f"{layers * factor:<10}{size:>8.2f}{(result[1] - idle) / 1e6:>16.0f}", flush=True)
        for file in folder.iterdir():
            file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--skip", action="append", default=[], help="a word of a procedure's name, or 'growth'")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "llama"
        size = generate(folder, given.layers)
        print(f"Llama-shaped: hidden 2048, MLP 5632, {given.layers} layers, bf16, {size:.2f} GB")
        compare(folder, given.repeat, given.skip)
        if "growth" not in given.skip:
            growth(Path(root), given.layers // 2)


if __name__ == "__main__":
    main()
