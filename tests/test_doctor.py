"""`shardesd doctor`: its words, and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cli
from hub_server import HubServer, use_hub

import shardesd.doctor
from shardesd import spectra
from shardesd.doctor import Finding, examine

GOLDEN = """ok    python    N on Linux X
ok    packages  numpy N, scipy N, torch N, polars N, safetensors N, huggingface_hub N, nvidia-ml-py N
ok    cpu       N cores, a tiny solve took N ms
ok    memory    N GB free of N GB
note  gpus      no NVIDIA driver (gone): the CPU does the work
ok    output    OUT can be written, N GB free
ok    cache     CACHE, N GB free
note  hub       URL answers, there is no token
                → set HF_TOKEN or run `hf auth login` for gated models and more requests
"""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with enough of everything and without a GPU, whatever it is."""

    def no_driver() -> Any:
        raise RuntimeError("gone")

    monkeypatch.setattr(shardesd.doctor, "load_nvml", no_driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shardesd.doctor, "_LITTLE_MEMORY", 0)
    monkeypatch.setattr(shardesd.doctor, "_LITTLE_DISK", 0)
    monkeypatch.setattr(shardesd.doctor, "_cgroup_limit", lambda: None)
    monkeypatch.setattr(shardesd.doctor, "cpu_count", lambda: 10**6)


def test_what_it_says_of_a_healthy_machine(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        result = cli("doctor", "--out", tmp_path / "new" / "out")
    assert result.exit_code == 0
    said = result.stdout.replace(str(tmp_path / "new" / "out"), "OUT").replace(str(tmp_path / "cache"), "CACHE")
    said = re.sub(r"http://[\d.:]+", "URL", said)
    said = re.sub(
        r"(?<=[ (])\d+[\w.+]*|(?<=Linux )\w+", lambda m: "X" if m[0][0].isalpha() or "_" in m[0] else "N", said
    )
    assert said == GOLDEN
    assert not (tmp_path / "new").exists()


def by_name(tmp_path: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(tmp_path / "out", network=False)}


def test_what_is_wrong_has_a_remedy(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardesd.doctor, "PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setattr(shardesd.doctor, "_LITTLE_MEMORY", 10**18)
    monkeypatch.setattr(shardesd.doctor, "_LITTLE_DISK", 10**18)
    (tmp_path / "out").write_text("a file")
    found = {finding.name: finding for finding in list(examine(tmp_path / "out", network=False))[::-1]}
    assert found["packages"].grade == "bad"
    assert found["packages"].remedy == "pip install no-such-package"
    assert (found["memory"].grade, found["cache"].grade) == ("note", "note")
    assert "--max-memory" in found["memory"].remedy
    assert "HF_HOME" in found["cache"].remedy
    assert found["output"].grade == "bad"
    result = cli("doctor", "--out", tmp_path / "out", "--no-network", "--json")
    assert result.exit_code == 1
    grades = [json.loads(line)["grade"] for line in result.stdout.splitlines()]
    assert grades.count("bad") == 2


@pytest.fixture
def gpus(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three that solve rightly, with the batched solver."""

    class Nvml:
        @staticmethod
        def nvmlSystemGetDriverVersion() -> str:
            return "580.1"

    monkeypatch.setattr(shardesd.doctor, "load_nvml", Nvml)
    monkeypatch.setattr(shardesd.doctor, "visible_gpus", lambda nvml: [0, 1, 2])
    monkeypatch.setattr(shardesd.doctor, "_solve", lambda device: (1e-15, 0.01))
    monkeypatch.setattr(spectra, "why_not_batched", lambda index: None)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "mem_get_info": lambda index: (70e9, 80e9),
        "get_device_name": lambda index: "A GPU",
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)


def test_a_gpu_that_solves_wrongly_or_not_at_all(gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(device: str) -> tuple[float, float]:
        if device == "cuda:2":
            raise RuntimeError("CUDA error: uncorrectable\nECC error")
        return {"cuda:1": 1e-3}.get(device, 1e-15), 0.01

    monkeypatch.setattr(shardesd.doctor, "_solve", solve)
    found = by_name(tmp_path)
    assert [found[f"cuda:{i}"].grade for i in range(3)] == ["ok", "note", "note"]
    assert "differs from the CPU's by 1.0e-03" in found["cuda:1"].found
    assert found["cuda:2"].found == "CUDA error: uncorrectable ECC error"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "driver for CUDA" in by_name(tmp_path)["gpus"].remedy or "CUDA build" in by_name(tmp_path)["gpus"].remedy


def test_a_gpu_without_the_batched_solver(gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be faster with it is a note, what would not is well; and so is one whose memory is taken."""
    reasons = {0: "its float64 is slow", 1: "it needs cuda-core: pip install 'shardesd[gpu]'"}

    def why(index: int) -> str | None:
        if index == 2:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY:\nThe API call failed")
        return reasons[index]

    assert all("batched" not in by_name(tmp_path)[f"cuda:{i}"].found for i in range(3))
    monkeypatch.setattr(spectra, "why_not_batched", why)
    monkeypatch.setattr(spectra, "missing_batched", lambda index: reasons[index] if index == 1 else None)
    found = by_name(tmp_path)
    assert [found[f"cuda:{i}"].grade for i in range(3)] == ["ok", "note", "note"]
    for index, reason in reasons.items():
        assert found[f"cuda:{index}"].found.endswith(f"equal to the CPU's; no batched solver: {reason}")
    full = "equal to the CPU's; no batched solver now: CUDA_ERROR_OUT_OF_MEMORY: The API call failed"
    assert found["cuda:2"].found.endswith(full)
    assert "until its memory is free" in found["cuda:2"].remedy


def test_a_wrong_cpu_ends_it(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.linalg.svd
    monkeypatch.setattr(np.linalg, "svd", lambda *a, **k: real(*a, **k) * 1.1)
    assert by_name(tmp_path)["cpu"].grade == "bad"


@pytest.mark.parametrize(("token", "says"), [("hf_bad", "refuses the token"), (None, "can't be reached")])
def test_the_hub(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, says: str) -> None:
    with HubServer() as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        else:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        (found,) = shardesd.doctor._hub()
    assert found.grade == "note"
    assert says in found.found
