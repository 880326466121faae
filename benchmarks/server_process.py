"""`twostep serve` as a user starts it: when it is ready, what memory and CPU time its two processes take."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.errors import EngineError
from benchmarks.loading import COMMAND
from twostep.config.settings import SETTINGS

READY = re.compile(r"at http://127\.0\.0\.1:(\d+), ready for requests")
START_LIMIT_S, END_LIMIT_S = 60, 10


class Pair(NamedTuple):
    """Something of each process."""

    front: float
    engine: float


class Server:
    """Started with these flags and with nothing that the environment sets. Raises `EngineError` if it does not start.
    `with` ends it."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the server ends
        variables = {setting.variable for setting in SETTINGS}
        started = perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", str(model), "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={name: value for name, value in os.environ.items() if name not in variables},
            text=True,
        )
        self.port = self._wait_until_ready()
        self.ready_s = perf_counter() - started
        """From the start of the process to the line that says so."""

    def resident_bytes(self) -> Pair:
        """File pages of the model included."""
        return Pair(*(resident_bytes(Path(f"/proc/{pid}/status").read_text()) for pid in self._pids()))

    def cpu_s(self) -> Pair:
        """Since their start, in user and system mode, all threads."""
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
        """The port."""
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
        return EngineError(f"twostep serve: ended with exit code {self._process.returncode}, last said: {said}")

    def _pids(self) -> tuple[int, int]:
        """The front, and the engine, which is its only child."""
        front = self._process.pid
        [engine] = Path(f"/proc/{front}/task/{front}/children").read_text().split()
        return front, int(engine)


def resident_bytes(status: str) -> float:
    """Of the kernel's text on a process."""
    [kib] = re.findall(r"^VmRSS:\s*(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024.0


def cpu_s(stat: str) -> float:
    """The same; names of processes may have spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
