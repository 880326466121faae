"""Workloads by name: a file, or an excerpt that comes with Twostep."""

from pathlib import Path

from twostep.errors import WorkloadError
from twostep.workload.foreign import open_workload
from twostep.workload.lines import Say
from twostep.workload.workload import Workload

EXCERPTS = Path(__file__).parent / "excerpts"
"""Beside them SOURCES.md says what they were made of and under which licence."""


def excerpt_names() -> list[str]:
    return sorted(path.stem for path in EXCERPTS.glob("*.jsonl"))


def find_workload(name: str, say: Say) -> Workload:
    """The excerpt of this name, else the file at this path, in any format that is known; ./NAME is always a file, and -
    standard input.

    Raises `WorkloadError`.
    """
    if name in excerpt_names():
        return open_workload(EXCERPTS / f"{name}.jsonl", say)
    try:
        return open_workload(Path(name), say)
    except OSError as error:
        excerpts = ", ".join(excerpt_names())
        raise WorkloadError(f"{name}: {error.strerror}; it has to be a file, or one of {excerpts}") from None
