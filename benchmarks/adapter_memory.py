"""Peak memory of a scan with a rank-64 LoRA on every linear layer, beside the scan of its base alone.

python benchmarks/adapter_memory.py [--layers 6]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from cpu_scan import SHARDESD, generate, run
from safetensors.numpy import save_file

RANK = 64


def adapter(folder: Path, base: Path, shapes: dict[str, tuple[int, int]]) -> int:
    """Writes the LoRA; returns the bytes of its largest pair of factors."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors, largest = {}, 0
    for name, (out, into) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        A, B = (rng.standard_normal(shape, dtype=np.float32) for shape in ((RANK, into), (out, RANK)))
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = A * 0.01, B * 0.01
        largest = max(largest, A.nbytes + B.nbytes)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return largest


def shapes(base: Path) -> dict[str, tuple[int, int]]:
    """Name → shape of the base's linear layers, from the headers."""
    found = {}
    for file in base.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name.endswith("_proj.weight")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        base = Path(root) / "base"
        generate(base, given.layers)
        largest = adapter(Path(root) / "adapter", base, shapes(base))
        print(f"largest pair of factors {largest / 1e6:.1f} MB; largest tensor 23.1 MB in bf16, 46.1 MB in float32")
        for name, folder in (("base alone", base), ("base + rank-64 adapter", Path(root) / "adapter")):
            results = [result for _ in range(given.repeat) if (result := run(SHARDESD, str(folder), "0"))]
            peaks = sorted(peak / 1e6 for _, peak in results)
            print(f"{name:<28}{min(seconds for seconds, _ in results):>8.1f} s   peak MB {peaks}", flush=True)


if __name__ == "__main__":
    main()
