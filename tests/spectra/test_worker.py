"""On CPUs every BLAS that a solve calls keeps to the threads it is given, scipy's own too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checkpoints import one_file, random_weights

LOOK = """
import sys, shardesd
from shardesd import spectra
from shardesd.events import RowDone
from threadpoolctl import threadpool_info

def look(event):
    if isinstance(event, RowDone) and event.row.status == "ok":
        blas = [one for one in threadpool_info() if one["user_api"] == "blas"]
        assert len(blas) > 1 and {one["num_threads"] for one in blas} == {1}, blas
        print("seen")

before = {one["filepath"]: one["num_threads"] for one in threadpool_info()}
shardesd.scan(sys.argv[1], device="cpu", cache=False, on_event=look)
after = {one["filepath"]: one["num_threads"] for one in threadpool_info()}
assert all(after[path] == threads for path, threads in before.items())
"""


def test_all_blas_keep_to_their_threads_while_a_scan_goes_on(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model", random_weights(layers=2, size=64))
    done = subprocess.run([sys.executable, "-c", LOOK, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seen") > 1


LATE = """
import numpy as np
from shardesd import spectra
from threadpoolctl import threadpool_info

def found():
    return {one["filepath"]: one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

with spectra.blas_threads(1, on_cpu=False):
    before = found()
    from shardesd.spectra import lapack
    lapack.eigvalsh(np.asfortranarray(np.eye(3)))
    during = found()
after = found()
assert len(during) > len(before), "scipy's was loaded before"
assert set(during.values()) == {1}, during
assert not (set(after) - set(before)) or all(after[path] != 1 for path in after), (after, "not given back")
"""


def test_what_a_fallback_loads_keeps_to_them_too() -> None:
    """A scan on GPUs loads scipy's library only when a CPU has to help."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
