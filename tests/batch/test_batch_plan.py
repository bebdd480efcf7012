"""The plan's look at the models: several at a time, and what becomes of it when it is interrupted or breaks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import one_file, random_weights

from shardesd.batch import Planned, as_list, make_plan, plan
from shardesd.options import ScanOptions


def rows(tmp_path: Path, count: int) -> tuple[Any, ...]:
    return as_list([str(one_file(tmp_path / f"m{i}", random_weights(seed=i))) for i in range(count)]).rows


def test_it_keeps_the_order_of_the_list(tmp_path: Path) -> None:
    listed = rows(tmp_path, 20)
    told: list[Planned] = []
    made = make_plan(listed, tmp_path / "out", ScanOptions(), failures={}, on_model=told.append)
    assert [model.row for model in made.models] == list(listed)
    assert all(model.nbytes for model in made.models)
    assert sorted(model.row.name for model in told) == sorted(row.name for row in listed)
    assert make_plan((), tmp_path / "out", ScanOptions(), failures={}).models == ()


def test_an_interrupted_one_waits_for_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = rows(tmp_path, 12)
    stop, never = threading.Event(), threading.Event()
    look = plan._looked

    def slow(model: Planned, *rest: Any) -> Planned:
        if model.row != listed[0]:
            stop.set()
            never.wait(30)
        return look(model, *rest)

    monkeypatch.setattr(plan, "_looked", slow)
    started = time.monotonic()
    try:
        made = make_plan(listed, tmp_path / "out", ScanOptions(), failures={}, stop=stop)
    finally:
        never.set()
    assert time.monotonic() - started < 10
    assert [model.row for model in made.models] == list(listed)
    assert all(model.nbytes is None for model in made.models[1:])


def test_what_nobody_expected_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Planned:
        raise ZeroDivisionError

    monkeypatch.setattr(plan, "_looked", broken)
    with pytest.raises(ZeroDivisionError):
        make_plan(rows(tmp_path, 3), tmp_path / "out", ScanOptions(), failures={})
