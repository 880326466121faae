"""How much memory is free for this process on this machine, and a plan that divides it."""

import re
from collections.abc import Sequence
from pathlib import Path

from twostep.config.values import KvMemory, MemoryBlocks, MemoryBytes, MemoryShare
from twostep.engine.other_servers import Server
from twostep.errors import MemoryPlanError
from twostep.kernels.cgroup import GROUP_FOLDERS, GROUPS, group_folders, read_text
from twostep.spec.memory import MemoryDemand, MemoryPlan, plan_share, plan_stated

_ROOT = Path("/")


def plan_memory(demand: MemoryDemand, free_bytes: int, kv_memory: KvMemory, least_tokens: int = 1) -> MemoryPlan:
    """Plans memory for a KV cache of this size.

    Raises `MemoryPlanError` with the arithmetic if it does not fit or holds no sequence of `least_tokens` tokens.
    """
    plan = _sized(demand, free_bytes, kv_memory)
    if fault := plan.fault(least_tokens):
        raise MemoryPlanError(fault)
    return plan


def _sized(demand: MemoryDemand, free_bytes: int, kv_memory: KvMemory) -> MemoryPlan:
    match kv_memory:
        case MemoryShare(share=share):
            return plan_share(demand, free_bytes, share)
        case MemoryBytes(count=count):
            return plan_stated(demand, free_bytes, count)
        case MemoryBlocks(count=count):
            return MemoryPlan(demand, free_bytes, None, count)


def free_memory(root: Path = _ROOT, others: Sequence[Server] = ()) -> int:
    """Bytes that can be allocated without swapping or being killed: of the machine, or less in a control group.

    What `others` have planned and not allocated yet is theirs, although the system calls it free. `root` holds `proc`
    and `sys`. Raises `MemoryPlanError` if the system does not report it.
    """
    available = available_bytes(read_text(root / "proc/meminfo") or "")
    if available is None:
        raise MemoryPlanError("the system does not tell its free memory (no MemAvailable in /proc/meminfo)")
    groups = group_folders("memory", root / GROUPS.relative_to("/"), root / GROUP_FOLDERS.relative_to("/"))
    left = [found for folder in groups if (found := left_in_group(folder)) is not None]
    outstanding = sum(other.outstanding_bytes for other in others)
    in_group = sum(other.outstanding_bytes for other in others if other.same_group)
    return max(0, min([available - outstanding, *(bytes_left - in_group for bytes_left in left)]))


def available_bytes(meminfo: str) -> int | None:
    """The kernel's estimate of memory for new use, including caches that it can drop."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def left_in_group(folder: Path) -> int | None:
    """Bytes that are left in one control group; `None` if it has no limit or does not exist.

    Inactive file pages count as used, but the kernel reclaims them before it refuses memory.
    """
    for limit_file, usage_file, cache in _VERSIONS:
        limit, usage = read_text(folder / limit_file), read_text(folder / usage_file)
        if limit and usage and limit.isdecimal():
            return max(0, int(limit) - int(usage) + _statistic(read_text(folder / "memory.stat") or "", cache))
    return None


_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of versions 2 and 1: limit, usage, and the statistic of inactive file pages. No limit is "max" in version 2, a
number larger than all memory in version 1."""


def _statistic(text: str, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
