"""Where Linux says what a process's control groups (versions 1 and 2) allow it; what the limits mean is for others."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/proc/self/cgroup")
GROUP_FOLDERS = Path("/sys/fs/cgroup")


def group_folders(controller: str, groups: Path = GROUPS, folders: Path = GROUP_FOLDERS) -> Iterator[Path]:
    """Of the group in each line `number:controllers:/path` of `groups` that has `controller`, and of all above it.

    Each of them may limit the process. Version 2 names no controllers and lies at the top. A container often sees a
    path of its host that is not there; what is its own then lies where it sees the uppermost group.
    """
    for line in (read_text(groups) or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        yield from (folders / (controller if controllers else "") / part for part in (group, *group.parents))


def read_text(path: Path) -> str | None:
    """What a file says, without space around it; `None` if nothing or not there."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
