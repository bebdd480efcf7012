"""Eigenvalues of Gram matrices: on a GPU those of one size together, by the fastest solver that is there.

1. `two_stage`: our own batched kernels, where float64 is fast and the package cuda-core is installed.
2. `cusolver`: cuSOLVER's batched solver, for small matrices.
3. torch.linalg.eigvalsh, one at a time but for the tiniest.

On a CPU, one at a time: torch's, or `lapack` where that is faster.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardesd.records import Routine
from shardesd.spectra import cusolver, driver, lapack, two_stage
from shardesd.spectra.policy import FAST_RATIO, in_one_line, single_to_double_ratio, trouble
from shardesd.spectra.worker import loaded_torch

if TYPE_CHECKING:
    import torch

_TINY = 32
"""Up to this size torch itself solves a batch at once, as fast as anything (docs/performance.md)."""

_launching: dict[torch.device, threading.Lock] = {}
"""Who launches a batch that fills the GPU."""
_launched: dict[torch.device, torch.cuda.Event] = {}
"""When the last of these is done."""

_missing: dict[int, str] = {}
"""Why CUDA devices whose float64 is fast can't use the two-stage solver, as far as it was found out."""


class Eigenvalues(NamedTuple):
    """Of a batch."""

    eigs: np.ndarray
    """(B, n), ascending, float64. A row is NaN where they don't converge, or where the matrix holds NaN or Inf."""
    routine: Routine
    again: Collection[int] = ()
    """Rows that failed the batched solver's check, and are `torch.linalg.eigvalsh`'s."""


def eigvalsh_cpu(gram_NN: np.ndarray) -> Eigenvalues:
    """Of one symmetric matrix in F order, a batch of one, which may be overwritten; its lower triangle is read."""
    n = gram_NN.shape[0]
    if lapack.faster(n, gram_NN.dtype):
        eigs_N = lapack.eigvalsh(gram_NN)
        if eigs_N is None:
            eigs_N = np.full(n, np.nan)
    else:
        eigs_N = _or_nan(loaded_torch().from_numpy(gram_NN)).numpy()
    return Eigenvalues(eigs_N[None].astype(np.float64), "eigvalsh")


def eigvalsh(gram_NN: torch.Tensor) -> Eigenvalues:
    """Of one symmetric matrix on a GPU, a batch of one; its lower triangle is read."""
    import torch

    if gram_NN.device.type == "cuda" and _two_stage_takes(gram_NN.device, gram_NN.shape[0], 1):
        return eigvalsh_many(gram_NN.unsqueeze(0))
    return Eigenvalues(_or_nan(gram_NN).to("cpu", torch.float64).numpy()[None], "eigvalsh")


def eigvalsh_many(gram_BNN: torch.Tensor) -> Eigenvalues:
    """Of matrices on a GPU, which may be overwritten; their lower triangles are read."""
    import torch

    B, n, _ = gram_BNN.shape
    if _two_stage_takes(gram_BNN.device, n, B):
        try:
            with _one_after_the_other(gram_BNN.device) if _fills(n, B) else nullcontext():
                eigs_BN, verdict_B = two_stage.eigvalsh_batched(gram_BNN)
        except Exception as error:
            if trouble(error) != "task":
                raise
            # A launch that the driver refuses, say: cuSOLVER takes over for good.
            _missing[_index(gram_BNN.device)] = f"the batched eigensolver failed: {in_one_line(error)}"
        else:
            driver.until_done(gram_BNN.device)
            again = two_stage.recompute(gram_BNN, eigs_BN, verdict_B)
            return Eigenvalues(eigs_BN.cpu().numpy(), "two_stage", again)
    if _cusolver_takes(n, B):
        try:
            eigs_BN, info_B = cusolver.eigvalsh_batched(gram_BNN)
        except Exception as error:
            if trouble(error) != "task":
                raise
            # It was refused, so the matrices are as they were.
        else:
            eigs_BN[info_B != 0] = torch.nan
            return Eigenvalues(eigs_BN.to("cpu", torch.float64).numpy(), "cusolver_batched")
    return Eigenvalues(_one_by_one(gram_BNN).to("cpu", torch.float64).numpy(), "eigvalsh")


def _fills(n: int, batch: int) -> bool:
    """Whether a batch keeps all of a GPU busy for as long as it is solved: a second one beside it gains nothing."""
    return not is_large(n) and 2 * batch > batch_size(n)


@contextmanager
def _one_after_the_other(device: torch.device) -> Iterator[None]:
    """What is launched within the context is run when what was launched within the one before is done.

    The GPU would divide itself among all, and all end as late as the last: then λ of all are fitted, and rows made of
    them, when the GPU has nothing more to do. No thread waits but for another's launches.
    """
    import torch

    with _launching.setdefault(device, threading.Lock()), torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        if device in _launched:
            driver.wait(stream, _launched[device])
        yield
        _launched[device] = stream.record_event()


def why_not_batched(index: int) -> str | None:
    """Why CUDA device `index` can't use the batched solver, in one line; None where it does. Compiles it.

    Raises what CUDA raises where there is no memory for it or the device is lost.
    """
    import torch

    if single_to_double_ratio(index) > FAST_RATIO:
        return "its float64 is slow"
    if index not in _missing and (reason := two_stage.unavailable_reason(torch.device("cuda", index))):
        _missing[index] = reason
    return _missing.get(index)


def missing_batched(index: int) -> str | None:
    """Why CUDA device `index`, which would be faster with it, has had to do without the batched solver so far."""
    return _missing.get(index)


def batch_size(n: int) -> int:
    """How many matrices of size n to solve together: more gains little, and takes memory.

    Of small ones many: to launch what solves them takes longer than the solve itself.
    """
    return 256 if n <= 512 else 128 if n <= 1024 else 32 if n <= 2048 else 16 if n <= 4096 else 4 if n <= 8192 else 1


def is_large(n: int) -> bool:
    """Whether solving matrices of size n takes far longer than launching what does it: then two groups that are solved
    and one that is read are enough for a GPU."""
    return n > 1024


def device_bytes(n: int) -> int:
    """Device memory for one Gram of size n and its share of the work arrays."""
    work = two_stage.workspace_bytes(n, 1) if 2 <= n <= 8192 else 0
    return 8 * n * n + max(work, 24 * n * n)


def _two_stage_takes(device: torch.device, n: int, batch: int) -> bool:
    if n < 2 or not (two_stage.worthwhile(n, batch) or (batch > 1 and n > _TINY and not cusolver.available())):
        return False
    return why_not_batched(_index(device)) is None and n <= two_stage.largest_n(device)


def _cusolver_takes(n: int, batch: int) -> bool:
    return batch > 1 and _TINY < n <= cusolver.LARGEST_N and cusolver.available()


def _index(device: torch.device) -> int:
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def _one_by_one(gram_BNN: torch.Tensor) -> torch.Tensor:
    """torch's, which solves matrices up to `_TINY` together, and others one after the other."""
    import torch

    if gram_BNN.shape[1] <= _TINY:
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            eigs_BN: torch.Tensor = torch.linalg.eigvalsh(gram_BNN)
            return eigs_BN
    return torch.stack([_or_nan(gram_NN) for gram_NN in gram_BNN])


def _or_nan(gram_NN: torch.Tensor) -> torch.Tensor:
    import torch

    try:
        eigs_N: torch.Tensor = torch.linalg.eigvalsh(gram_NN)
        return eigs_N
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.full(gram_NN.shape[:1], torch.nan, dtype=gram_NN.dtype, device=gram_NN.device)
