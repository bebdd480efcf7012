"""The rows of GPUs in the live display."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from shardesd.events import DeviceReport, EngineReport, ScanStarted
from shardesd.show.live import picture
from shardesd.show.progress import Progress


def lines(width: int, *devices: DeviceReport) -> list[str]:
    progress = Progress()
    progress.add(
        ScanStarted(
            model_id="org/name", revision=None, commit=None, shards=1, total_bytes=1, matrices=9, exact=True,
            devices=tuple(device.name for device in devices), out=None,
        )
    )  # fmt: skip
    progress.add(EngineReport(devices=devices, ready=17, bytes_in_flight=310_000_000))
    return [line.plain for line in picture(progress.view(), width, 40)]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_each_gpu_has_a_row_that_fits(width: int) -> None:
    busy = DeviceReport(
        name="cuda:0", working=("model.layers.7.mlp.down_proj", "b", "c"), done=12, memory=3_100_000_000
    )
    lost = DeviceReport(name="cuda:1", done=3, retired="CUDA error: an illegal [memory] access\nwas encountered")
    shown = lines(width, busy, lost)
    assert all(cell_len(line) <= width for line in shown)
    first = next(line for line in shown if line.startswith("cuda:0"))
    second = next(line for line in shown if line.startswith("cuda:1"))
    assert "12 done" in first
    assert "3 done" in second
    assert "retired" in second
    if width >= 80:
        assert "3.1 GB" in first
        assert "and 2 more" in first
        assert any("17 ready, 310 MB in flight" in line for line in shown)


def test_the_cpu_alone_needs_no_row() -> None:
    assert not any(line.startswith("cpu") for line in lines(80, DeviceReport(name="cpu", working=("a",), done=1)))
