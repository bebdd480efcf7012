"""Eigenvalues of many symmetric matrices at once on a CUDA device, in two stages (dense to band, band to tridiagonal).

One call takes a batch of equal size. Everything runs on the caller's stream and nothing synchronises: the verdicts stay
on the device, and the caller looks at them whenever it reads the eigenvalues anyway. (Beyond n = 4096 a stream hasn't
room for all launches: the call waits for the first of them.)

Needs compute capability 9.0 (thread-block clusters) and the package cuda-core: `unavailable_reason`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Bits of a verdict; 0 is a sound result. Values as in kernels/common.cuh.
NONFINITE, TRACE, FROBENIUS, STUCK = 1, 2, 4, 8
TOLERANCE = 1e-13


def unavailable_reason(device: torch.device) -> str | None:
    """None where the solver runs on `device`, else why not, in one line.

    The first call for a device compiles the kernels (seconds) or finds them in shardesd's folder among the user's
    caches. Raises what CUDA raises where there is no memory for them or the device is lost.
    """
    if device.type != "cuda":
        return "the batched eigensolver needs a CUDA device"
    import torch

    from shardesd.spectra.two_stage.loaded import unavailable_reason as of_device

    return of_device(torch.cuda.current_device() if device.index is None else device.index)


def load_kept(device: torch.device) -> None:
    """Loads what the solver needs on `device`, where it needn't be compiled; never raises."""
    from shardesd.spectra.two_stage.loaded import load_kept as on_device

    on_device(device.index)


def largest_n(device: torch.device) -> int:
    """The largest matrix that the solver takes on `device`: 8192 on an H100."""
    import torch

    from shardesd.spectra.two_stage.loaded import kernels

    return kernels(torch.cuda.current_device() if device.index is None else device.index).largest_n


def worthwhile(n: int, batch: int) -> bool:
    """Whether a batch is faster here than by cuSOLVER, batched or not, as measured on an H100 (docs/performance.md)."""
    return n >= 768 if batch == 1 else n > 128 or (n > 64 and batch >= 32)


def workspace_bytes(n: int, batch: int) -> int:
    """Device memory that `eigvalsh_batched` needs beside its input, in bytes."""
    from shardesd.spectra.two_stage.layout import layout

    return layout(n, batch).nbytes


def eigvalsh_batched(
    gram_Bnn: torch.Tensor, *, workspace: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues of every matrix of a batch, float64, and a verdict for each.

    gram_Bnn: (B, n, n) float64 or float32 on a CUDA device, 2 <= n <= `largest_n`; the lower triangles are read,
        nothing is written. float32 is widened on the way in; the arithmetic is float64 throughout.
    workspace: uint8, at least `workspace_bytes(n, B)`; allocated when None.
    Raises ValueError for another shape, dtype, device or too small a workspace.
    Returns eigs (B, n) float64 and verdict (B,) int32, both on the device and not yet computed when this returns. A
    verdict of 0 says that the trace and the Frobenius norm agree with the matrix's own to 1e-13 relative; another is a
    sum of NONFINITE, TRACE, FROBENIUS and STUCK, and that row must not be used (see `recompute`).
    """
    from shardesd.spectra.two_stage.solve import solve

    return solve(gram_Bnn, workspace, TOLERANCE)


def recompute(gram_Bnn: torch.Tensor, eigs_Bn: torch.Tensor, verdict_B: torch.Tensor) -> list[int]:
    """Replaces the rows whose verdict is not 0 by cuSOLVER's eigenvalues; returns which. Synchronises.

    Rows of matrices that hold NaN or Inf, and those that don't converge, are NaN.
    """
    import torch

    bad: dict[int, int] = {i: verdict for i, verdict in enumerate(verdict_B.tolist()) if verdict}
    for i, verdict in bad.items():
        eigs_Bn[i] = torch.nan
        if not verdict & NONFINITE:
            with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                eigs_Bn[i] = torch.linalg.eigvalsh(gram_Bnn[i].double())
    return list(bad)
