"""How many threads are taken on machines and in containers of all kinds, read from made-up kernel files (CASES 36)."""

from pathlib import Path

import pytest

from twostep.kernels import threads
from twostep.kernels.threads import cgroup_quota, default_threads, physical_cores


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def quota(tmp_path: Path, groups: str) -> float | None:
    return cgroup_quota(written(tmp_path, groups=groups) / "groups", tmp_path / "cgroup")


def test_quota_of_a_container(tmp_path: Path) -> None:
    written(tmp_path / "cgroup", cpu__max="150000 100000")
    assert quota(tmp_path, "0::/") == 1.5


def test_no_quota(tmp_path: Path) -> None:
    written(tmp_path / "cgroup", cpu__max="max 100000")
    assert quota(tmp_path, "0::/") is None


def test_quota_without_a_list_of_groups(tmp_path: Path) -> None:
    folders = written(tmp_path / "cgroup", cpu__max="200000 100000")
    assert cgroup_quota(tmp_path / "absent", folders) == 2


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "absent", tmp_path / "absent") is None


def test_quota_of_a_service_is_the_least_of_all_groups_above_it(tmp_path: Path) -> None:
    written(tmp_path / "cgroup/system.slice", cpu__max="300000 100000")
    written(tmp_path / "cgroup/system.slice/twostep.service", cpu__max="max 100000")
    assert quota(tmp_path, "0::/system.slice/twostep.service") == 3
    written(tmp_path / "cgroup/system.slice/twostep.service", cpu__max="100000 50000")
    assert quota(tmp_path, "0::/system.slice/twostep.service") == 2


def test_a_path_of_the_host_is_not_there_in_a_container(tmp_path: Path) -> None:
    written(tmp_path / "cgroup/cpu", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    assert quota(tmp_path, "4:memory:/docker/af12\n3:cpu,cpuacct:/docker/af12") == 4


@pytest.mark.parametrize("unlimited", ["-1", "nonsense"])
def test_version_1_without_quota(tmp_path: Path, unlimited: str) -> None:
    written(tmp_path / "cgroup/cpu", cpu__cfs_quota_us=unlimited, cpu__cfs_period_us="100000")
    assert quota(tmp_path, "3:cpuacct,cpu:/\n2:cpuset:/") is None


def test_other_controllers_do_not_limit(tmp_path: Path) -> None:
    written(tmp_path / "cgroup/cpu/small", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert quota(tmp_path, "4:cpuset:/small\n3:cpu:/") is None


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        written(tmp_path / f"cpu{cpu}/topology", thread_siblings_list=siblings)
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 1}, tmp_path) == 2


def test_every_cpu_is_a_core_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert physical_cores({0, 1, 2}, tmp_path) == 3


@pytest.mark.parametrize(
    ("cpus", "cores", "quota", "expected"),
    [(64, 32, None, 32), (64, 32, 4.0, 4), (64, 32, 3.9, 3), (64, 32, 0.5, 1), (2, 2, 8.0, 2), (8, 8, None, 8)],
)
def test_the_least_of_all_limits(
    monkeypatch: pytest.MonkeyPatch, cpus: int, cores: int, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    monkeypatch.setattr(threads, "physical_cores", lambda cpus: cores)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: quota)
    assert default_threads() == expected
