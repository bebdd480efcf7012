"""`shardesd refit` of 100 stored models of 200 matrices of 1000 λ, and its DKS fit beside WeightWatcher's on these λ.

    python benchmarks/refit.py [--models 100] [--matrices 200] [--eigs 1000] [--processes 2] [--compared 20]

Seconds are wall-clock; the refits run in a process of their own, imports and all tables included. The fits are compared
in this process, one after the other, on one core, both on λ in memory. WeightWatcher is left out where it isn't
installed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shardesd.metrics import fit_power_law, measure
from shardesd.options import ScanOptions
from shardesd.records import Row
from shardesd.results import ModelStore


def spectrum(generator: np.random.Generator, count: int) -> np.ndarray:
    """λ of a heavy-tailed layer: a Marchenko-Pastur-like bulk and a power-law tail."""
    bulk = generator.gamma(2.0, 0.5, count - count // 5)
    tail = (1 - generator.random(count // 5)) ** (-1 / 1.8) * 1.5
    return np.sort(np.concatenate([bulk, tail]))


def store(out: Path, models: int, matrices: int, count: int) -> None:
    generator = np.random.default_rng(0)
    options = ScanOptions()
    for m in range(models):
        with ModelStore(out, f"org/model-{m}", None) as kept:
            kept.begin({"options": options.numbers(), "shardesd": "0", "weights": m}, overwrite=False)
            for i in range(matrices):
                eigs = spectrum(generator, count)
                row = Row(model_id=f"org/model-{m}", longname=f"layers.{i}.proj", M=count, N=count, dtype="F32")
                values = measure(eigs, N=count, options=options)
                kept.append(Row(**{**{n: getattr(row, n) for n in row.__slots__}, **values}), eigs)
            kept.finish(order=lambda name: int(name.split(".")[1]), provenance={"options": {}})


def refit(out: Path, method: str, processes: int) -> float:
    code = (
        "import sys; from shardesd.options import ScanOptions; from shardesd.refitter import refit\n"
        "if __name__ == '__main__':\n"
        "    done = list(refit(sys.argv[1], ScanOptions(fix_fingers=sys.argv[2]), processes=int(sys.argv[3])))\n"
        "    assert done and not any(model.problem for model in done), done[:3]\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "refit_once.py"
        script.write_text(code)
        started = time.perf_counter()
        subprocess.run([sys.executable, str(script), str(out), method, str(processes)], check=True)
        return time.perf_counter() - started


def compare(count: int, compared: int) -> None:
    try:
        from weightwatcher.WW_powerlaw import WWFit
    except ImportError:
        print("WeightWatcher is not installed: its fit is left out")
        return
    generator = np.random.default_rng(1)
    spectra = [spectrum(generator, count) for _ in range(compared)]
    times: dict[str, list[float]] = {"shardesd": [], "WeightWatcher": []}
    worst = 0.0
    for eigs in spectra:
        started = time.perf_counter()
        ours = fit_power_law(eigs, method="DKS")
        times["shardesd"].append(time.perf_counter() - started)
        started = time.perf_counter()
        theirs = WWFit(eigs, xmin=None, xmax=np.max(eigs), distribution="power_law")
        times["WeightWatcher"].append(time.perf_counter() - started)
        worst = max(worst, abs(ours.alpha - theirs.alpha) / theirs.alpha)
    ms = {name: 1000 * statistics.median(found) for name, found in times.items()}
    print(
        f"DKS of {count} λ, median of {compared}: shardesd {ms['shardesd']:.2f} ms, "
        f"WeightWatcher {ms['WeightWatcher']:.2f} ms ({ms['WeightWatcher'] / ms['shardesd']:.1f} ×)"
    )
    print(f"largest relative difference of α: {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--matrices", type=int, default=200)
    parser.add_argument("--eigs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--compared", type=int, default=20)
    given = parser.parse_args()
    compare(given.eigs, given.compared)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        store(out, given.models, given.matrices, given.eigs)
        print(f"{given.models} models of {given.matrices} matrices of {given.eigs} λ, {given.processes} processes")
        for method in ("xmin_mid", "xmin_peak", "DKS"):
            print(f"refit --fix-fingers {method}: {refit(out, method, given.processes):.1f} s", flush=True)


if __name__ == "__main__":
    main()
