"""gpu_config.json: what it may say, and that nonsense changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardesd.batch.control import read_config
from shardesd.options import BatchOptions, GpuOptions, parse_gpus


def test_it_changes_what_it_names(tmp_path: Path) -> None:
    before = BatchOptions(workers=2, gpu=GpuOptions(max_checks=3))
    assert read_config(tmp_path, before) is None
    (tmp_path / "gpu_config.json").write_text('{"gpus": [0, 2], "gpu_mem_threshold": 1.5, "max_gpus": null}')
    found = read_config(tmp_path, before)
    assert found is not None
    assert found[0] == BatchOptions(workers=2, gpu=GpuOptions(gpus=(0, 2), mem_threshold=1.5, max_checks=3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "can't be read"),
        ("[]", "no JSON object"),
        ("[" * 100_000, "can't be read"),
        ('{"gpu": [0]}', "'gpu' is unknown"),
        ('{"gpus": ["a"]}', "'gpus'"),
        ('{"gpus": [1.5]}', "'gpus'"),
        ('{"workers": 0}', "'workers' is 0"),
        ('{"workers": true}', "'workers' is true"),
        ('{"max_checks": -1}', "max-checks"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "gpu_config.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_config(tmp_path, BatchOptions())


def test_gpus_on_the_command_line() -> None:
    assert parse_gpus(None) == ()
    assert parse_gpus("0,2-4, 2") == (0, 2, 3, 4)
    for text in ("", "a", "1-", "-1", "0,,1"):
        with pytest.raises(ValueError, match="--gpus"):
            parse_gpus(text)
