from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest
from rich.cells import cell_len
from show_events import console, failed, finished, frame, row, show, skipped, written

from shardesd.show import print_report, report, table

FILES = ("results/models/org--name.csv", "results/spectra/org--name.safetensors", "results/runs/org--name.json")


def model(layers=6):
    """Rows of every kind, in the order of a table."""
    rng = np.random.default_rng(7)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    rows = [
        row(f"model.layers.{i}.self_attn.{kind}", block_type=kind, alpha=float(rng.uniform(1.2, 9)))
        for i in range(layers)
        for kind in kinds
    ]
    rows[3] = row(rows[3].longname, block_type="o_proj", alpha=-1.0, D=1.0, n_tail=None, fit_status="no_valid_fit")
    rows[5] = failed(rows[5].longname)
    return rows


def done(rows, **values):
    return finished(
        analysed=sum(r.status == "ok" for r in rows), failed=sum(r.status == "failed" for r in rows), **values
    )


@pytest.mark.parametrize("width", [20, 40, 50, 80, 100, 160])
@pytest.mark.parametrize("part", [table, report])
@pytest.mark.parametrize("terminal", [False, True])
def test_no_line_is_wider_than_the_console(width, part, terminal):
    rows = [*model(), row("x" * 150, M=10**6, N=10**6, spectral_norm=1e200), failed("y" * 150, reason="z " * 200)]
    end = done(
        rows, files=(*FILES, "r/" * 100), skipped={"a rather long reason to leave a tensor out": 1234}, interrupted=True
    )
    text = show(part(frame(*rows), end), width, terminal=terminal)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(cell_len(line) <= width for line in bare.splitlines())
    assert all(cell_len(line) <= 30 for line in show(part(frame(*rows), end, 30), 160).splitlines())


def test_the_table_has_all_columns_at_80():
    lines = show(table(frame(row(M=384, N=1536), failed()), done([]))).splitlines()
    assert " ".join(lines[0].split()) == "matrix type M N α D n_tail λmax srank entr."
    assert " ".join(lines[1].split()) == "m…0.self_attn.q_proj q_proj 384 1536 3.21 g 0.046 2048 12.35 98.8 0.912"
    assert "✗ failed: 3 of 9 elements are NaN" in lines[2]
    assert len(lines) == 3


def test_numbers_are_right_aligned():
    lines = show(table(frame(row("a", M=8), row("b", M=40960)), done([]))).splitlines()
    ends = [line.index(cell) + len(cell) for line, cell in zip(lines, (" M ", " 8 ", "40960 "), strict=True)]
    assert len(set(ends)) == 1


def test_skipped_rows_are_in_the_table_with_their_reason():
    assert "skipped: norm" in show(table(frame(row(), skipped()), done([])))


@pytest.mark.parametrize(("n", "shown"), [(200, 200), (201, 40)])
def test_a_long_table_is_cut_and_says_where_the_rest_is(n, shown):
    rows = [row(f"layers.{i}.fc") for i in range(n)]
    lines = show(table(frame(*rows), done(rows, files=FILES)), 120).splitlines()
    assert sum(".fc" in line for line in lines) == shown
    assert lines[-1] == ("… and 161 more rows, all in results/models/org--name.csv" if n > 200 else lines[-1])


def test_an_empty_model():
    text = show(table(frame(), finished(analysed=0))) + show(report(frame(), finished(analysed=0)))
    assert text.splitlines() == ["no rows", "meta-llama/Meta-Llama-3-8B-Instruct  0 matrices, 9.2 s"]


def test_the_summary_holds_the_right_numbers():
    rows = model()
    text = show(report(frame(*rows), done(rows)))
    for kind in ("q_proj", "o_proj", "up_proj"):
        alphas = [r.alpha for r in rows if r.block_type == kind and r.status == "ok" and r.alpha > 0]
        ok = sum(r.block_type == kind and r.status == "ok" for r in rows)
        cells = next(line for line in text.splitlines() if line.startswith(kind)).split()
        assert int(cells[1]) == ok
        assert cells[2:8:2] == [f"{f(alphas):.2f}" for f in (np.median, np.min, np.max)]
    total = next(line for line in text.splitlines() if line.startswith("all ")).split()
    assert int(total[1]) == 41


def test_the_shares_of_the_ranges():
    rows = [row(f"l{i}", alpha=a) for i, a in enumerate([1.5, 3.0, 3.5, 3.9, 5.0, 6.0, 9.0, -1.0])]
    found = re.findall(r"^([oguw-]) (\S+(?: fit)?) .* (\d+) +(\d+) %", show(report(frame(*rows), done(rows))), re.M)
    assert found == [
        ("o", "over-trained", "1", "12"),
        ("g", "good", "3", "38"),
        ("w", "weak", "2", "25"),
        ("u", "under-trained", "1", "12"),
        ("-", "no fit", "1", "12"),
    ]


def test_a_failed_fit_stays_out_of_the_statistics():
    rows = [row("a", alpha=3.0), row("b", alpha=-1.0)]
    line = next(line for line in show(report(frame(*rows), done(rows))).splitlines() if line.startswith("q_proj"))
    assert line.split()[1:8] == ["2", "3.00", "g", "3.00", "g", "3.00", "g"]
    alone = show(report(frame(row(alpha=-1.0)), done([])))
    assert "no fit" in alone
    assert next(line for line in alone.splitlines() if line.startswith("q_proj")).split()[2:] == ["–"] * 3


def test_the_histogram_stands_under_its_scale():
    rows = [row(f"l{i}", alpha=a) for i, a in enumerate([1.2, 2.1, 4.2, 6.2, 8.2])]
    head, line = show(report(frame(*rows), done(rows))).splitlines()[2:4]
    at = head.index("1 2   4   6   8+")
    assert [i - at for i, cell in enumerate(line) if cell == "█"] == [0, 2, 6, 10, 14]
    assert [i for i, cell in enumerate(head[at:]) if cell.isdigit()] == [0, 2, 6, 10, 14]


def test_failures_are_listed_up_to_twenty():
    rows = [failed(f"layers.[{i}].w", reason=f"reason [{i}]") for i in range(23)]
    text = show(report(frame(*rows), done(rows)))
    assert "failed 23" in text
    assert "  layers.[19].w  reason [19]" in text
    assert "layers.[20]" not in text
    assert "and 3 more" in text


def test_skips_notes_files_and_the_end():
    rows = [row("a", reason="fused qkv analysed whole"), row("b", fit_status="all_below_threshold")]
    end = done(rows, skipped={"norm": 2, "bias": 1200}, files=FILES)
    text = show(report(frame(*rows), end))
    assert "2 matrices, 1,202 skipped, 9.2 s" in text
    assert "skipped 1,202\n  1,200  bias\n      2  norm\n" in text
    assert "1  fused qkv analysed whole" in text
    assert "1  fit_status all_below_threshold" in text
    assert text.endswith("\n".join(f"{'written' if i == 0 else '':8}{file}" for i, file in enumerate(FILES)) + "\n")
    assert "interrupted" not in text
    stopped = show(report(frame(*rows), done(rows, interrupted=True)))
    assert stopped.endswith("interrupted: 2 finished rows are kept; run the same command again to continue\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_other_encodings(encoding):
    rows = [*model(), failed("重み", reason="… ≥")]
    target = console(80, encoding=encoding)
    print_report(frame(*rows), done(rows), target)
    text = written(target)
    assert "alpha median" in text
    assert re.search(r"good +2 < alpha < 4 ", text)
    assert "??" in text


def test_colours_on_a_terminal_and_none_elsewhere():
    rows = model()
    assert "\x1b" in show(report(frame(*rows), done(rows)), terminal=True)
    assert "\x1b" not in show(report(frame(*rows), done(rows)))


def test_stdout_in_a_pipe_is_bare_and_120_wide(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    name = "encoder.layer.0.attention.self.and_a_name_of_47"
    print_report(frame(row(name)), done([]))
    text = out.getvalue()
    assert "\x1b" not in text
    assert name in text
    assert max(map(len, text.splitlines())) <= 120


def test_names_are_no_markup_and_no_escape_codes():
    rows = [row("h.[0].[bold]w[/]"), failed("x\x1b[2Jy", reason="[red]\nno")]
    text = show(table(frame(*rows), done(rows)), 120, terminal=True)
    text += show(report(frame(*rows), done(rows)), 120, terminal=True)
    assert "h.[0].[bold]w[/]" in text
    assert "[red]�no" in text
    assert "\x1b[2J" not in text


def test_both_sides_of_a_matrix_are_shown_or_none():
    for width in range(30, 120):
        head = show(table(frame(row("layer.0.q_proj")), finished()), width).splitlines()[0].split()
        assert ("M" in head) is ("N" in head), width
