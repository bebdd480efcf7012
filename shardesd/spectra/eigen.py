"""Eigenvalues of Gram matrices: on a GPU those of one size together, by the fastest solver that is there.

1. `two_stage`: our own batched kernels, where float64 is fast and the package cuda-core is installed.
2. `cusolver`: cuSOLVER's batched solver, for small matrices.
3. torch.linalg.eigvalsh, one at a time; on the CPU always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardesd.spectra import cusolver, two_stage
from shardesd.spectra.policy import FAST_RATIO, single_to_double_ratio

if TYPE_CHECKING:
    import torch


def eigvalsh(gram_NN: torch.Tensor) -> np.ndarray:
    """Ascending eigenvalues, float64, of one symmetric matrix; its lower triangle is read.

    Raises torch.linalg.LinAlgError where they don't converge.
    """
    import torch

    if gram_NN.device.type == "cuda" and _two_stage_takes(gram_NN.device, gram_NN.shape[0], 1):
        first: np.ndarray = eigvalsh_many(gram_NN.unsqueeze(0))[0]
        return first
    eigs: np.ndarray = torch.linalg.eigvalsh(gram_NN).to("cpu", torch.float64).numpy()
    return eigs


def eigvalsh_many(gram_BNN: torch.Tensor) -> np.ndarray:
    """Ascending eigenvalues (B, n), float64, of matrices on a GPU; which it may overwrite.

    A row is NaN where they don't converge, or where the matrix holds NaN or Inf.
    """
    import torch

    B, n, _ = gram_BNN.shape
    if _two_stage_takes(gram_BNN.device, n, B):
        eigs_BN, verdict_B = two_stage.eigvalsh_batched(gram_BNN)
        two_stage.recompute(gram_BNN, eigs_BN, verdict_B)
    elif B > 1 and n <= cusolver.LARGEST_N and cusolver.available():
        eigs_BN, info_B = cusolver.eigvalsh_batched(gram_BNN)
        eigs_BN[info_B != 0] = torch.nan
    else:
        eigs_BN = torch.stack([_or_nan(gram_NN) for gram_NN in gram_BNN])
    eigs: np.ndarray = eigs_BN.to("cpu", torch.float64).numpy()
    return eigs


def why_not_batched(index: int) -> str | None:
    """Why CUDA device `index` can't use the batched solver, in one line; None where it does. Compiles it."""
    import torch

    if single_to_double_ratio(index) > FAST_RATIO:
        return "its float64 is slow"
    return two_stage.unavailable_reason(torch.device("cuda", index))


def batch_size(n: int) -> int:
    """How many matrices of size n to solve together: more gains little, and takes memory."""
    return 64 if n <= 1024 else 32 if n <= 2048 else 16 if n <= 4096 else 4 if n <= 8192 else 1


def device_bytes(n: int) -> int:
    """Device memory for one Gram of size n and its share of the work arrays."""
    work = two_stage.workspace_bytes(n, 1) if 2 <= n <= 8192 else 0
    return 8 * n * n + max(work, 24 * n * n)


def _two_stage_takes(device: torch.device, n: int, batch: int) -> bool:
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    if n < 2 or not two_stage.worthwhile(n, batch) or why_not_batched(index) is not None:
        return False
    return n <= two_stage.largest_n(device)


def _or_nan(gram_NN: torch.Tensor) -> torch.Tensor:
    import torch

    try:
        eigs_N: torch.Tensor = torch.linalg.eigvalsh(gram_NN)
        return eigs_N
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.full(gram_NN.shape[:1], torch.nan, dtype=gram_NN.dtype, device=gram_NN.device)
