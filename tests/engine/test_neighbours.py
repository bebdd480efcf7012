"""When a GPU counts as free, when it is left, and when it is taken again, by a fake NVML."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvml import FakeGpu, FakeNvml

from shardesd.engine import Neighbours, visible_gpus
from shardesd.events import GpuChanged
from shardesd.options import GpuOptions

MB = 1_000_000


class Watch:
    """A watch whose checks a test makes by hand."""

    def __init__(self, tmp_path: Path, count: int = 2, auto: bool = True, **options: object) -> None:
        self.nvml = FakeNvml(count)
        self.now = 0.0
        self.allocated: dict[int, int] = {}
        self.changes: list[GpuChanged] = []
        self.neighbours = Neighbours(
            self.nvml,
            visible_gpus(self.nvml, {}),
            GpuOptions(**{"max_checks": 3, **options}),  # type: ignore[arg-type]
            on_change=self.changes.append,
            own=lambda index: self.allocated.get(index),
            clock=lambda: self.now,
            locks=tmp_path,
            auto_take=auto,
        )

    def check(self, times: int = 1) -> tuple[int, ...]:
        for _ in range(times):
            self.now += 1
            self.neighbours.check()
        return self.neighbours.ours

    def ours_uses(self, index: int, used: int) -> None:
        """This process allocates on a GPU, and NVML says so."""
        self.nvml.gpus[index].processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=used)]
        self.nvml.gpus[index].used += used


def test_a_gpu_is_free_after_so_many_checks_in_a_row(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.nvml.gpus[1].used = 500 * MB
    assert watch.check(2) == ()
    assert watch.check() == (0,)
    watch.nvml.gpus[1].used = 499 * MB
    assert watch.check(2) == (0,)
    assert watch.check() == (0, 1)
    assert [(c.gpu, c.state) for c in watch.changes if c.state == "ours"] == [("cuda:0", "ours"), ("cuda:1", "ours")]


def test_flapping_starts_the_count_again(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    for used in (0, 0, 900, 0, 0, 900, 0, 0):
        watch.nvml.gpus[0].used = used * MB
        assert watch.check() == ()
    assert watch.check() == (0,)


def test_it_is_left_when_others_come_and_taken_again_when_they_go(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    watch.check(3)
    watch.ours_uses(0, 9000 * MB)
    assert watch.check(5) == (0,), "our own memory is no neighbour's"
    watch.nvml.gpus[0].used += 600 * MB
    assert watch.check() == ()
    assert watch.changes[-1].state == "busy"
    assert watch.changes[-1].others_bytes == 600 * MB
    watch.nvml.gpus[0].used -= 600 * MB
    assert watch.check(2) == ()
    assert watch.check() == (0,), "what we still hold there does not count against us"
    (use,) = watch.neighbours.use()
    assert (use.left, use.wait_seconds, use.held_seconds) == (1, 6, 6)


def test_where_the_driver_names_no_processes_our_part_is_reckoned(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    watch.check(3)
    gpu = watch.nvml.gpus[0]
    gpu.used = 550 * MB  # our context, before anything is allocated
    assert watch.check() == (0,)
    watch.allocated[0], gpu.used = 4000 * MB, 4550 * MB
    assert watch.check() == (0,)
    watch.allocated[0], gpu.used = 6000 * MB, 6600 * MB  # a library more
    assert watch.check() == (0,)
    gpu.used += 700 * MB
    assert watch.check() == ()
    watch.allocated[0], gpu.used = 0, 600 * MB  # they have gone, and we have handed back what we can
    assert watch.check(3) == (0,)


def test_a_context_of_an_earlier_batch_in_this_process_is_ours(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    watch.allocated[0], watch.nvml.gpus[0].used = 0, 700 * MB
    assert watch.check(3) == (0,)
    other = Watch(tmp_path / "other", 1)
    other.nvml.gpus[0].used = 700 * MB
    assert other.check(3) == (), "where we never were, it is someone else's"


def test_memory_that_comes_between_two_questions_is_not_taken_for_a_small_context(tmp_path: Path) -> None:
    """torch may allocate after NVML was asked and before torch is: its context would seem to be nothing at all."""
    watch = Watch(tmp_path, 1)
    watch.check(3)
    gpu = watch.nvml.gpus[0]
    ask = watch.nvml.nvmlDeviceGetMemoryInfo

    def asked_too_early(gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        answer = ask(gpu, version)
        watch.allocated[0] = 3000 * MB
        return answer

    watch.allocated[0], gpu.used = 200 * MB, 900 * MB
    watch.nvml.nvmlDeviceGetMemoryInfo = asked_too_early  # type: ignore[method-assign]
    assert watch.check() == (0,)
    gpu.used = 3700 * MB
    assert watch.check(3) == (0,)
    gpu.used += 500 * MB
    assert watch.check() == ()


def test_a_context_that_grows_as_libraries_load_is_ours_up_to_a_gigabyte(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    watch.check(3)
    gpu = watch.nvml.gpus[0]
    watch.allocated[0] = 1000 * MB
    for context in (300, 550, 800, 1000):
        gpu.used = (1000 + context) * MB
        assert watch.check() == (0,), context
    for context in (1200, 1499):
        gpu.used = (1000 + context) * MB
        assert watch.check() == (0,), "no more than the threshold beyond it"
    gpu.used = (1000 + 1500) * MB
    assert watch.check() == ()


def test_who_is_told_of_a_change_may_wait_for_one_who_asks_which_gpus_are_ours(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1, max_checks=1)
    asked: list[tuple[int, ...]] = []

    def told(change: GpuChanged) -> None:
        other = threading.Thread(target=lambda: asked.append(watch.neighbours.ours), daemon=True)
        other.start()
        other.join(10)

    watch.neighbours._on_change = told
    watch.neighbours.check()
    assert asked == [(0,), (0,)], "free, and ours"


def test_errors_and_a_gpu_that_vanishes(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.nvml.gpus[0].error = "Unknown Error"
    assert watch.check(3) == (1,)
    assert watch.changes[0].state == "gone"
    assert "Unknown Error" in watch.changes[0].why
    watch.nvml.gpus[1].error = "GPU is lost"
    assert watch.check(2) == (1,), "one failed question says little"
    assert watch.check() == ()
    watch.nvml.gpus[0].error = watch.nvml.gpus[1].error = None
    assert watch.check(3) == (0, 1)


def test_which_and_how_many(tmp_path: Path) -> None:
    assert Watch(tmp_path / "a", 4, gpus=(1, 3)).check(3) == (1, 3)
    watch = Watch(tmp_path / "b", 4, max_gpus=2)
    assert watch.check(5) == (0, 1)
    watch.ours_uses(0, 10 * MB)
    watch.nvml.gpus[0].used += 900 * MB
    assert watch.check(1) == (1, 2)
    watch.neighbours.set_options(GpuOptions(gpus=(3,), max_checks=3))
    assert watch.check(3) == (3,)
    watch.neighbours.set_options(GpuOptions(max_gpus=1, max_checks=3))
    assert len(watch.check(4)) == 1


def test_two_of_us_never_take_one_gpu(tmp_path: Path) -> None:
    one, two = Watch(tmp_path, 1), Watch(tmp_path, 1)
    assert one.check(3) == (0,)
    assert two.check(4) == ()
    one.neighbours.close()
    assert two.check(3) == (0,)


def test_jobs_take_so_many_and_give_them_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 3, auto=False, per_job=2)
    watch.check(3)
    assert watch.neighbours.free == (0, 1, 2)
    assert watch.neighbours.take(2) == (0, 1)
    assert watch.neighbours.take(2) == ()
    assert watch.neighbours.free == (2,)
    watch.nvml.gpus[0].used = 9000 * MB  # the job's own
    assert watch.check() == (0, 1)
    watch.neighbours.leave(0)
    assert watch.check(3) == (1,)
    watch.nvml.gpus[0].used = 0
    watch.check(3)
    assert watch.neighbours.free == (0, 2)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("1,7,0", ["1"]),
        ("0,0", ["0"]),
        ("GPU-11aa-1,GPU-22", ["GPU-11aa-1", "GPU-22"]),
        ("GPU-", []),
        ("MIG-0123", ["MIG-0123"]),
        ("MIG-9999,0", []),
    ],
)
def test_what_is_visible(setting: str | None, found: list[str]) -> None:
    nvml = FakeNvml(3)
    gpus = visible_gpus(nvml, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.word for gpu in gpus] == found
    assert [gpu.index for gpu in gpus] == list(range(len(found)))


def test_an_old_driver_counts_what_it_reserves(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1, mem_threshold=601)
    watch.nvml.old = True
    assert watch.check(3) == (0,)
    other = Watch(tmp_path / "other", 1)
    other.nvml.old = True
    assert other.check(9) == ()
