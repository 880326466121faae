"""`twostep serve` as a user starts it: when it is ready, and the memory and CPU time of its processes."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.loading import COMMAND
from benchmarks.measurement import EngineError
from twostep.config.settings import SETTINGS

READY = re.compile(r"at http://127\.0\.0\.1:(\d+), ready for requests")
START_LIMIT_S, END_LIMIT_S = 60, 10


class Pair(NamedTuple):
    """A value for each process."""

    front: float
    engine: float


class Server:
    """A server started with these flags, without settings from the environment. A context manager that ends it.
    `python` has the version to start; the default is this one.

    Raises `EngineError` if it does not start.
    """

    def __init__(self, model: Path, flags: Sequence[str], python: Path = Path(sys.executable)) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the server ends
        variables = {setting.variable for setting in SETTINGS}
        started = perf_counter()
        self._process = subprocess.Popen(
            [str(python), "-c", COMMAND, "serve", str(model), "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={name: value for name, value in os.environ.items() if name not in variables},
            text=True,
        )
        self.port = self._wait_until_ready()
        self.ready_s = perf_counter() - started
        """From the start of the process to the line that reports readiness."""

    def resident_bytes(self) -> Pair:
        """Resident memory, including file pages of the model."""
        return Pair(*(resident_bytes(Path(f"/proc/{pid}/status").read_text()) for pid in self._pids()))

    def cpu_s(self) -> Pair:
        """User and system CPU time of all threads since the start."""
        return Pair(*(cpu_s(Path(f"/proc/{pid}/stat").read_text()) for pid in self._pids()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _wait_until_ready(self) -> int:
        """Returns the port."""
        assert self._process.stdout is not None
        limit = Timer(START_LIMIT_S, self._process.kill)
        limit.start()
        try:
            for line in self._process.stdout:
                if found := READY.search(line):
                    return int(found[1])
        finally:
            limit.cancel()
        raise self._failed()

    def _failed(self) -> EngineError:
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "nothing"
        self.close()
        return EngineError(f"twostep serve: ended with exit code {self._process.returncode}, last output: {said}")

    def _pids(self) -> tuple[int, int]:
        """The front end and the engine, its only child."""
        front = self._process.pid
        [engine] = Path(f"/proc/{front}/task/{front}/children").read_text().split()
        return front, int(engine)


def resident_bytes(status: str) -> float:
    """Resident memory from /proc/PID/status."""
    [kib] = re.findall(r"^VmRSS:\s*(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024.0


def cpu_s(stat: str) -> float:
    """CPU time from /proc/PID/stat; the process name may contain spaces and parentheses."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


PROC = Path("/proc")


@dataclass(frozen=True)
class Memory:
    """Memory of several processes in bytes. `pss` counts shared pages once, including file pages of a model."""

    pss: int
    rss: int


def memory(pid: int, proc: Path = PROC) -> Memory:
    """Memory of the process and its descendants; ended processes count as 0."""
    texts = list[str]()
    for one in descendants(pid, proc):
        with suppress(OSError):
            texts.append((proc / str(one) / "smaps_rollup").read_text())
    return Memory(*(sum(_bytes(text, name) for text in texts) for name in ("Pss", "Rss")))


def descendants(pid: int, proc: Path = PROC) -> Iterator[int]:
    """The process, then its descendants."""
    yield pid
    for listed in (proc / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            for child in listed.read_text().split():
                yield from descendants(int(child), proc)


def _bytes(smaps: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", smaps, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
