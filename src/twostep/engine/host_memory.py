"""How much memory this process may still take on this machine, and a plan that divides it."""

import re
from pathlib import Path

from twostep.config.values import KvMemory, MemoryBlocks, MemoryBytes, MemoryShare
from twostep.errors import MemoryPlanError
from twostep.kernels.cgroup import GROUP_FOLDERS, GROUPS, group_folders, read_text
from twostep.spec.memory import MemoryDemand, MemoryPlan, plan_share, plan_stated

_ROOT = Path("/")


def plan_memory(demand: MemoryDemand, free_bytes: int, kv_memory: KvMemory, least_tokens: int = 1) -> MemoryPlan:
    """A plan that can be carried out. Raises `MemoryPlanError` with the arithmetic where it does not fit or holds no
    sequence of `least_tokens` tokens."""
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


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that can be taken without swapping or being killed: the machine's, or less where a control group says so.

    `root` holds `proc` and `sys`. Raises `MemoryPlanError` where the system does not tell.
    """
    available = available_bytes(read_text(root / "proc/meminfo") or "")
    if available is None:
        raise MemoryPlanError("the system does not tell its free memory (no MemAvailable in /proc/meminfo)")
    groups = group_folders("memory", root / GROUPS.relative_to("/"), root / GROUP_FOLDERS.relative_to("/"))
    return min([available, *(left for folder in groups if (left := left_in_group(folder)) is not None)])


def available_bytes(meminfo: str) -> int | None:
    """What the kernel estimates to be free for new use, caches that it would give up included."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def left_in_group(folder: Path) -> int | None:
    """Bytes that one control group still leaves its processes; `None` where it has no limit, or is none.

    Pages of files that were not used lately count as used, but the kernel takes them back before it refuses memory.
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
"""Version 2 says "max" for no limit, version 1 a number beyond all memory. Limit, usage, and unused pages of files."""


def _statistic(text: str, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
