"""The servers of one user on this machine: each says what memory it has planned, so that none plans the same again.

A server takes most of its memory long after it has planned it: weights while it loads, the KV cache as requests fill
it. Until then the system calls that memory free. So every server keeps a small file in the user's runtime folder. A
file whose process is gone is ignored, and the next server that plans removes it.
"""

import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from errno import EPERM, ETIMEDOUT
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from twostep.kernels.cgroup import read_text
from twostep.spec.memory import size_text

_PROC = Path("/proc")
LOCK_WAIT_S = 5.0


@dataclass(frozen=True)
class Server:
    """Another server's engine, and what it has planned and not taken yet."""

    pid: int
    outstanding_bytes: int
    same_group: bool
    """Whether the limits of this process's control groups are its limits too."""


class OtherServers(NamedTuple):
    """Those that run; `fault` says why they cannot be seen, if so."""

    servers: tuple[Server, ...] = ()
    fault: str | None = None

    def lines(self) -> Iterator[str]:
        """What a user has to know of them, to print at start."""
        if self.fault:
            yield f"note: other twostep servers on this machine cannot be seen: {self.fault}"
        if self.servers:
            number = f"{len(self.servers)} other twostep server{'s' if len(self.servers) > 1 else ''}"
            pids = ", ".join(str(server.pid) for server in self.servers)
            outstanding = size_text(sum(server.outstanding_bytes for server in self.servers))
            yield (
                f"note: {number} of this user on this machine (process {pids}); {outstanding} planned there and not in "
                "use yet do not count as free; cores are shared"
            )


@dataclass(frozen=True)
class _Entry:
    """A server's file: who it is, what it planned, and what its process took when it did."""

    pid: int
    started: int
    planned_bytes: int
    resident_bytes: int


class Registration:
    """This server's file, until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self) -> None:
        """Removes the file."""
        with suppress(OSError):
            self._path.unlink()


class Registry:
    """The files in `folder`; `proc` is where the system describes its processes."""

    def __init__(self, folder: Path | None = None, proc: Path = _PROC) -> None:
        self._folder, self._proc = folder or runtime_folder(), proc

    @contextmanager
    def planning(self) -> Iterator[OtherServers]:
        """The other servers. While this is entered no other server plans, so enter it until this one is registered.

        Where the folder cannot be used, the plan is made without it, and the result says so.
        """
        lock, others = None, OtherServers()
        try:
            lock = self._lock()
            others = OtherServers(tuple(self._others()))
        except OSError as error:
            others = OtherServers(fault=f"{error.filename or self._folder}: {error.strerror}")
        try:
            yield others
        finally:
            if lock is not None:
                os.close(lock)

    def register(self, planned_bytes: int) -> Registration | None:
        """Says that this process has planned so much; `None` where the folder cannot be used."""
        pid = os.getpid()
        entry = _Entry(pid, _started(self._proc, pid) or 0, planned_bytes, _resident(self._proc, pid))
        path = self._folder / f"{self._namespace()}-{pid}.json"
        try:
            path.with_suffix(".new").write_text(json.dumps(asdict(entry)))
            path.with_suffix(".new").replace(path)
        except OSError:
            return None
        return Registration(path)

    def _lock(self) -> int:
        """Raises `OSError` where the folder cannot be made or is not this user's alone, or another plans forever."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(EPERM, "the folder must belong to this user, and only this user may write to it")
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._wait_for(lock)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _wait_for(self, lock: int) -> None:
        """Planning takes milliseconds. Raises `TimeoutError` for a server that was stopped meanwhile."""
        deadline_s = monotonic() + LOCK_WAIT_S
        while True:
            with suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if monotonic() > deadline_s:
                raise TimeoutError(ETIMEDOUT, f"another server has locked the folder for {LOCK_WAIT_S} s")
            sleep(0.01)

    def _others(self) -> Iterator[Server]:
        for path in sorted(self._folder.glob(f"{self._namespace()}-*")):
            entry = _read(path)
            if entry is None or _started(self._proc, entry.pid) != entry.started:
                with suppress(OSError):
                    path.unlink()
            elif entry.pid != os.getpid():
                yield self._server(entry)

    def _server(self, entry: _Entry) -> Server:
        taken = max(0, _resident(self._proc, entry.pid) - entry.resident_bytes)
        groups = (read_text(self._proc / name / "cgroup") for name in (str(entry.pid), "self"))
        return Server(entry.pid, max(0, entry.planned_bytes - taken), len(set(groups)) == 1)

    def _namespace(self) -> str:
        """Numbers of processes mean something within one namespace only; containers may share a folder."""
        try:
            return re.sub(r"\D", "", os.readlink(self._proc / "self/ns/pid")) or "0"
        except OSError:
            return "0"


def runtime_folder() -> Path:
    """`twostep` in `$XDG_RUNTIME_DIR`; without one, a folder of this user's for temporary files. Need not exist."""
    if os.path.isabs(chosen := os.environ.get("XDG_RUNTIME_DIR", "")):
        return Path(chosen, "twostep")
    return Path(tempfile.gettempdir(), f"twostep-{os.getuid()}")


def _read(path: Path) -> _Entry | None:
    try:
        values = json.loads(path.read_text())
        return _Entry(**{name: int(value) for name, value in values.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _started(proc: Path, pid: int) -> int | None:
    """When a process started, in ticks since the system did; `None` if there is none, or it has ended."""
    fields = (read_text(proc / str(pid) / "stat") or "").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def _resident(proc: Path, pid: int) -> int:
    """Bytes of memory that a process has taken; pages of files do not count, since the system takes them back."""
    text = read_text(proc / str(pid) / "status") or ""
    return sum(1024 * int(size) for size in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", text, re.MULTILINE))
