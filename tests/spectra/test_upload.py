"""How matrices come to a GPU: what is read, when, by which thread; with plain memory in place of pinned."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_on_cpu import Buffer, Staging, staged
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardesd import spectra
from shardesd.checkpoint import ShardMatrix, StoredMatrix, open_shard
from shardesd.checkpoint.reader import Reader
from shardesd.records import Matrix, ShardRef, Spectrum
from shardesd.spectra import cublas, gram, upload
from shardesd.spectra import pack as packs
from shardesd.spectra import staging as buffers
from shardesd.spectra.pack import Failed
from shardesd.spectra.staging import BUFFERS
from shardesd.spectra.upload import Open, Sent, spans, uploads

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    return staged(monkeypatch, 1 << 12)


def opened(matrix: Matrix, log: list[str] | None = None) -> Open:
    @contextmanager
    def run() -> Iterator[Sequence[Matrix]]:
        if log is not None:
            log.append("opened")
        yield [matrix]
        if log is not None:
            log.append("closed")

    return run


@contextmanager
def unopenable() -> Iterator[Sequence[Matrix]]:
    raise OSError("not this one")
    yield []


def numbers(sent: Sent) -> dict[int, np.ndarray]:
    """Of each member."""
    found = {}
    for member in sent.members:
        N = member.matrix.shape[1]
        flat = sent.there.flat[member.begin : member.begin + member.rows * N * member.dtype.itemsize]
        found[member.at] = flat.view(member.dtype).view(member.rows, N).to(torch.float64, copy=True).numpy()
    return found


def all_of(items: Sequence[Open], pack: bool = True) -> tuple[dict[int, np.ndarray], dict[int, Exception]]:
    found: dict[int, list[np.ndarray]] = {}
    failed: dict[int, Exception] = {}
    with closing(uploads(items, CPU, pack=pack)) as sent:
        for one in sent:
            if isinstance(one, Failed):
                failed[one.at] = one.error
            else:
                for at, block in numbers(one).items():
                    found.setdefault(at, []).append(block)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-reader")]
    return {at: np.concatenate(blocks) for at, blocks in found.items()}, failed


def test_every_element_arrives_once_and_in_its_place(staging: Staging) -> None:
    """Small ones of many shapes and types, some in odd numbers of bytes, and large ones among them."""
    shapes = [(3, 5), (7, 7), (7, 7), (1, 1), (90, 60), (2, 9), (300, 8), (8, 300), (16, 16), (16, 16), (1, 700)]
    for pack in (True, False):
        Ws = [RNG.standard_normal(shape).astype(t) for shape in shapes for t in (np.float64, np.float32, np.float16)]
        words = {8: "F64", 4: "F32", 2: "F16"}
        found, failed = all_of([opened(StoredMatrix(W, words[W.itemsize])) for W in Ws], pack)
        assert not failed
        assert sorted(found) == list(range(len(Ws)))
        for at, W in enumerate(Ws):
            assert np.array_equal(found[at], W.astype(np.float64))
    assert staging.sent >= 2 * sum(W.nbytes for W in Ws)


def files(folder: Path, tensors: dict[str, np.ndarray]) -> Any:
    save_file(tensors, folder / "m.safetensors")
    return open_shard(ShardRef(name="m.safetensors"), folder / "m.safetensors")


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    reads: list[tuple[int, int, str]] = []
    read = Reader.read

    def noted(self: Reader, start: int, end: int, into: Any = None) -> Any:
        reads.append((start, end, threading.current_thread().name))
        return read(self, start, end, into)

    monkeypatch.setattr(Reader, "read", noted)
    return reads


def test_what_lies_together_in_a_file_is_read_at_once(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any shapes; by a thread of its own."""
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": rng.standard_normal((8, 8) if i % 3 else (4, 16)).astype(np.float32) for i in range(12)}
    with files(tmp_path, tensors) as shard:
        reads = count_reads(monkeypatch)
        found, failed = all_of([opened(ShardMatrix(shard, tensor)) for tensor in shard.tensors])
    assert not failed
    for at, tensor in enumerate(shard.tensors):
        assert np.array_equal(found[at], tensors[tensor.name])
    assert len(reads) == 1, "12 matrices of 256 bytes fit into 4096"
    assert reads[0][1] - reads[0][0] == 12 * 256
    assert reads[0][2].endswith("-reader")


def test_what_does_not_lie_together_is_read_by_itself(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other tensor; sizes that are no multiple of what a GPU's addresses must be; other types."""
    tensors = {f"a{i}": RNG.standard_normal((5, 5)).astype(np.float32) for i in range(6)}
    tensors |= {f"b{i}": RNG.standard_normal((4, 4)).astype(np.float16 if i % 2 else np.float32) for i in range(6)}
    with files(tmp_path, tensors) as shard:
        reads = count_reads(monkeypatch)
        by_name = {tensor.name: tensor for tensor in shard.tensors}
        names = ["a0", "a1", "a2", "b0", "b2", "b4", "b1", "b3", "b5", "a5"]
        found, failed = all_of([opened(ShardMatrix(shard, by_name[name])) for name in names])
        assert not failed
        for at, name in enumerate(names):
            assert np.array_equal(found[at], tensors[name])
        together = [by_name[name] for name in ("b0", "b2", "b4")]
        joined = 2 * (together[0].end == together[1].start and together[1].end == together[2].start)
        halves = [by_name[name] for name in ("b1", "b3", "b5")]
        joined += 2 * (halves[0].end == halves[1].start and halves[1].end == halves[2].start)
        assert joined, "the file lays them out by type"
        assert len(reads) == len(names) - joined, "100 bytes don't end where the next one may begin"


def test_a_file_that_ends_too_early_costs_what_lies_there(tmp_path: Path, staging: Staging) -> None:
    tensors = {f"t{i}": RNG.standard_normal((8, 8)).astype(np.float32) for i in range(3)}
    other = StoredMatrix(np.eye(8, dtype=np.float32), "F32")
    with files(tmp_path, tensors) as shard:
        with open(tmp_path / "m.safetensors", "r+b") as file:
            file.truncate(shard.nbytes - 10)
        items = [opened(ShardMatrix(shard, tensor)) for tensor in shard.tensors]
        found, failed = all_of([items[0], opened(other), *items[1:], opened(other)])
    assert sorted(failed) == [0, 2, 3]
    assert sorted(found) == [1, 4]
    assert np.array_equal(found[1], np.eye(8))


def test_one_that_raises_costs_itself_alone(staging: Staging) -> None:
    class Broken(StoredMatrix):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            if stop > 20:
                raise OSError("the file ends here")
            return super().rows(start, stop)

    @contextmanager
    def closed() -> Iterator[Sequence[Matrix]]:
        raise ValueError("it can't be opened")
        yield []

    good = RNG.standard_normal((30, 4))
    for pack in (True, False):
        items = [opened(StoredMatrix(good, "F64")), closed, opened(Broken(RNG.standard_normal((900, 4)), "F64"))]
        items += [opened(Broken(RNG.standard_normal((25, 4)), "F64")), opened(StoredMatrix(good, "F64"))] * 3
        found, failed = all_of(items, pack)
        assert {at: type(error) for at, error in failed.items()} == {
            1: ValueError,
            **dict.fromkeys((2, 3, 5, 7), OSError),
        }
        assert {at for at, W in found.items() if np.array_equal(W, good)} == {0, 4, 6, 8}


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_product_that_is_refused_costs_its_matrix_alone(
    staging: Staging, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four blocks, be it the first, one between, or the last."""
    Ws = [RNG.standard_normal((400, 5)) for _ in range(4)]
    calls = 0
    add_lower = cublas.add_lower

    def refuse(total: torch.Tensor, block: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ValueError("not this one")
        add_lower(total, block)

    monkeypatch.setattr(cublas, "add_lower", refuse)
    first, *others = spectra.compute_many([opened(StoredMatrix(W, "F64")) for W in Ws], n=5, device="cpu")
    assert calls == call + 12
    assert isinstance(first, ValueError)
    assert all(right(*pair) for pair in zip(Ws[1:], others, strict=True))


def right(W: np.ndarray, found: Spectrum | Exception) -> bool:
    if isinstance(found, Exception):
        return False
    expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
    return bool(np.abs(found.eigs - expected).max() <= 1e-12 * expected[-1])


def test_a_refused_product_costs_those_that_were_multiplied_together(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one upload, those of another shape are none of its matter."""
    Ws = [RNG.standard_normal((9 + at // 4, 5)) for at in range(12)]
    monkeypatch.setattr(cublas, "multiply_each", failing_once(cublas.multiply_each))
    found = spectra.compute_many([opened(StoredMatrix(W, "F64")) for W in Ws], n=5, device="cpu")
    assert [right(*pair) for pair in zip(Ws, found, strict=True)] == [False] * 4 + [True] * 8


@pytest.mark.parametrize("rows", [400, 9])
def test_what_cannot_be_opened_costs_itself_alone(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Though the one before it is still being read; and a Gram holds what lay there before."""
    tensors = {f"t{i}": RNG.standard_normal((rows, 5)) for i in range(5)}
    empty = torch.empty

    def used(*given: Any, **how: Any) -> torch.Tensor:
        memory = empty(*given, **how)
        return memory.copy_(3 * torch.eye(5, dtype=memory.dtype)) if memory.ndim == 3 else memory

    monkeypatch.setattr(torch, "empty", used)
    with files(tmp_path, tensors) as shard:
        items = [opened(ShardMatrix(shard, tensor)) for tensor in shard.tensors]
        items[1:1] = [unopenable]
        items[4:4] = [unopenable]
        found = spectra.compute_many(items, n=5, device="cpu")
    assert [at for at, one in enumerate(found) if isinstance(one, OSError)] == [1, 4]
    Ws = [tensors[tensor.name] for tensor in shard.tensors]
    assert all(right(W, one) for W, one in zip(Ws, [found[at] for at in (0, 2, 3, 5, 6)], strict=True))


def test_the_members_of_a_pack_come_in_order(tmp_path: Path, staging: Staging) -> None:
    """Those in memory were put there at once; those in a file have come since."""
    tensors = {f"t{i}": RNG.standard_normal((4, 4)) for i in range(6)}
    with files(tmp_path, tensors) as shard:
        items = [opened(ShardMatrix(shard, tensor)) for tensor in shard.tensors]
        items[1], items[4] = (opened(StoredMatrix(np.eye(4), "F64")) for _ in range(2))
        with closing(uploads(items, CPU, pack=True)) as all_sent:
            (sent,) = [one for one in all_sent if isinstance(one, Sent)]
            assert [list(run) for run in gram._alike(sent.members)] == [list(sent.members)]
            assert [member.at for member in sent.members] == list(range(6))


def test_blocks_that_meet_those_of_another_go_to_their_own(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which they come."""
    Ws = [RNG.standard_normal((400, 5)) for _ in range(3)]

    def mixed(*given: Any, **how: Any) -> Iterator[Sent | Failed]:
        for number, one in enumerate(uploads(*given, **how)):
            if number == 1:
                yield Failed(1, OSError("not this one"))
            yield one

    monkeypatch.setattr(gram, "uploads", mixed)
    found = spectra.compute_many([opened(StoredMatrix(W, "F64")) for W in Ws], n=5, device="cpu")
    assert [right(*pair) for pair in zip(Ws, found, strict=True)] == [True, False, True]
    assert str(found[1]) == "not this one"


def test_what_cannot_be_put_into_its_place_is_not_taken_for_read(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": RNG.standard_normal((8, 8)) for i in range(5)}
    alone = RNG.standard_normal((8, 8))
    lies_in = packs.lies_in

    def refuse(place: np.ndarray, rows: torch.Tensor) -> bool:
        if rows.shape[1] == 1:  # those that are read at once
            raise ValueError("not this one")
        return lies_in(place, rows)

    monkeypatch.setattr(packs, "lies_in", refuse)
    with files(tmp_path, tensors) as shard:
        items = [opened(ShardMatrix(shard, tensor)) for tensor in shard.tensors]
        found = spectra.compute_many([*items, opened(StoredMatrix(alone, "F64"))], n=8, device="cpu")
    assert [str(one) for one in found[:5]] == ["not this one"] * 5
    assert right(alone, found[5])


def test_a_gram_that_nothing_was_made_of_is_not_taken_for_one(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason may be: its memory holds what lay there before."""
    Ws = [RNG.standard_normal((400 if at == 3 else 9, 5)) for at in range(5)]

    def some(*given: Any, **how: Any) -> Iterator[Sent | Failed]:
        for number, one in enumerate(uploads(*given, **how)):
            if number != 2:  # a block of the large one
                yield one

    monkeypatch.setattr(gram, "uploads", some)
    found = spectra.compute_many([opened(StoredMatrix(W, "F64")) for W in Ws], n=5, device="cpu")
    assert [right(*pair) for pair in zip(Ws, found, strict=True)] == [True, True, True, False, True]
    assert "did not arrive" in str(found[3])


def test_what_failed_holds_no_memory(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's Grams take much of a GPU: they go when they are needed no more, not when Python's collector comes."""
    n = 23
    Ws = [RNG.standard_normal((400, n)) for _ in range(6)]
    Ws[1][7, 7] = np.nan
    Ws[2][:] = 0.0
    Ws[3] *= 1e200
    monkeypatch.setattr(cublas, "add_lower", failing_once(cublas.add_lower))

    def grams() -> list[torch.Tensor]:
        return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape[-2:] == (n, n)]

    gc.collect()
    gc.disable()
    try:
        found = spectra.compute_many([opened(StoredMatrix(W, "F64")) for W in Ws], n=n, device="cpu")
        assert [isinstance(one, Exception) for one in found] == [True, True, True, True, False, False]
        assert not grams()
    finally:
        gc.enable()


def failing_once(call: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([True])

    def run(*given: Any) -> Any:
        if next(calls, False):
            raise ValueError("not this one")
        return call(*given)

    return run


def test_what_is_wider_than_it_is_stored_is_sent_all_the_same(staging: Staging) -> None:
    """As the rows are that an adapter is merged into: float32, of 16 bits a number in the file."""

    class Merged(StoredMatrix):
        itemsize = 2

    Ws = [RNG.standard_normal((12, 12)).astype(np.float32) for _ in range(5)]
    Ws.append(RNG.standard_normal((400, 12)).astype(np.float32))
    for pack in (True, False):
        found, failed = all_of([opened(Merged(W, "F32")) for W in Ws], pack)
        assert not failed
        for at, W in enumerate(Ws):
            assert np.array_equal(found[at], W)


def test_what_is_sent_is_the_matrix_though_its_memory_is_used_again(staging: Staging) -> None:
    """What has been read may be sent after the matrix was closed, rows longer than a buffer too."""
    raw = np.empty((3, 2000))

    @contextmanager
    def used_again(value: float) -> Iterator[Sequence[Matrix]]:
        raw[:] = value
        yield [StoredMatrix(raw, "F64")]
        raw[:] = np.nan

    found, failed = all_of([partial(used_again, value) for value in range(9)], pack=False)
    assert not failed
    assert all((found[at] == at).all() for at in range(9))


def test_matrices_in_memory_are_open_one_at_a_time(staging: Staging) -> None:
    log: list[str] = []
    all_of([opened(StoredMatrix(np.eye(9), "F64"), log) for _ in range(20)])
    assert log == ["opened", "closed"] * 20


@pytest.mark.parametrize("itemsize", [8, 2])
def test_no_more_is_read_than_there_are_buffers(staging: Staging, itemsize: int) -> None:
    """Though it be wider than it is stored, and not lie there; and who stops taking has the thread end."""
    read: list[int] = []

    class Noted(StoredMatrix):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            read.append(start)
            return super().rows(start, stop)

    Noted.itemsize = itemsize  # type: ignore[assignment, method-assign]
    sent = uploads([opened(Noted(np.ones((5000, 10)), "F64"))] * 20, CPU, pack=False)
    next(sent)
    until = time.monotonic() + 20
    most = (upload._AHEAD + 1) * itemsize // 8 or 1  # the buffer of what was sent is read into again
    while len(read) < most and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(read) == most
    sent.close()
    assert len(read) <= most + 1
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-reader")]


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 5000))
def test_spans_cover_all_and_fit(length: int, bytes_each: int, block_bytes: int) -> None:
    found = list(spans(length, bytes_each, block_bytes))
    assert [at for start, stop in found for at in range(start, stop)] == list(range(length))
    assert all((stop - start) * bytes_each <= max(block_bytes, bytes_each) for start, stop in found)
    sizes = {stop - start for start, stop in found[:-1]}
    assert len(sizes) <= 1


def test_an_exception_of_the_one_who_takes_ends_the_thread(staging: Staging) -> None:
    def fails() -> None:
        with closing(uploads([opened(StoredMatrix(np.ones((5000, 10)), "F64"))], CPU, pack=False)) as sent:
            for _ in sent:
                raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-reader")]


def test_threads_share_the_buffers_and_lose_none(staging: Staging) -> None:
    """Though many stop in the middle, with some read ahead, and reading fails now and then."""

    class Torn(StoredMatrix):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            if start > 300:
                raise OSError("torn")
            return super().rows(start, stop)

    def feeds(number: int) -> None:
        for at in range(20):
            Ws = [(StoredMatrix, Torn)[(at + i) % 5 == 0](RNG.standard_normal((400, 10)), "F64") for i in range(4)]
            with closing(uploads([opened(W) for W in Ws], CPU, pack=at % 2 == 0)) as sent:
                for count, one in enumerate(sent):
                    if isinstance(one, Sent):
                        numbers(one)
                    if count == number + at:
                        break

    threads = [threading.Thread(target=feeds, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    made = BUFFERS - staging._left
    assert 1 < made == staging._free.qsize()


def test_a_thread_that_hangs_keeps_nobody_else(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the turn that it has nor by the buffers."""
    for module in (upload, buffers):
        monkeypatch.setattr(module, "PATIENCE", 0.05)
    hung, ended = threading.Event(), threading.Event()

    class Hanging(StoredMatrix):
        is_stretch = True  # type: ignore[assignment]

        def rows(self, start: int, stop: int) -> torch.Tensor:
            hung.set()
            ended.wait(30)
            return super().rows(start, stop)

    W = RNG.standard_normal((400, 10))
    threads = [threading.Thread(target=takes_all, args=([opened(Hanging(W, "F64"))],)) for _ in range(BUFFERS + 1)]
    for thread in threads:
        thread.start()
        assert hung.wait(10)
        hung.clear()
    with closing(uploads([opened(Waiting(W, "F64"))], CPU, pack=False)) as sent:
        arrived = np.concatenate([block for one in sent for block in numbers(one).values()])
    assert np.array_equal(arrived, W)
    ended.set()
    for thread in threads:
        thread.join(30)


class Waiting(StoredMatrix):
    is_stretch = True  # type: ignore[assignment]


def test_one_that_hangs_is_waited_for_once(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE", 0.3)
    monkeypatch.setattr(upload, "LOOK", 0.05)
    lock = staging.turn = threading.Lock()
    lock.acquire()
    started = time.monotonic()
    takes_all([opened(Waiting(np.eye(4), "F64")) for _ in range(30)])
    takes_all([opened(Waiting(np.eye(4), "F64")) for _ in range(30)])
    assert time.monotonic() - started < 3
    assert staging.turn is not lock
    assert not staging.turn.locked()


def test_the_turn_is_given_up_where_sending_fails_and_no_thread_can_start(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def no_memory(self: Staging, stored: torch.Tensor, buffer: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        patch.setattr(Staging, "send", no_memory)
        with pytest.raises(RuntimeError, match="out of memory") as kept:
            takes_all([opened(Waiting(np.eye(4), "F64")) for _ in range(3)])
    assert kept.value.__traceback__ is not None
    assert not staging.turn.locked()
    assert BUFFERS - staging._left == staging._free.qsize()


def test_who_waits_for_a_turn_can_be_stopped(staging: Staging) -> None:
    def first() -> AbstractContextManager[Sequence[Matrix]]:
        return nullcontext([StoredMatrix(np.eye(40), "F64")])

    staging.turn = threading.Lock()
    with staging.turn:
        sent = uploads([first, opened(Waiting(np.eye(4), "F64"))], CPU, pack=False)
        next(sent)
        time.sleep(0.1)
        started = time.monotonic()
        sent.close()
        assert time.monotonic() - started < 3
    assert not staging.turn.locked()


def test_unused_buffers_can_be_dropped(staging: Staging) -> None:
    W = RNG.standard_normal((4000, 10))
    with closing(uploads([opened(StoredMatrix(W, "F64"))], CPU, pack=False)) as sent:
        next(sent)
        staging.drop()  # not those in use
        assert staging._left < BUFFERS
        for _ in sent:
            pass
    assert staging._left < BUFFERS
    staging.drop()
    assert (staging._left, staging._free.qsize()) == (BUFFERS, 0)
    found, _ = all_of([opened(StoredMatrix(W, "F64"))])
    assert np.array_equal(found[0], W)


def test_who_waits_for_a_buffer_gets_the_one_that_is_being_made(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there is memory for no other, and none is there yet."""
    new, made, first = Staging._new, threading.Event(), threading.Event()

    def scarce(self: Staging) -> buffers.Buffer:
        if first.is_set():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        first.set()
        assert made.wait(10)
        return new(self)

    monkeypatch.setattr(Staging, "_new", scarce)
    thread = threading.Thread(target=lambda: staging.give(staging.take()))
    thread.start()
    assert first.wait(10)
    threading.Timer(0.3, made.set).start()
    assert staging.take() is not None
    thread.join(10)


def test_who_waits_for_a_buffer_that_is_dropped_makes_another(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [staging.take() for _ in range(BUFFERS)]
    found: list[buffers.Buffer] = []
    thread = threading.Thread(target=lambda: found.append(staging.take()))
    thread.start()
    time.sleep(0.05)
    staging._left += 1  # as `drop` leaves it
    held.pop()
    thread.join(3)
    assert found
    assert staging._left == 0


def test_one_that_hangs_is_replaced_by_one_turn_for_all(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE", 0.3)
    monkeypatch.setattr(upload, "LOOK", 0.05)
    staging.turn = threading.Lock()
    reading: list[int] = []
    most: list[int] = []

    class Slow(Waiting):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            reading.append(1)
            most.append(len(reading))
            time.sleep(0.02)
            reading.pop()
            return super().rows(start, stop)

    with staging.turn:
        threads = [
            threading.Thread(target=takes_all, args=([opened(Slow(np.eye(4), "F64")) for _ in range(3)],))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(most) == 12
    assert max(most) == 1


def test_an_error_on_closing_is_not_hidden_where_no_thread_can_start(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def raises() -> Iterator[Sequence[Matrix]]:
        try:
            yield [StoredMatrix(np.ones((4000, 10)), "F64")]
        finally:
            raise OSError("the file is gone")

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)

    def fails() -> None:
        with closing(uploads([raises], CPU, pack=False)) as sent:
            next(sent)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert BUFFERS - staging._left == staging._free.qsize()


@pytest.mark.parametrize("kind", [StoredMatrix, Waiting])
def test_one_buffer_does_where_there_is_memory_for_no_more(
    staging: Staging, kind: type[StoredMatrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not kept for what has been begun, either."""
    made: list[int] = []
    new = Staging._new

    def scarce(self: Staging) -> buffers.Buffer:
        made.append(1)
        if len(made) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return new(self)

    monkeypatch.setattr(Staging, "_new", scarce)
    monkeypatch.setattr(buffers, "PATIENCE", 1e6)  # after which more are made
    W = RNG.standard_normal((4000, 10))
    found, failed = all_of([opened(kind(W, "F64"))], pack=False)
    assert not failed
    assert np.array_equal(found[0], W)
    assert len(made) > 2


def test_without_any_buffer_each_matrix_says_why(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Staging) -> buffers.Buffer:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Staging, "_new", none)
    found, failed = all_of([opened(StoredMatrix(np.eye(4), "F64"))] * 3)
    assert not found
    assert {str(error) for error in failed.values()} == {"CUDA out of memory"}
    assert sorted(failed) == [0, 1, 2]


def test_those_who_read_files_take_turns(staging: Staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those who make what they send, from an adapter, say."""
    save_file({str(i): np.full((700, 10), i, np.float32) for i in range(8)}, tmp_path / "model.safetensors")
    reading: list[int] = []
    most: list[int] = []
    begin = ShardMatrix.begin

    def noted(self: ShardMatrix, start: int, stop: int, buffer: np.ndarray) -> Callable[[], torch.Tensor]:
        reading.append(1)
        most.append(len(reading))
        time.sleep(0.01)
        begun = begin(self, start, stop, buffer)
        reading.pop()
        return begun

    monkeypatch.setattr(ShardMatrix, "begin", noted)
    for is_stretch in (True, False):
        monkeypatch.setattr(ShardMatrix, "is_stretch", is_stretch)
        with open_shard(ShardRef(name="model.safetensors"), tmp_path / "model.safetensors") as shard:
            ones = [opened(ShardMatrix(shard, tensor)) for tensor in shard.tensors]
            threads = [threading.Thread(target=takes_all, args=(ones[at : at + 2],)) for at in range(0, 8, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert (max(most) == 1) == is_stretch
        most.clear()


class Underway(StoredMatrix):
    """As in a file: what is begun comes when it is asked for."""

    is_stretch = True  # type: ignore[assignment]

    def __init__(self, W: np.ndarray, log: list[tuple[str, float]], *, fails_at: int | None = None) -> None:
        super().__init__(W, "F64")
        self._log, self._fails_at = log, fails_at

    def begin(self, start: int, stop: int, buffer: np.ndarray) -> Callable[[], torch.Tensor]:
        rows = self.rows(start, stop)
        name = float(rows[0, 0])
        self._log.append(("begun", name))

        def come() -> torch.Tensor:
            self._log.append(("came", name))
            if self._fails_at is not None and start >= self._fails_at:
                raise OSError("torn")
            there = torch.from_numpy(buffer[: rows.nbytes]).view(rows.dtype).view(rows.shape)
            return there.copy_(rows)

        return come


def numbered(number: int, rows: int = 30) -> np.ndarray:
    return np.full((rows, 10), float(number))


@pytest.mark.parametrize("pack", [True, False])
def test_what_is_next_is_begun_before_the_last_has_come(staging: Staging, pack: bool) -> None:
    log: list[tuple[str, float]] = []
    found, failed = all_of([opened(Underway(numbered(at, 50), log)) for at in range(8)], pack)
    assert not failed
    assert all(np.array_equal(found[at], numbered(at, 50)) for at in range(8))
    assert log[:2] == [("begun", 0.0), ("begun", 1.0)]
    for at in range(7):
        assert log.index(("begun", at + 1)) < log.index(("came", at))
    for at in range(6):
        assert log.index(("came", at)) < log.index(("begun", at + 2)), "two at once are enough"


@pytest.mark.parametrize("pack", [True, False])
def test_all_comes_in_order(staging: Staging, pack: bool) -> None:
    """What can't be opened, or needs no reading, doesn't come before what is still being read."""

    items: list[Open] = [opened(Underway(numbered(at, 200), [])) for at in range(6)]
    items[2], items[4] = unopenable, opened(StoredMatrix(numbered(4), "F64"))
    with closing(uploads(items, CPU, pack=pack)) as sent:
        order = [one.at if isinstance(one, Failed) else one.members[0].at for one in sent]
    assert order == sorted(order)
    assert set(order) == set(range(6))


@pytest.mark.parametrize("pack", [True, False])
def test_all_that_was_begun_is_waited_for(staging: Staging, pack: bool) -> None:
    """Whoever stops, whenever: or it would be read into memory that is used for something else."""
    for after in range(7):
        log: list[tuple[str, float]] = []
        items = [opened(Underway(numbered(at), log)) for at in range(6)]
        items.insert(3, opened(StoredMatrix(numbered(9), "F64")))
        with closing(uploads(items, CPU, pack=pack)) as sent:
            for _ in range(after):
                next(sent, None)
        begun = [name for what, name in log if what == "begun"]
        assert sorted(begun) == sorted(name for what, name in log if what == "came")
        assert len(begun) == len(set(begun))
        assert staging._free.qsize() == BUFFERS - staging._left


def test_one_that_does_not_come_costs_itself_alone(staging: Staging) -> None:
    """Of one in many blocks, no more are read than were begun."""
    log: list[tuple[str, float]] = []
    blocks = np.repeat(np.arange(400.0), 10).reshape(400, 10)
    items = [Underway(numbered(1000), log), Underway(blocks, log, fails_at=100), Underway(numbered(2000), log)]
    items += [Underway(numbered(3000), log, fails_at=0), Underway(numbered(4000), log)]
    for pack in (False, True):
        log.clear()
        found, failed = all_of([opened(one) for one in items], pack)
        assert {at: str(error) for at, error in failed.items()} == {1: "torn", 3: "torn"}
        assert all(np.array_equal(found[at], numbered(name)) for at, name in ((0, 1000), (2, 2000), (4, 4000)))
        of_it = [name for what, name in log if what == "begun" and name < 1000]
        assert 100 <= max(of_it) <= 200


@pytest.mark.parametrize("turn", [True, False])
def test_who_has_not_its_turn_keeps_no_buffer_waiting(
    staging: Staging, turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one in hand, so it doesn't wait for its turn; who has that may wait for the buffer."""
    log: list[tuple[str, float]] = []
    monkeypatch.setattr(upload, "PATIENCE", 0.05)
    items = [opened(StoredMatrix(numbered(0, 3), "F64")), *(opened(Underway(numbered(at, 12), log)) for at in range(5))]
    with nullcontext() if turn else staging.turn:
        all_of(items)
    full = [log.index(("came", float(at))) for at in range(4)]
    if turn:
        assert min(full) > log.index(("begun", 4.0))
    else:
        assert max(full) < log.index(("begun", 4.0))


def takes_all(items: Sequence[Open]) -> None:
    with closing(uploads(items, CPU, pack=False)) as sent:
        for one in sent:
            assert isinstance(one, Sent)


def test_what_is_no_exception_of_a_matrix_ends_all(staging: Staging) -> None:
    class Ended(BaseException):
        pass

    @contextmanager
    def ends() -> Iterator[Sequence[Matrix]]:
        raise Ended
        yield []

    items: list[Callable[[], Any]] = [opened(StoredMatrix(np.eye(3), "F64")), ends]
    with pytest.raises(Ended):
        all_of(items)


def test_without_a_thread_all_arrives_too(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    shapes = [(3, 5), (90, 60), (2, 9), (300, 8), (16, 16), (16, 16), (8, 300)]
    Ws = [RNG.standard_normal(shape) for shape in shapes]
    found, failed = all_of([opened(StoredMatrix(W, "F64")) for W in Ws])
    assert not failed
    assert all(np.array_equal(found[at], W) for at, W in enumerate(Ws))


def test_the_thread_uses_no_more_cores_than_the_one_it_reads_for(staging: Staging) -> None:
    seen: list[tuple[str, int]] = []

    class Noted(StoredMatrix):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            seen.append((threading.current_thread().name, torch.get_num_threads()))
            return super().rows(start, stop)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        all_of([opened(Noted(np.eye(4), "F64"))])
    finally:
        torch.set_num_threads(before)
    ((name, threads),) = seen
    assert (name.endswith("-reader"), threads) == (True, 1)


def test_no_buffer_is_lost_where_waiting_for_one_fails(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA may for one launch; two would be all there are."""
    waited: list[Buffer] = []

    def fails(self: Buffer) -> None:
        waited.append(self)
        if len(waited) in (2, 4, 5):
            raise RuntimeError("CUDA error: invalid configuration argument")

    monkeypatch.setattr(Buffer, "wait", fails)
    good = RNG.standard_normal((40, 10))
    found, failed = all_of([opened(StoredMatrix(good, "F64")) for _ in range(9)], pack=False)
    assert len(failed) == 3
    assert all(np.array_equal(W, good) for W in found.values())
    assert sorted([*found, *failed]) == list(range(9))


def test_nothing_is_sent_of_a_buffer_that_nothing_was_put_into(staging: Staging) -> None:
    class Merged(StoredMatrix):
        itemsize = 2

    all_of([opened(Merged(np.ones((12, 12), np.float32), "F32")) for _ in range(5)])
    assert staging.sent == 5 * 12 * 12 * 4
