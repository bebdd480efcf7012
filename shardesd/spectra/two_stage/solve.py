"""The solver's sequence of launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardesd.spectra import cublas
from shardesd.spectra.two_stage.launch import Launcher
from shardesd.spectra.two_stage.layout import BAND_ROWS, WIDTH, Layout, layout
from shardesd.spectra.two_stage.loaded import (
    CHASE_SHARED,
    CHASE_THREADS,
    MAX_CLUSTER,
    PANEL_WARPS,
    UPDATE_SHARED,
    Kernels,
    kernels,
    panel_shared,
)

if TYPE_CHECKING:
    import torch

MAX_BATCH = 65535  # blocks along y
_PANELS = 64  # of six launches each, cuBLAS's too


class Workspace:
    """One batch's work arrays."""

    def __init__(self, plan: Layout, raw: torch.Tensor) -> None:
        self.plan, self.raw = plan, raw
        self.zeroed = raw[plan.offsets["band"] : plan.nbytes]

    def at(self, name: str) -> int:
        return self.raw.data_ptr() + self.plan.offsets[name]


def solve(gram_Bnn: torch.Tensor, raw: torch.Tensor | None, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if gram_Bnn.ndim != 3 or gram_Bnn.shape[1] != gram_Bnn.shape[2]:
        raise ValueError(f"gram_Bnn must be (batch, n, n), not {tuple(gram_Bnn.shape)}")
    B, n, _ = gram_Bnn.shape
    if gram_Bnn.dtype not in (torch.float64, torch.float32):
        raise ValueError(f"gram_Bnn must be float64 or float32, not {gram_Bnn.dtype}")
    device = gram_Bnn.device
    if device.type != "cuda":
        raise ValueError(f"gram_Bnn must be on a CUDA device, not on {device}")
    most = kernels(device.index).largest_n
    if not 2 <= n <= most or not 1 <= B <= MAX_BATCH:
        raise ValueError(f"n must be 2 to {most} and the batch 1 to {MAX_BATCH} on {device}, not n = {n}, batch = {B}")
    if gram_Bnn.stride(2) != 1:
        gram_Bnn = gram_Bnn.contiguous()
    plan = layout(n, B)
    if raw is None:
        raw = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    if raw.dtype != torch.uint8 or raw.device != device or not raw.is_contiguous() or raw.numel() < plan.nbytes:
        raise ValueError(f"workspace must be {plan.nbytes} contiguous bytes (uint8) on {device}")
    if raw.data_ptr() % 256:
        raise ValueError("workspace must start at a multiple of 256 bytes")
    eigs_Bn = torch.empty(B, n, dtype=torch.float64, device=device)
    verdict_B = torch.zeros(B, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        compiled = kernels(device.index)
        launch = compiled.on(torch.cuda.current_stream(device).cuda_stream)
        work = Workspace(plan, raw)
        load(launch, work, gram_Bnn, verdict_B)
        dense_to_band(launch, compiled, work)
        band_to_tridiagonal(launch, compiled, work, verdict_B)
        tridiagonal_to_eigs(launch, compiled, work, tolerance, eigs_Bn, verdict_B)
    return eigs_Bn, verdict_B


def load(launch: Launcher, work: Workspace, gram_Bnn: torch.Tensor, verdict_B: torch.Tensor) -> None:
    """Copies the scaled, padded matrices into the workspace and notes what the result is checked against."""
    import torch

    plan = work.plan
    suffix = "" if gram_Bnn.dtype == torch.float64 else "_float32"
    given = (gram_Bnn.data_ptr(), gram_Bnn.stride(0), gram_Bnn.stride(1), plan.n)
    target = (work.at("matrix"), plan.padded, work.at("largest"), work.at("moments"), verdict_B.data_ptr())
    work.zeroed.zero_()
    launch(f"largest{suffix}", (min(plan.n, 512), plan.batch), (128, 1), *given, work.at("largest"))
    launch(f"fill{suffix}", (plan.tiles, plan.batch), (32, 8), *given, *target)


def dense_to_band(launch: Launcher, compiled: Kernels, work: Workspace) -> None:
    plan = work.plan
    B, N, pair = plan.batch, plan.padded, plan.pair_columns
    multiply = cublas.batched(WIDTH, B)
    A, XV, VX, W, Z, G = (work.at(name) for name in ("matrix", "xv", "vx", "w", "z", "products"))
    band = (work.at("band"), plan.band_columns * BAND_ROWS)
    depth = 0  # columns of the pairs that A still lacks
    marks: list[torch.cuda.Event] = []
    for k in range(0, N, WIDTH):
        _let_others_in(marks, k // WIDTH)
        s = k + WIDTH  # the first row below the panel
        tiles = (N - s) // WIDTH
        cluster = compiled.fitting_cluster(-(-max(1, tiles) // PANEL_WARPS), min(MAX_CLUSTER, max(1, tiles)), B)
        warps = -(-max(1, tiles) // cluster)
        shape = {"cluster": cluster, "shared": panel_shared(warps)}
        launch("panel", (1, B), (32 * warps, 1), A, N, k, XV, VX, pair, depth, W, *band, **shape)
        if tiles == 0:
            break
        multiply(A + 8 * s * (N + 1), W + 8 * s * WIDTH, Z + 8 * s * WIDTH, N, N - s)
        shares = 8 if depth == 0 else 2 if depth <= 64 else 1  # of a block's rows, as in the kernel
        shape = {
            "cluster": compiled.fitting_cluster(1, min(8, tiles), B),
            "shared": shares * (depth + WIDTH) * WIDTH * 8,
        }
        launch("products", (1, B), (512, 1), VX, pair, depth, Z, W, G, pair, N, s, **shape)
        shape = {"shared": (depth + WIDTH) * 36 * 8}
        launch("pairs", (-(-tiles // 4), B), (128, 1), XV, VX, pair, depth, Z, G, pair, N, s, **shape)
        depth += 2 * WIDTH
        if depth == pair:
            side = -(-(N - s) // 64)
            launch("update", (side * (side + 1) // 2, B), (128, 1), A, XV, VX, N, s, pair, shared=UPDATE_SHARED)
            depth = 0


def _let_others_in(marks: list[torch.cuda.Event], panel: int) -> None:
    """Before a launch would have to wait for room in the stream, which takes about 1,000, with the interpreter's lock
    held: waits for those of `_PANELS` and more panels ago, while others have it. Up to n = 4096 there is room for all.
    """
    import torch

    if panel and panel % _PANELS == 0:
        marks.append(torch.cuda.current_stream().record_event())
        if len(marks) > 1:
            marks.pop(0).synchronize()


def band_to_tridiagonal(launch: Launcher, compiled: Kernels, work: Workspace, verdict_B: torch.Tensor) -> None:
    plan = work.plan
    blocks = min(compiled.chase_blocks, plan.batch * plan.groups)
    launch(
        "chase",
        (blocks, 1),
        (CHASE_THREADS, 1),
        *(work.at("band"), plan.band_columns * BAND_ROWS, plan.n, plan.batch, plan.groups),
        *(work.at("d"), work.at("e"), plan.padded, work.at("progress"), work.at("ticket"), verdict_B.data_ptr()),
        shared=CHASE_SHARED,
    )


def tridiagonal_to_eigs(
    launch: Launcher,
    compiled: Kernels,
    work: Workspace,
    tolerance: float,
    eigs_Bn: torch.Tensor,
    verdict_B: torch.Tensor,
) -> None:
    plan = work.plan
    N, n, B = plan.padded, plan.n, plan.batch
    scaled = (work.at("de"), work.at("range"), N, n, work.at("counts"))
    launch("bounds", (B, 1), (256, 1), work.at("d"), work.at("e"), N, n, work.at("de"), work.at("range"))
    grid = (-(-n // 128), B)
    launch("survey", grid, (128, 1), *scaled)
    full = B * -(-n // 32) >= 12 * compiled.multiprocessors  # warps enough to hide latency
    launch("bisect" if full else "multisect", grid, (128, 1), *scaled, work.at("eigs"))
    expected = (work.at("moments"), plan.tiles, work.at("largest"), tolerance)
    result = (eigs_Bn.data_ptr(), verdict_B.data_ptr())
    launch("finish", (B, 1), (256, 1), work.at("eigs"), work.at("range"), N, n, *expected, *result)
