"""A model's statistics against the standard library's, and the file they are kept in."""

from __future__ import annotations

import csv
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardesd.errors import NoSpace, ResultsError
from shardesd.records import Row
from shardesd.results import summary
from shardesd.results.summary import SUMMARY_COLUMNS, read_summary, summarise, update_summary
from shardesd.results.tables import to_frame

ROOT = Path(__file__).parents[2]
DESIGN = """model_id, revision, is_adapter, source_model, num_layers, num_failed, alpha_mean, alpha_median, alpha_std,
alpha_min, alpha_max, alpha_q25, alpha_q75, alpha_weighted_mean, D_mean, log_alpha_norm_mean, spectral_norm_mean,
spectral_norm_max, stable_rank_mean, stable_rank_median, entropy_mean, entropy_median, total_params, seconds"""


def test_columns_are_the_designs() -> None:
    assert list(SUMMARY_COLUMNS) == DESIGN.replace("\n", " ").split(", ")
    assert list(summarise(to_frame([]))) == list(SUMMARY_COLUMNS)


numbers = st.floats(0.01, 100)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ok", "ok", "nofit", "failed"]), numbers, numbers, numbers), max_size=12))
def test_against_the_standard_library(cases: list[tuple[str, float, float, float]]) -> None:
    rows = []
    for i, (kind, a, b, c) in enumerate(cases):
        common = {"model_id": "m", "longname": str(i), "params": i + 1, "seconds": a}
        if kind == "failed":
            rows.append(Row(**common, status="failed", reason="NaN"))
        else:
            alpha, D, lan = (a, b / 100, c) if kind == "ok" else (-1.0, 1.0, -1.0)
            fit = {"alpha": alpha, "D": D, "log_alpha_norm": lan, "alpha_weighted": alpha * c}
            rows.append(Row(**common, **fit, spectral_norm=b, stable_rank=c, entropy=a))
    got = summarise(to_frame(rows), "m")
    fits = [case for case in cases if case[0] == "ok"]
    okays = [case for case in cases if case[0] != "failed"]
    alphas = [a for _, a, _, _ in fits]

    def quartile(i: int) -> float | None:
        if len(alphas) < 2:
            return alphas[0] if alphas else None
        return statistics.quantiles(alphas, n=4, method="inclusive")[i]

    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    expected = {
        "model_id": "m",
        "revision": None,
        "is_adapter": False,
        "source_model": None,
        "num_layers": len(okays),
        "num_failed": len(cases) - len(fits),
        "alpha_mean": mean(alphas),
        "alpha_median": median(alphas),
        "alpha_std": statistics.stdev(alphas) if len(alphas) > 1 else None,
        "alpha_min": min(alphas, default=None),
        "alpha_max": max(alphas, default=None),
        "alpha_q25": quartile(0),
        "alpha_q75": quartile(2),
        "alpha_weighted_mean": mean([a * c for _, a, _, c in fits]),
        "D_mean": mean([b / 100 for _, _, b, _ in fits]),
        "log_alpha_norm_mean": mean([c for _, _, _, c in fits]),
        "spectral_norm_mean": mean([b for _, _, b, _ in okays]),
        "spectral_norm_max": max((b for _, _, b, _ in okays), default=None),
        "stable_rank_mean": mean([c for *_, c in okays]),
        "stable_rank_median": median([c for *_, c in okays]),
        "entropy_mean": mean([a for _, a, _, _ in okays]),
        "entropy_median": median([a for _, a, _, _ in okays]),
        "total_params": sum(i + 1 for i, case in enumerate(cases) if case[0] != "failed"),
        "seconds": math.fsum(a for _, a, _, _ in cases),
    }
    assert got == {
        key: pytest.approx(value, rel=1e-12, abs=1e-9) if isinstance(value, float) else value
        for key, value in expected.items()
    }


def test_adapters_say_so(row: Callable[..., Row]) -> None:
    got = summarise(to_frame([row("x", revision="v1", is_adapter=True, source_model="org/base")]))
    assert list(got.values())[:4] == ["org/name", "v1", True, "org/base"]


def one(model_id: str, revision: str | None = None, **values: object) -> dict[str, object]:
    return {**summarise(to_frame([]), model_id, revision), **values}


def test_a_row_per_model_and_revision(tmp_path: Path) -> None:
    for model_id, revision, alpha in (("a", None, 1.0), ("b", None, 2.0), ("b", "v1", 3.0), ("b", None, 0.1 + 0.2)):
        update_summary(tmp_path, one(model_id, revision, alpha_mean=alpha))
    assert [(r["model_id"], r["revision"], r["alpha_mean"]) for r in read_summary(tmp_path)] == [
        ("a", "", "1.0"),
        ("b", "", "0.30000000000000004"),
        ("b", "v1", "3.0"),
    ]
    assert (tmp_path / "summary.csv").read_text().splitlines()[0] == ",".join(SUMMARY_COLUMNS)
    assert os.listdir(tmp_path) == ["summary.csv"]


def test_what_users_added_stays(tmp_path: Path) -> None:
    """Columns of their own, cells as they wrote them, a byte order mark; a column that is lacking is added."""
    lacking = [name for name in SUMMARY_COLUMNS if name != "entropy_mean"]
    with open(tmp_path / "summary.csv", "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)  # CRLF
        writer.writerow(["group", *lacking, "note"])
        writer.writerow(["G1", "a", *["0.10"] * (len(lacking) - 1), "two\nlines, é"])
        writer.writerow(["G2", "b", "", *["7"] * (len(lacking) - 2), "mine"])
    update_summary(tmp_path, one("b", alpha_mean=2.5))
    with open(tmp_path / "summary.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*SUMMARY_COLUMNS, "group", "note"]
    assert rows[0] == {**dict.fromkeys(SUMMARY_COLUMNS, "0.10"), "model_id": "a", "entropy_mean": ""} | {
        "group": "G1",
        "note": "two\nlines, é",
    }
    assert (rows[1]["alpha_mean"], rows[1]["group"], rows[1]["note"]) == ("2.5", "G2", "mine")


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    path = update_summary(tmp_path, one("a"))
    before = path.stat()
    update_summary(tmp_path, one("a"))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("data", [b"name,x\n", b"model_id\na,b,c\n", b"\xff\xfe\n"])
def test_something_else_of_that_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "summary.csv").write_bytes(data)
    with pytest.raises(ResultsError, match=r"summary\.csv.*move it away, or choose another --out"):
        update_summary(tmp_path, one("a"))
    assert (tmp_path / "summary.csv").read_bytes() == data
    assert os.listdir(tmp_path) == ["summary.csv"]


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = update_summary(tmp_path, one("a"))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace):
        update_summary(tmp_path, one("b"))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["summary.csv"]


CHILD = """
import sys
from pathlib import Path
from shardesd.results import summarise, to_frame, update_summary
for i in range(15):
    update_summary(Path(sys.argv[1]), summarise(to_frame([]), f"{sys.argv[2]}{i}"))
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), name], cwd=ROOT) for name in "abc"]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert {row["model_id"] for row in read_summary(tmp_path)} == {f"{name}{i}" for name in "abc" for i in range(15)}
    assert os.listdir(tmp_path) == ["summary.csv"]


def test_rows_of_rank_one_stay_out_of_the_mean_entropy(row: Callable[..., Row]) -> None:
    rows = [row("a", entropy=0.5), row("b", entropy=0.7), row("c", entropy=1.2, matrix_rank=1), row("d", matrix_rank=0)]
    summary = summarise(to_frame(rows))
    assert summary["entropy_mean"] == pytest.approx(0.6)
    assert summary["entropy_median"] == pytest.approx(0.6)
    assert summary["num_layers"] == 4


@pytest.mark.parametrize("size", [1, 2, 3, 10, 57])
def test_quantiles_are_numpy_s_to_the_last_bit(size: int) -> None:
    rng = np.random.default_rng(size)
    for values in (rng.standard_normal(size), 10.0 ** rng.uniform(-300, 300, size), np.full(size, 0.1)):
        for q in (0.0, 0.25, 0.5, 0.75, 1.0, 0.9):
            assert summary._quantile(values, q) == np.quantile(values, q)
