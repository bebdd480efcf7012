"""Claims: one holder at a time, whatever dies, sleeps or has a wrong clock."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hub_server import wait_until

from shardesd.batch import Claims
from shardesd.batch.claims import _DIGITS


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_model_is_claimed_once_and_freed_by_release(tmp_path: Path) -> None:
    with Claims(tmp_path) as mine, Claims(tmp_path) as other:
        claim = mine.take("org--name")
        assert claim is not None
        assert other.take("org--name") is None
        assert other.take("org--other") is not None
        mine.release(claim)
        assert other.take("org--name") is not None
    assert not (tmp_path / "claims").exists()


def test_a_process_killed_while_it_claims_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one would be nobody's, and be waited for."""

    class Killed(BaseException):
        pass

    def write(handle: int, content: bytes) -> int:
        raise Killed

    claims = Claims(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(Killed):
            claims.take("model")
    assert not claims.taken("model")
    assert Claims(tmp_path).take("model") is not None


@pytest.mark.parametrize("links", [True, False], ids=["", "a filesystem without links"])
def test_of_many_who_claim_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", link)
    for number in range(50):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(Claims.take, [Claims(tmp_path) for _ in range(8)], [f"model{number}"] * 8))
        (claim,) = [claim for claim in found if claim is not None]
        claim.beat()
        assert not claim.lost.is_set()
    assert sorted(path.suffix for path in (tmp_path / "claims").iterdir()) == [".claim"] * 50


def test_a_claim_from_another_host_is_dead_when_it_stands_still_by_our_own_clock(tmp_path: Path) -> None:
    clock = Clock()
    with Claims(tmp_path, beat=0.01, place="host A") as theirs:
        claim = theirs.take("m")
        assert claim is not None
        ours = Claims(tmp_path, still=90, clock=clock, place="host B")
        for _ in range(5):  # it beats: nobody takes it, however long it has been held
            assert ours.take("m") is None
            clock.now += 80
            before = claim.path.read_bytes()
            assert wait_until(lambda b=before, c=claim: c.path.read_bytes() != b)
    with Claims(tmp_path, beat=1e9, place="host A") as dead:
        dead.take("m")
        assert ours.take("m") is None
        clock.now += 89
        assert ours.take("m") is None
        clock.now += 2
        assert ours.take("m") is not None


def test_clocks_that_are_an_hour_off_do_no_harm(tmp_path: Path) -> None:
    for offset in (-3600, 3600):
        clock = Clock()
        with Claims(tmp_path, beat=0.01, place="host A") as theirs:
            claim = theirs.take("m")
            assert claim is not None
            ours = Claims(tmp_path, still=90, clock=clock, place="host B")
            for _ in range(3):
                now = claim.path.stat().st_mtime
                os.utime(claim.path, (now + offset, now + offset))
                assert ours.take("m") is None
                clock.now += 60
                before = claim.path.read_bytes()
                assert wait_until(lambda b=before, c=claim: c.path.read_bytes() != b)


def test_a_dead_process_of_this_host_is_known_at_once(tmp_path: Path) -> None:
    code = "from shardesd.batch import Claims\nfrom pathlib import Path\nimport os\n"
    code += f"c = Claims(Path({str(tmp_path)!r})).__enter__()\nassert c.take('m')\nos._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "claims" / "m.claim").exists()
    with Claims(tmp_path) as ours:
        assert ours.take("m") is not None


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    with Claims(tmp_path) as ours:
        claim = ours.take("m")
        assert claim is not None
        content = claim.path.read_bytes()
        owner = json.loads(content[_DIGITS:]) | {"started": 1.0}
        claim.path.write_bytes(content[:_DIGITS] + b"\n" + json.dumps(owner).encode() + b"\n")
        assert Claims(tmp_path).take("m") is not None


def test_an_owner_that_slept_finds_out_that_it_has_lost(tmp_path: Path) -> None:
    clock = Clock()
    with Claims(tmp_path, beat=1e9, place="host A") as sleeper, Claims(tmp_path, clock=clock, place="host B") as ours:
        old = sleeper.take("m")
        assert old is not None
        assert ours.take("m") is None
        clock.now += 1000
        new = ours.take("m")
        assert new is not None
        content = new.path.read_bytes()
        old.beat()
        assert old.lost.is_set()
        sleeper.release(old)
        assert new.path.read_bytes() == content


def test_many_takers_of_a_dead_claim_get_it_once(tmp_path: Path) -> None:
    clock = Clock()
    for number in range(20):
        Claims(tmp_path, place="elsewhere").take(f"m{number}")
    takers = [Claims(tmp_path, clock=clock, place=f"host {i}") for i in range(4)]
    for taker in takers:
        for number in range(20):
            assert taker.take(f"m{number}") is None
    clock.now += 1000
    got: list[str] = []
    barrier = threading.Barrier(4)

    def take(taker: Claims) -> None:
        barrier.wait()
        got.extend(f"m{n}" for n in range(20) if taker.take(f"m{n}") is not None)

    threads = [threading.Thread(target=take, args=(taker,)) for taker in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(f"m{n}" for n in range(20))


def test_whoever_dies_while_taking_over_is_taken_over_too(tmp_path: Path) -> None:
    clock = Clock()
    with Claims(tmp_path, place="elsewhere", beat=1e9) as dead:
        claim = dead.take("m")
        assert claim is not None
        who = json.loads(claim.path.read_bytes()[_DIGITS:])["id"]
        (tmp_path / "claims" / f"m.{who}.taken").write_bytes(b"0" * _DIGITS + b"\n{}\n")
        ours = Claims(tmp_path, clock=clock)
        taken = []
        for _ in range(4):
            taken.append(ours.take("m"))
            clock.now += 100
        assert taken[0] is None
        assert taken[-1] is not None
