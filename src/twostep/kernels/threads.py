"""How many threads compute: never more than the machine really gives this process."""

import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CGROUP_V1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def default_threads() -> int:
    """The least of affinity, cgroup quota rounded down and physical cores within the affinity; at least 1."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    limits = [len(cpus), physical_cores(cpus)]
    quota = cgroup_quota()
    if quota is not None:
        limits.append(int(quota))
    return max(1, min(limits))


def physical_cores(cpus: set[int], topology: str = _TOPOLOGY) -> int:
    """Distinct cores behind `cpus`; hyper-threads of one core count once. Where the system does not tell: all of them."""
    siblings = {_read(Path(topology.format(cpu))) or str(cpu) for cpu in cpus}
    return len(siblings)


def cgroup_quota(v2: Path = _CGROUP_V2, quota: Path = _CGROUP_V1_QUOTA, period: Path = _CGROUP_V1_PERIOD) -> float | None:
    """CPUs' worth of time the container may use; `None` where there is no limit."""
    if text := _read(v2):
        limit, _, every = text.partition(" ")
        return None if limit == "max" else int(limit) / int(every)
    limit, every = _read(quota), _read(period)
    if limit is None or every is None or int(limit) <= 0:
        return None
    return int(limit) / int(every)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
