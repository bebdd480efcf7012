"""Peak memory of a scan of 64 experts × 4 layers: stacked and per expert, FP8 and bfloat16.

    python benchmarks/expert_memory.py [--experts 64] [--layers 4] [--repeat 3]

Each scan runs in a process of its own; memory is its peak above that of an idle one with the same libraries loaded. The
tables must be the same but for names, times and element types.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cpu_scan import run
from memory_budget import idle_peak

ROWS, COLUMNS, BLOCK = 768, 1024, 128
SCAN = """
import sys, shardesd
result = shardesd.scan(sys.argv[1], device="cpu", cache=False)
assert not len(result.failed), result.failed["reason"].to_list()
kept = result.layers.sort("longname").select("M", "N", "num_evals", "alpha", "norm", "spectral_norm", "entropy")
kept.write_csv(sys.argv[2])
"""


def write(folder: Path, *, fp8: bool, stacked: bool, experts: int, layers: int) -> None:
    """The same weights in all four ways, one layer at a time."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]} if fp8 else {}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if fp8 else {}))
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        codes = torch.randn(experts, ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
        # Powers of two: in bfloat16, the products are exact too.
        grid = torch.randint(-4, 4, (experts, ROWS // BLOCK, COLUMNS // BLOCK), generator=generator)
        scale = torch.exp2(grid.float())
        base = f"model.layers.{layer}.mlp.experts"
        if fp8:
            parts = {"": codes, "_scale_inv": scale}
        else:
            wide = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
            parts = {"": (codes.float() * wide).bfloat16()}
        tensors = {}
        for end, value in parts.items():
            if stacked:
                tensors[f"{base}.down_proj{end}"] = value
            else:
                for i in range(experts):
                    tensors[f"{base}.{i}.down_proj.weight{end}"] = value[i].contiguous()
        save_file(tensors, folder / f"model-{layer + 1:05}-of-{layers:05}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        folder, element, way = given.write
        write(Path(folder), fp8=element == "fp8", stacked=way == "1", experts=given.experts, layers=given.layers)
        return
    idle = idle_peak(ROWS)
    size = ROWS * COLUMNS / 1e6
    print(f"idle: {idle / 1e6:.0f} MB; an expert: {size:.1f} MB in FP8, {4 * size:.1f} in float32")
    print(f"{'elements':<10}{'stored':<12}{'MB of a stack':>14}{'MB above idle':>15}{'seconds':>9}")
    tables = []
    with tempfile.TemporaryDirectory() as root:
        for element in ("fp8", "bf16"):
            for way in ("per expert", "stacked"):
                folder, table = Path(root) / f"{element}-{way}", Path(root) / f"{element}-{way}.csv"
                # In a process of its own: a child's peak counts what its parent held when it was forked.
                sizes = ["--experts", str(given.experts), "--layers", str(given.layers)]
                command = [
                    sys.executable,
                    __file__,
                    *sizes,
                    "--write",
                    str(folder),
                    element,
                    str(int(way == "stacked")),
                ]
                subprocess.run(command, check=True)
                runs = [found for _ in range(given.repeat) if (found := run(SCAN, str(folder), str(table)))]
                above = sorted((peak - idle) / 1e6 for _, peak in runs)[len(runs) // 2]
                stack = given.experts * size * (1 if element == "fp8" else 2)
                seconds = min(seconds for seconds, _ in runs)
                print(f"{element:<10}{way:<12}{stack:>14.0f}{above:>15.0f}{seconds:>9.1f}", flush=True)
                tables.append(sorted(table.read_text().splitlines()))
    print("tables: " + ("the same" if all(table == tables[0] for table in tables) else "NOT the same"))


if __name__ == "__main__":
    main()
