"""How much memory is free on machines and in containers of all kinds, by files that say what the kernel would."""

from pathlib import Path

import pytest

from twostep.engine.host_memory import free_memory
from twostep.errors import MemoryPlanError

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 4 096 MiB available and no control groups."""
    written(
        tmp_path / "proc", meminfo="MemTotal:  9000000 kB\nMemFree:  100 kB\nMemAvailable:  4194304 kB\nBuffers: 5 kB"
    )
    return tmp_path


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def group(root: Path, path: str, limit: object, usage_mib: int, cache_mib: int = 0) -> None:
    """A control group of version 2."""
    statistics = f"anon 1\ninactive_anon 9\ninactive_file {cache_mib * MIB}\nactive_file 7"
    folder = root / "sys/fs/cgroup" / path
    written(folder, memory__max=str(limit), memory__current=str(usage_mib * MIB), memory__stat=statistics)


def belongs_to(root: Path, *lines: str) -> None:
    written(root / "proc/self", cgroup="\n".join(lines))


def test_a_machine_without_control_groups(root: Path) -> None:
    assert free_memory(root) == 4096 * MIB


def test_a_container_leaves_less(root: Path) -> None:
    group(root, "", 1000 * MIB, usage_mib=300)
    assert free_memory(root) == 700 * MIB


def test_unused_pages_of_files_count_as_free(root: Path) -> None:
    group(root, "", 1000 * MIB, usage_mib=900, cache_mib=500)
    assert free_memory(root) == 600 * MIB


def test_a_limit_above_what_the_machine_has(root: Path) -> None:
    group(root, "", 64_000 * MIB, usage_mib=300)
    assert free_memory(root) == 4096 * MIB


def test_a_group_without_limit(root: Path) -> None:
    group(root, "", "max", usage_mib=300)
    assert free_memory(root) == 4096 * MIB


def test_the_least_of_all_groups_above(root: Path) -> None:
    belongs_to(root, "0::/system.slice/twostep.service")
    group(root, "system.slice", 2000 * MIB, usage_mib=1800)
    group(root, "system.slice/twostep.service", 1000 * MIB, usage_mib=100)
    assert free_memory(root) == 200 * MIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    group(root, "", 1000 * MIB, usage_mib=1001)
    assert free_memory(root) == 0


def test_version_1(root: Path) -> None:
    belongs_to(root, "5:cpu,cpuacct:/small", "4:memory:/docker/af12")
    statistics = f"inactive_file 1\ntotal_inactive_file {100 * MIB}"
    written(
        root / "sys/fs/cgroup/memory/docker/af12",
        memory__limit_in_bytes=str(900 * MIB),
        memory__usage_in_bytes=str(400 * MIB),
        memory__stat=statistics,
    )
    assert free_memory(root) == 600 * MIB


def test_version_1_without_limit(root: Path) -> None:
    belongs_to(root, "4:memory:/")
    folder = root / "sys/fs/cgroup/memory"
    written(folder, memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes=str(400 * MIB))
    assert free_memory(root) == 4096 * MIB


def test_other_controllers_do_not_limit(root: Path) -> None:
    belongs_to(root, "5:cpuset:/small")
    group(root, "small", 10 * MIB, usage_mib=1)
    assert free_memory(root) == 4096 * MIB


def test_a_path_of_the_host_is_not_there_in_a_container(root: Path) -> None:
    belongs_to(root, "0::/docker/af12")
    group(root, "", 500 * MIB, usage_mib=100)
    assert free_memory(root) == 400 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match="the system does not tell its free memory"):
        free_memory(tmp_path)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="not Linux")
def test_this_machine() -> None:
    pages = Path("/proc/meminfo").read_text().split()
    assert 0 < free_memory() <= int(pages[pages.index("MemTotal:") + 1]) * 1024
