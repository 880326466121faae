"""How many threads compute: never more than the machine really gives this process."""

import os
import re
from pathlib import Path

from twostep.kernels.cgroup import GROUP_FOLDERS, GROUPS, group_folders, read_text

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
    return len({read_text(folders / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def cgroup_quota(groups: Path = GROUPS, folders: Path = GROUP_FOLDERS) -> float | None:
    """CPUs' worth of time this process may use: the least limit of its control groups; `None` where none has one."""
    quotas = (_quota(folder) for folder in group_folders("cpu", groups, folders))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """Microseconds of computing allowed in a period, as CPUs. Version 2 says "max", version 1 -1 for no limit."""
    quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    limits = re.fullmatch(r"(\d+) ([1-9]\d*)", read_text(folder / "cpu.max") or f"{quota} {period}")
    return int(limits[1]) / int(limits[2]) if limits else None
