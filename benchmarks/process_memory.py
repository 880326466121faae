"""Memory of a process and of all that it started, as the kernel counts it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Memory:
    """Bytes of several processes. `pss`: what some of them share is counted once, file pages of a model included."""

    pss: int
    rss: int


def memory(pid: int, proc: Path = PROC) -> Memory:
    """Of the process and its descendants. One that ended meanwhile has none."""
    texts = list[str]()
    for one in descendants(pid, proc):
        with suppress(OSError):
            texts.append((proc / str(one) / "smaps_rollup").read_text())
    return Memory(*(sum(_bytes(text, name) for text in texts) for name in ("Pss", "Rss")))


def descendants(pid: int, proc: Path = PROC) -> Iterator[int]:
    """The process first."""
    yield pid
    for listed in (proc / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            for child in listed.read_text().split():
                yield from descendants(int(child), proc)


def _bytes(smaps: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", smaps, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
