"""torch on a CPU: imported by the first solve that needs it, which on some machines few do, since it takes a second.

Where it solves, it keeps to the threads that the calling thread may use.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_local = threading.local()


def set_threads(threads: int) -> None:
    """How many one solve of the calling thread may use."""
    _local.threads = threads


def eigvalsh(gram_NN: np.ndarray) -> np.ndarray | None:
    """Ascending eigenvalues (n,) of a symmetric matrix, in its dtype; None where they don't converge.

    Its lower triangle is read.
    """
    torch = _torch()
    try:
        eigs_N: np.ndarray = torch.linalg.eigvalsh(torch.from_numpy(gram_NN)).numpy()
    except torch.linalg.LinAlgError:
        return None
    return eigs_N


def svdvals(W_MN: np.ndarray, precision: str, device: str) -> np.ndarray | None:
    """Descending singular values, in this precision, by torch on any device; None where they don't converge."""
    torch = _torch()
    try:
        W = torch.from_numpy(W_MN).to(device, getattr(torch, precision))
        sigma_K: np.ndarray = torch.linalg.svdvals(W).cpu().numpy()
    except torch.linalg.LinAlgError:
        return None
    return sigma_K


def _torch() -> Any:
    import torch

    wanted = getattr(_local, "threads", None)
    if wanted is not None:
        torch.set_num_threads(wanted)
        _local.threads = None
    return torch
