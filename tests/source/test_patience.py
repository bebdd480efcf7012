from __future__ import annotations

import time

import pytest

from shardesd.source.faults import Stalled, _httpx, fault_of
from shardesd.source.patience import ATTEMPTS, Meter, patiently

httpx = _httpx()


def test_new_bytes_renew_patience(waits: list[float]) -> None:
    meter = Meter(total=30)

    def action() -> str:
        meter.at(0)
        meter.advance(len(waits) + 1)  # a byte further than last time, then cut off
        if meter.done < 30:
            raise httpx.ReadError("reset")
        return "done"

    assert patiently(action, meter) == "done"
    assert len(waits) == 29


def test_the_same_bytes_again_do_not(waits: list[float]) -> None:
    meter = Meter(total=30)

    def action() -> None:
        meter.at(0)
        meter.advance(10)
        raise httpx.ReadError("reset")

    with pytest.raises(httpx.ReadError):
        patiently(action, meter)
    assert len(waits) == ATTEMPTS - 1
    assert waits == sorted(waits)


def test_a_download_that_starts_over_for_ever_is_ended() -> None:
    meter = Meter(total=100)

    def action() -> None:
        while True:
            meter.advance(60)
            meter.advance(-60)

    with pytest.raises(Stalled):
        patiently(action, meter)
    assert meter.furthest == 60


def test_what_the_library_has_waited_for_is_not_waited_for_again(waits: list[float]) -> None:
    def action() -> None:
        time.sleep(23)
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ConnectError):
        patiently(action)
    assert waits == [23]


def test_errors_that_do_not_pass_are_raised_at_once(waits: list[float]) -> None:
    with pytest.raises(ZeroDivisionError):
        patiently(lambda: 1 / 0)
    assert waits == []


def test_reports_are_few_and_complete() -> None:
    seen: list[tuple[int, int | None]] = []
    meter = Meter(1000, lambda done, total: seen.append((done, total)))
    meter.at(0)
    for _ in range(1000):
        meter.advance(1)
    assert seen[0] == (0, 1000)
    assert seen[-1] == (1000, 1000)
    assert len(seen) < 20


@pytest.mark.parametrize(
    "text", ["Illegal header value b'Bearer hf_abc'", "no hf_abc", "GET http://u:hf_abc@h/x?sig=hf_abc\nhf_abc"]
)
def test_no_secret_reaches_a_message(text: str) -> None:
    assert "hf_abc" not in fault_of(ValueError(text)).detail


def test_dates_to_wait_for() -> None:
    request = httpx.Request("GET", "http://h/")
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    response = httpx.Response(429, headers={"Retry-After": date}, request=request)
    error = httpx.HTTPStatusError("429", request=request, response=response)
    assert fault_of(error).asked_wait == pytest.approx(100, abs=3)
