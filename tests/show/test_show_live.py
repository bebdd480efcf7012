from __future__ import annotations

import pytest
from rich.cells import cell_len
from show_events import console, failed, row, show, skipped, started, written

from shardesd.events import Fetching, MatrixStarted, RowDone, ShardOpened
from shardesd.show.live import picture
from shardesd.show.progress import Progress
from shardesd.show.text import Lines


def progress(*events):
    state = Progress()
    for event in events:
        state.add(event)
    return state


def busy(rows=20, **values):
    """A scan in full swing, with something of everything."""
    return progress(
        started(revision="v1.0", **values),
        ShardOpened(shard="a", number=1, nbytes=4_000_000_000, matrices=230, exact=False),
        Fetching(shard="b", done=1_200_000_000, total=4_000_000_000),
        RowDone(row=skipped()),
        *(RowDone(row=row(f"model.layers.{i}.self_attn.q_proj"), nbytes=33_554_432) for i in range(rows)),
        RowDone(row=failed(reason="a reason that goes on and on, well past the end of any narrow line on a screen")),
        RowDone(row=row("lm_head", block_type="lm_head", M=128256, N=16384, spectral_norm=1.2e7, alpha=-1.0, D=1.0)),
        MatrixStarted(longname="model.layers.31.mlp.down_proj", device="cuda:1"),
    )


def lines(state, width=80, height=24):
    return [line.plain.rstrip() for line in picture(state.view(), width, height)]


@pytest.mark.parametrize("width", [20, 30, 40, 50, 59, 60, 80, 100, 160, 300])
@pytest.mark.parametrize("height", [5, 12, 24, 50])
def test_it_fits_the_screen(width, height):
    shown = picture(busy().view(), width, height)
    assert all(cell_len(line.plain) <= width for line in shown)
    assert len(shown) < height


def test_a_tiny_screen_gets_what_fits():
    view = busy().view()
    text = show(Lines(lambda width, height, alpha: picture(view, width, height, alpha)), 12)
    assert max(map(cell_len, text.splitlines())) == 12


def test_at_80_by_24_all_is_there():
    text = "\n".join(lines(busy()))
    for piece in (
        "meta-llama/Meta-Llama-3-8B-Instruct@v1.0  8afb486",
        "cuda:0, cuda:1",
        "→ results",
        "0/4",
        "0.7/16.0 GB",
        "30 %",
        "1.2/4.0 GB",
        "22/≈230",
        "ETA",
        "elapsed 0:00",
        "peak",
        "1 skipped",
        "1 failed",
        "m…18.self_attn.q_proj",
        "4096×4096  3.21 g 0.046   12.35   98.8  1.25",
        "128k×16k  no fit 1.000   1.2e7",
        "✗ failed: a reason",
        "g good 20",
    ):
        assert piece in text
    assert len(lines(busy())) == 23


def test_more_columns_where_there_is_room():
    text = lines(busy(), 160, 50)
    head = next(line for line in text if line.startswith("matrix"))
    assert " ".join(head.split()) == "matrix type M×N α D λmax stable rank n_tail entropy dtype device seconds"
    assert any(line.startswith("model.layers.19.self_attn.q_proj  ") for line in text)


def test_columns_stay_where_they_are():
    few, many = (next(line for line in lines(busy(n)) if line.startswith("matrix")) for n in (1, 200))
    assert few == many


def test_an_exact_total_has_no_mark():
    assert "1/225" in "\n".join(lines(progress(started(), RowDone(row=row()))))
    unknown = "\n".join(lines(progress(started(matrices=None, exact=False, total_bytes=None))))
    assert "0/?" in unknown
    assert "ETA –" in unknown


def test_before_the_start_and_with_an_empty_model():
    assert lines(progress()) == ["opening …"]
    assert "0/0" in "\n".join(lines(progress(started(shards=0, matrices=0, total_bytes=0, out=None, commit=None))))


def test_many_devices_are_summed_up():
    text = lines(progress(started(devices=tuple(f"cuda:{i}" for i in range(8)))))
    assert text[0].endswith("cuda:0 … cuda:7 (8 devices)")


@pytest.mark.parametrize(
    ("alpha", "cell", "color"),
    [
        (1.5, "1.50 o", "magenta"),
        (3.0, "3.00 g", "green"),
        (5.0, "5.00 w", "color(166)"),
        (7.0, "7.00 u", "red"),
        (-1.0, "no fit", "dim"),
    ],
)
def test_alpha_has_a_colour_and_a_letter(alpha, cell, color):
    shown = picture(progress(started(), RowDone(row=row(alpha=alpha))).view(), 80, 24)
    line = next(line for line in shown if cell in line.plain and "q_proj" in line.plain)
    styles = [str(span.style) for span in line.spans if line.plain[span.start : span.end].strip() == cell]
    assert styles == [color]


def test_a_failed_row_is_red_and_says_why():
    shown = picture(progress(started(), RowDone(row=failed(reason="all zeros"))).view(), 80, 24)
    line = next(line for line in shown if "all zeros" in line.plain)
    assert str(line.style) == "red"
    assert "✗ failed: all zeros" in line.plain


def test_names_are_no_markup_and_no_escape_codes():
    hostile = "blocks.[0].[bold]w[/bold]"
    state = progress(started(), RowDone(row=row(hostile)), RowDone(row=failed("x\x1b[2J\n", reason="[red]no[/red]")))
    target = console(100, terminal=True)
    target.print(Lines(lambda width, height, alpha: picture(state.view(), width, height, alpha)))
    text = written(target)
    assert hostile in text
    assert "[red]no[/red]" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_other_encodings(encoding):
    state = busy()
    target = console(80, terminal=True, encoding=encoding)
    target.print(Lines(lambda width, height, alpha: picture(state.view(), width, height, alpha)))
    text = written(target)
    assert "4096x4096" in text
    assert "22/~230" in text
    assert "alpha" in text
    assert "?" not in text
