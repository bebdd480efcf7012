"""Limits of control groups, of both versions, of the process's own group and of those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardesd.engine import cgroup, devices


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def group(tree: Path, folder: str, **files: str) -> None:
    place = tree / "cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


def own(tree: Path, *lines: str) -> None:
    (tree / "own").write_text("".join(f"{line}\n" for line in lines))


def test_a_container_sees_its_limits_at_the_root(tree: Path) -> None:
    own(tree, "0::/")
    stat = "anon 5\ninactive_file 200\nactive_file 100\nfile 999\n"
    group(tree, "", cpu__max="250000 100000", memory__max="5000", memory__current="1000", memory__stat=stat)
    assert cgroup.cpu_quota() == 2.5
    assert cgroup.memory_left() == 4300
    assert devices.available_memory() == 4300
    assert devices.cpu_count() <= 2


def test_a_job_s_limits_are_those_of_its_group_and_of_all_above_it(tree: Path) -> None:
    own(tree, "0::/system.slice/job_7/step_0")
    group(tree, "system.slice", cpu__max="max 100000", memory__max="max")
    group(tree, "system.slice/job_7", cpu__max="400000 100000", memory__max="8000", memory__current="7000")
    group(tree, "system.slice/job_7/step_0", cpu__max="max 100000", memory__max="9000", memory__current="500")
    assert cgroup.cpu_quota() == 4
    assert cgroup.memory_left() == 1000


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_the_first_version_has_a_tree_for_each_kind(tree: Path, mounted: str) -> None:
    own(tree, "4:memory:/docker/abc", "3:cpuset:/", "1:cpu,cpuacct:/docker/abc", "0::/")
    group(tree, "unified")
    group(tree, f"{mounted}/docker/abc", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    group(tree, "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="77")
    stat = "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 25\n"
    files = {"memory__limit_in_bytes": "4000", "memory__usage_in_bytes": "1000", "memory__stat": stat}
    group(tree, "memory/docker/abc", **files)
    assert cgroup.cpu_quota() == 1.5
    assert devices.cpu_count() == 1
    assert cgroup.memory_left() == 3075


def test_within_a_container_the_first_version_s_path_leads_nowhere(tree: Path) -> None:
    own(tree, "4:memory:/docker/abc", "1:cpu:/docker/abc")
    group(tree, "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    group(tree, "memory", memory__limit_in_bytes="4000", memory__usage_in_bytes="5000")
    assert cgroup.cpu_quota() == 3
    assert cgroup.memory_left() == 0


def test_nothing_limits_what_is_in_no_group(tree: Path) -> None:
    assert cgroup.cpu_quota() == cgroup.memory_left() == float("inf")
    own(tree, "0::/")
    group(tree, "", cpu__max="max 100000", memory__max="max", memory__current="1")
    group(tree, "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cgroup.cpu_quota() == cgroup.memory_left() == float("inf")
    assert devices.cpu_count() >= 1
    assert devices.available_memory() > 0
