from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from shardesd.show.alpha import BINS, alpha_bins, alpha_range
from shardesd.show.text import (
    bar,
    clock,
    count,
    duration,
    encodable,
    fit,
    histogram,
    number,
    printable,
    shorten,
    size,
    size_of,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (90_868_376, "90.9 MB"),
        (412_300_000, "412 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.0 GB"),
        (16_060_522_496, "16.1 GB"),
        (1_340_000_000_000, "1.3 TB"),
    ],
)
def test_sizes_are_decimal(nbytes, text):
    assert size(nbytes) == text


def test_a_part_is_told_in_the_unit_of_the_whole():
    assert size_of(500_000_000, 15_200_000_000) == "0.5/15.2 GB"
    assert size_of(0, 412_000_000) == "0.0/412 MB"
    assert size_of(500_000_000, None) == "500 MB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (float("inf"), "–"),
        (-1, "0:00"),
        (8.4, "0:08"),
        (59.6, "1:00"),
        (3852, "1:04:12"),
        (274320, "3 d 04:12"),
    ],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_durations_and_counts():
    assert [duration(s) for s in (0.123, 9.24, 59.97, 252)] == ["0.12 s", "9.2 s", "1:00", "4:12"]
    assert [count(n, "matrix", "matrices") for n in (0, 1, 12345)] == ["0 matrices", "1 matrix", "12,345 matrices"]


@pytest.mark.parametrize(
    ("value", "decimals", "width", "text"),
    [
        (3.214, 2, 5, "3.21"),
        (123.456, 2, 5, "123.5"),
        (99999.7, 2, 5, "1.0e5"),
        (1.5e12, 2, 7, "1.5e12"),
        (0.00012, 2, 7, "1.2e-4"),
        (0.0, 2, 7, "0.00"),
        (None, 2, 7, "–"),
        (float("nan"), 2, 7, "–"),
        (float("inf"), 2, 7, "inf"),
        (1.5e-300, 2, 7, "2e-300"),
    ],
)
def test_numbers(value, decimals, width, text):
    assert number(value, decimals, width) == text


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e300))
def test_a_number_fits_and_is_near(value):
    text = number(value, 2, 7)
    assert len(text) <= 7
    assert float(text) == pytest.approx(value, rel=0.5, abs=0.005)


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (36, "encoder.layer.0.attention.self.query"),
        (35, "e…0.attention.self.query"),
        (24, "e…0.attention.self.query"),
        (23, "e…0.attentio…self.query"),
        (10, "e…0…query"),
        (12, "e…0.at…query"),
        (7, "en…uery"),
        (1, "…"),
        (0, ""),
    ],
)
def test_a_name_is_cut_where_it_says_least(width, text):
    assert shorten("encoder.layer.0.attention.self.query", width) == text


def test_both_numbers_of_an_expert_stay():
    assert shorten("model.layers.12.block_sparse_moe.experts.117.w1", 28) == "m…12.block_sp…experts.117.w1"


@given(st.text(max_size=60), st.integers(0, 40))
def test_a_cut_name_fits(name, width):
    assert cell_len(shorten(printable(name), width)) <= width
    assert cell_len(fit(printable(name), width)) == width


def test_control_characters_are_shown_not_sent():
    assert printable("a\x1b[31mb\nc\r\u202ed") == "a�[31mb�c��d"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437"])
def test_other_encodings_get_stand_ins_of_the_same_length(encoding):
    text = "α 2 ≤ λ… ≈ × ━╸─ ▁▂▃▄▅▆▇█ ✗ → · 重み"
    stand_in = encodable(text, encoding)
    stand_in.encode(encoding)
    assert len(stand_in) == len(text)
    assert encodable(text, "utf-8") == text


@pytest.mark.parametrize(
    ("alpha", "name"),
    [
        (1.999, "over-trained"),
        (2.0, "good"),
        (3.999, "good"),
        (4.0, "weak"),
        (6.0, "weak"),
        (6.001, "under-trained"),
        (-1.0, "no fit"),
        (None, "no fit"),
        (float("nan"), "no fit"),
        (float("inf"), "no fit"),
    ],
)
def test_ranges_of_alpha(alpha, name):
    assert alpha_range(alpha).name == name


def test_bins_of_alpha():
    counts = alpha_bins([0.5, 1.0, 1.49, 1.5, 2.0, 3.99, 4.0, 7.99, 8.0, 1e9])
    assert len(counts) == BINS == 15
    assert counts == [3, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 2]


def test_histogram_and_bar():
    assert histogram([0, 1, 4, 8]) == " ▁▄█"
    assert histogram([0, 0]) == "  "
    assert histogram([1, 1000])[0] == "▁"
    assert bar(0.5, 10).plain == "━━━━━─────"
    assert bar(0.55, 10).plain == "━━━━━╸────"
    assert bar(None, 4).plain == "────"
    assert bar(7.0, 4).plain == "━━━━"
