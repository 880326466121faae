"""How many threads compute: never more than the machine really gives this process."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_GROUP_FOLDERS = Path("/sys/fs/cgroup")
_CPU_FOLDERS = Path("/sys/devices/system/cpu")


def default_threads() -> int:
    """The least of affinity, cgroup quota rounded down and physical cores within the affinity; at least 1."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    limits = [len(cpus), physical_cores(cpus)]
    quota = cgroup_quota()
    if quota is not None:
        limits.append(int(quota))
    return max(1, min(limits))


def physical_cores(cpus: set[int], folders: Path = _CPU_FOLDERS) -> int:
    """Distinct cores behind `cpus`; hyper-threads of one core count once. Where the system does not tell: all."""
    return len({_read(folders / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def cgroup_quota(groups: Path = _GROUPS, folders: Path = _GROUP_FOLDERS) -> float | None:
    """CPUs' worth of time this process may use: the least limit of its control groups; `None` where none has one."""
    quotas = (_quota(folder) for folder in _group_folders(_read(groups) or "0::/", folders))
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_folders(groups: str, folders: Path) -> Iterator[Path]:
    """Of the group in each line `number:controllers:/path` that limits CPUs, and of all groups above it.

    Version 2 names no controllers and lies at the top. A container often sees a path of its host that is not there;
    what is its own then lies where it sees the uppermost group.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        yield from (folders / ("cpu" if controllers else "") / part for part in (group, *group.parents))


def _quota(folder: Path) -> float | None:
    """Microseconds of computing allowed in a period, as CPUs. Version 2 says "max", version 1 -1 for no limit."""
    text = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    limits = re.fullmatch(r"(\d+) ([1-9]\d*)", text)
    return int(limits[1]) / int(limits[2]) if limits else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
