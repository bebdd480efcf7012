"""What a batched solver's verdicts lead to, by a fake one on the CPU: only sound rows are taken as they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import pytest
import torch

from shardesd import spectra
from shardesd.checkpoint import StoredMatrix
from shardesd.errors import MatrixError
from shardesd.records import Matrix, Spectrum
from shardesd.spectra import cusolver, driver, eigen, solve, two_stage
from shardesd.spectra.tally import Tallies

N = 40
BAD = {1: two_stage.TRACE, 3: two_stage.FROBENIUS, 4: two_stage.STUCK, 6: two_stage.TRACE | two_stage.STUCK}


def weights(count: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((N + 7, N)).astype(np.float32) for _ in range(count)]


def exact(W: np.ndarray) -> np.ndarray:
    return np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A solver whose rows in `BAD` are wrong, and said to be; the sizes of the batches that it was given."""
    batches: list[int] = []

    def solver(grams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batches.append(len(grams))
        verdicts = torch.tensor([BAD.get(at, 0) for at in range(len(grams))], dtype=torch.int32)
        finite = torch.isfinite(torch.tril(grams)).all(-1).all(-1)
        eigs = torch.linalg.eigvalsh(torch.where(finite[:, None, None], grams, 0.0))
        eigs[verdicts != 0] = 12345.0
        eigs[~finite] = torch.nan
        verdicts[~finite] |= two_stage.NONFINITE
        return eigs, verdicts

    def grams(
        opened: Sequence[Callable[[], AbstractContextManager[Sequence[Matrix]]]],
        out: torch.Tensor,
        on_error: Callable[[int, Exception], None],
        tallies: Tallies,
    ) -> None:
        for at, open_ in enumerate(opened):
            with open_() as (matrix,):
                W = torch.from_numpy(matrix.block(0, 0, matrix.shape[0], np.dtype(np.float64)))
                out[at] = W.mT @ W

    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: True)
    monkeypatch.setattr(two_stage, "eigvalsh_batched", solver)
    monkeypatch.setattr(solve, "grams_cuda", grams)
    monkeypatch.setattr(solve, "_refill", lambda matrix, gram: solve._exponent(matrix))
    return batches


def test_rows_that_are_not_sound_are_computed_again(fake: list[int]) -> None:
    matrices = weights()
    grams = torch.from_numpy(np.stack([W.T.astype(np.float64) @ W for W in matrices]))
    found = eigen.eigvalsh_many(grams)
    assert fake == [8]
    assert (found.routine, sorted(found.again)) == ("two_stage", sorted(BAD))
    for W, eigs in zip(matrices, found.eigs, strict=True):
        assert np.abs(eigs - exact(W)).max() <= 1e-13 * exact(W)[-1] * N


def test_only_they_are(fake: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[torch.Tensor] = []
    eigvalsh = torch.linalg.eigvalsh
    grams = torch.from_numpy(np.stack([W.T.astype(np.float64) @ W for W in weights()]))
    eigs, verdicts = two_stage.eigvalsh_batched(grams)

    def counted(gram: torch.Tensor) -> torch.Tensor:
        again.append(gram)
        return eigvalsh(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", counted)
    assert two_stage.recompute(grams, eigs, verdicts) == sorted(BAD)
    assert [next(at for at in range(8) if torch.equal(grams[at], gram)) for gram in again] == sorted(BAD)


def test_a_hopeless_matrix_fails_alone(fake: list[int]) -> None:
    matrices = weights()
    matrices[2][0, 0] = np.nan
    matrices[5][3, 1] = np.inf
    opened = [lambda W=W: nullcontext([StoredMatrix(W, "F32")]) for W in matrices]
    results = spectra.compute_many(opened, n=N, device="cpu")
    for at, (W, result) in enumerate(zip(matrices, results, strict=True)):
        if at in (2, 5):
            assert isinstance(result, MatrixError), result
            assert "NaN or Inf" in str(result)
        else:
            assert isinstance(result, Spectrum), result
            assert np.abs(result.eigs - exact(W)).max() <= 1e-13 * exact(W)[-1] * N
            assert result.recomputed == (at in BAD)
            assert result.routine == ("eigvalsh" if at in BAD else "two_stage")


def test_what_cusolver_cannot_solve_either_gets_an_svd(fake: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    eigvalsh = torch.linalg.eigvalsh

    def diverges(gram: torch.Tensor) -> torch.Tensor:
        if gram.ndim == 2:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")  # type: ignore[attr-defined]
        return eigvalsh(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", diverges)
    matrices = weights()
    opened = [lambda W=W: nullcontext([StoredMatrix(W, "F32")]) for W in matrices]
    results = spectra.compute_many(opened, n=N, device="cpu")
    for at, (W, result) in enumerate(zip(matrices, results, strict=True)):
        assert isinstance(result, Spectrum), result
        assert (result.routine, result.recomputed) == (("svd", True) if at in BAD else ("two_stage", False))
        assert np.abs(result.eigs - exact(W)).max() <= 1e-13 * exact(W)[-1] * N


@pytest.fixture
def alone(fake: list[int], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """`compute` has its Grams solved by the fake too, one at a time; the solves (0, 1, …) that are denied."""
    denied: set[int] = set()
    done = iter(range(100))

    def solver(grams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bad = next(done) in denied
        eigs = torch.linalg.eigvalsh(grams)
        return torch.full_like(eigs, 12345.0) if bad else eigs, torch.tensor([two_stage.TRACE if bad else 0])

    monkeypatch.setattr(two_stage, "eigvalsh_batched", solver)
    monkeypatch.setattr(solve, "eigvalsh_cpu", lambda gram: eigen.eigvalsh_many(torch.from_numpy(gram[None].copy())))
    return denied


def test_gram_alone_is_refused_where_nothing_converges_as_in_a_batch(
    alone: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eigvalsh = torch.linalg.eigvalsh

    def diverges(gram: torch.Tensor) -> torch.Tensor:
        if gram.ndim == 2:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")  # type: ignore[attr-defined]
        return eigvalsh(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", diverges)
    alone.add(0)
    (W,) = weights(1)
    with pytest.raises(MatrixError, match="did not converge"):
        spectra.compute([StoredMatrix(W, "F32")], solver="gram")
    alone.add(1)
    found = spectra.compute([StoredMatrix(W, "F32")], solver="auto")
    assert (found.solver, found.routine, found.recomputed) == ("svd", "svd", True)
    assert np.abs(found.eigs - exact(W)).max() <= 1e-13 * exact(W)[-1] * N


@pytest.mark.parametrize(
    ("denied", "diverging", "routine"),
    [
        (set(), False, "two_stage"),
        ({0}, False, "eigvalsh"),
        ({2}, False, "eigvalsh"),
        ({0, 1, 2}, False, "eigvalsh"),
        ({0, 2}, True, "svd"),
    ],
)
def test_pooled_slices_have_the_routine_of_the_one_that_needed_most(
    alone: set[int], monkeypatch: pytest.MonkeyPatch, denied: set[int], diverging: bool, routine: str
) -> None:
    slices = weights(3)
    last = torch.from_numpy(np.square(slices[2], dtype=np.float64).sum(0))
    eigvalsh = torch.linalg.eigvalsh

    def diverges(gram: torch.Tensor) -> torch.Tensor:
        if diverging and gram.ndim == 2 and torch.allclose(gram.diagonal(), last):
            raise torch.linalg.LinAlgError("the algorithm failed to converge")  # type: ignore[attr-defined]
        return eigvalsh(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", diverges)
    alone |= denied
    found = spectra.compute([StoredMatrix(W, "F32") for W in slices])
    assert (found.routine, found.recomputed) == (routine, bool(denied))
    expected = np.sort(np.concatenate([exact(W) for W in slices]))
    assert np.abs(found.eigs - expected).max() <= 1e-13 * expected[-1] * N


@pytest.mark.parametrize("batched", [False, True])
def test_without_it_cusolver_takes_over(monkeypatch: pytest.MonkeyPatch, batched: bool) -> None:
    grams = torch.from_numpy(np.stack([W.T.astype(np.float64) @ W for W in weights()]))
    called: list[int] = []

    def xsyev(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(len(given))
        info = torch.zeros(len(given), dtype=torch.int32)
        info[1] = 7
        return torch.linalg.eigvalsh(given), info

    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: False)
    monkeypatch.setattr(cusolver, "available", lambda: batched)
    monkeypatch.setattr(cusolver, "eigvalsh_batched", xsyev)
    found = eigen.eigvalsh_many(grams)
    assert called == ([8] if batched else [])
    assert found.routine == ("cusolver_batched" if batched else "eigvalsh")
    for at, W in enumerate(weights()):
        if batched and at == 1:
            assert np.isnan(found.eigs[at]).all(), "what didn't converge is not taken"
        else:
            assert np.abs(found.eigs[at] - exact(W)).max() <= 1e-13 * exact(W)[-1] * N


class Stream:
    """What a GPU is given, by one thread."""

    def __init__(self, name: str) -> None:
        self.name = name

    def record_event(self) -> str:
        return f"end of {self.name}"


def test_whole_batches_of_small_matrices_are_solved_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they are launched; others, which leave a part of a GPU idle, beside each other."""
    given: list[str] = []
    local = threading.local()
    launching = threading.Lock()

    def launch(grams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert launching.acquire(blocking=False), "launched beside another"
        time.sleep(0.02)
        launching.release()
        given.append(local.stream.name)
        if local.stream.name == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return torch.zeros(grams.shape[:2], dtype=torch.float64), torch.zeros(len(grams), dtype=torch.int32)

    monkeypatch.setattr(eigen, "_launching", {})
    monkeypatch.setattr(eigen, "_launched", {})
    monkeypatch.setattr(eigen, "_two_stage_takes", lambda device, n, batch: True)
    monkeypatch.setattr(two_stage, "eigvalsh_batched", launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: local.stream)
    monkeypatch.setattr(driver, "wait", lambda stream, event: given.append(f"{stream.name} waits for {event}"))

    def solve_batch(name: str, size: int, n: int = 4) -> None:
        local.stream = Stream(name)
        with suppress(RuntimeError):
            eigen.eigvalsh_many(torch.zeros((size, n, n), dtype=torch.float64))

    solve_batch("first", 256)
    solve_batch("second", 200)
    solve_batch("few", 100)
    solve_batch("fails", 256)
    solve_batch("third", 256)
    assert given == [
        "first",
        "second waits for end of first",
        "second",
        "few",
        "fails waits for end of second",
        "fails",
        "third waits for end of second",
        "third",
    ]
    given.clear()
    threads = [threading.Thread(target=solve_batch, args=(f"{at}", 256)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = [name for name in given if "waits" not in name]
    waits = [f"{one} waits for end of {before}" for one, before in zip(order, ["third", *order], strict=False)]
    assert [name for name in given if "waits" in name] == waits


def test_large_matrices_are_solved_beside_each_other() -> None:
    assert eigen._fills(768, 128)
    assert eigen._fills(1024, 65)
    assert not eigen._fills(1024, 64)
    assert not eigen._fills(2048, 32)
