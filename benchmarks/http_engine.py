"""A server that is started for a measurement and asked over OpenAI's API, whoever made it."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

from benchmarks import http_load
from benchmarks.completions import Completions, asks
from benchmarks.errors import EngineError
from benchmarks.jobs import Job, Stall
from benchmarks.prompts import prompt
from benchmarks.traces import Served

START_LIMIT_S, END_LIMIT_S = 600, 15
POLL_S = 0.05
FIRST = Job(prompt(4, "first"), 1)
"""Who answers this has started."""


@dataclass(frozen=True)
class Launch:
    """How to start a server. `name` and `version` are what tables call it, `file` its weights."""

    name: str
    version: str
    file: str
    command: Sequence[str]
    """Without host and port: `--host` and `--port` come behind."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that differ from this process's; None: not set."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Fields that its requests need beside OpenAI's."""


class HttpEngine:
    """Started, and it has answered one request. Raises `EngineError` with the server's last words if that fails."""

    def __init__(self, launch: Launch) -> None:
        self.name, self.version, self.file = launch.name, launch.version, launch.file
        self._port = _free_port()
        self._client = Completions(launch.name, self._port, launch.further)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the server ends
        started_s = perf_counter()
        self._process = self._start(launch)
        try:
            self._wait_until_it_answers(launch.further)
        except BaseException:  # Ctrl-C too: it is in a session of its own and would go on
            self.close()
            raise
        self.start_s = perf_counter() - started_s
        """From the start of the process to its first whole answer."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        return self._client.closed(jobs, outstanding)

    def interrupt(self, stall: Stall) -> Served:
        return self._client.interrupt(stall)

    def close(self) -> None:
        """Ends all that it started: the processes of its group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
        self._errors.close()

    def _start(self, launch: Launch) -> "subprocess.Popen[bytes]":
        environment = os.environ | launch.environment
        try:
            return subprocess.Popen(
                [*launch.command, "--host", "127.0.0.1", "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={name: value for name, value in environment.items() if value is not None},
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise EngineError(f"{launch.command[0]}: {error.strerror}") from error

    def _wait_until_it_answers(self, further: Mapping[str, Any]) -> None:
        deadline = perf_counter() + START_LIMIT_S
        while not self._answers(further):
            if (code := self._process.poll()) is not None:
                raise EngineError(f"{self.name}: ended with exit code {code}, last said: {self._last_words()}")
            if perf_counter() > deadline:
                raise EngineError(f"{self.name}: no answer after {START_LIMIT_S} s, last said: {self._last_words()}")
            sleep(POLL_S)

    def _answers(self, further: Mapping[str, Any]) -> bool:
        """A refused connection and 503 are what a server gives that is not ready yet."""
        with suppress(EngineError):
            [reply] = http_load.closed_loop(self._port, asks([FIRST], further)).replies
            return bool(reply.body())
        return False

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "nothing"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
