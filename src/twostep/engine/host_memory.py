"""How much memory this process may still take on this machine, and a plan that divides it."""

import re
from collections.abc import Sequence
from pathlib import Path

from twostep.engine.other_servers import Server
from twostep.errors import InvalidParameterError, MemoryPlanError
from twostep.kernels.cgroup import GROUP_FOLDERS, GROUPS, group_folders, read_text
from twostep.spec.memory import MemoryDemand, MemoryPlan, plan_share, plan_stated

_ROOT = Path("/")


def plan_memory(
    demand: MemoryDemand,
    free_bytes: int,
    *,
    share: float | None = None,
    kv_bytes: int | None = None,
    kv_blocks: int | None = None,
    least_tokens: int = 1,
) -> MemoryPlan:
    """A plan that can be carried out, by one of three: share of free memory for all of it, bytes, or blocks of KV.

    Raises `MemoryPlanError` with the arithmetic where it does not fit or holds no sequence of `least_tokens` tokens,
    `InvalidParameterError` for a share outside (0, 1] and for anything but one of the three.
    """
    plan = _sized(demand, free_bytes, share, kv_bytes, kv_blocks)
    if fault := plan.fault(least_tokens):
        raise MemoryPlanError(fault)
    return plan


def _sized(
    demand: MemoryDemand, free_bytes: int, share: float | None, kv_bytes: int | None, kv_blocks: int | None
) -> MemoryPlan:
    match share, kv_bytes, kv_blocks:
        case float() | int(), None, None:
            if not 0 < share <= 1:
                raise InvalidParameterError(f"share is {share}; it has to be above 0 and at most 1")
            return plan_share(demand, free_bytes, share)
        case None, int(), None:
            return plan_stated(demand, free_bytes, kv_bytes)
        case None, None, int():
            return MemoryPlan(demand, free_bytes, None, kv_blocks)
    raise InvalidParameterError("one of share, kv_bytes and kv_blocks has to be stated, and no other")


def free_memory(root: Path = _ROOT, others: Sequence[Server] = ()) -> int:
    """Bytes that can be taken without swapping or being killed: the machine's, or less where a control group says so.

    What `others` have planned and not taken yet is theirs, although the system calls it free. `root` holds `proc` and
    `sys`. Raises `MemoryPlanError` where the system does not tell.
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
