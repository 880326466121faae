"""What systemd hears of a server, on a datagram socket of the test's own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twostep.openai_api.api_error import ApiError
from twostep.server import systemd
from twostep.server.systemd import SystemdNotifier

COMMAND = Path(sys.executable).parent / "twostep"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.settimeout(60)
        yield bound


def heard(manager: socket.socket) -> list[str]:
    """Datagrams that lie there."""
    manager.setblocking(False)
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


class Doctor:
    """What `/health` would say each time it is asked; the loop ends with the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *problems: ApiError | None) -> None:
        self.left = list(problems)
        self.state: Any = SimpleNamespace(draining=False)
        self.task: asyncio.Task[None] | None = None
        monkeypatch.setattr(systemd, "problem", self.problem)

    def problem(self, state: object) -> ApiError | None:
        found = self.left.pop(0)
        if not self.left:
            assert self.task is not None
            self.task.cancel()
        return found

    def run(self, watched: SystemdNotifier) -> None:
        async def running() -> None:
            self.task = asyncio.create_task(watched.watch(self.state))
            await asyncio.wait([self.task])

        asyncio.run(running())


DEAD = ApiError("the engine died", status=503)


def test_signs_of_life_stop_while_the_engine_does_not_get_on(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = Doctor(monkeypatch, None, DEAD, DEAD, None, DEAD)
    doctor.run(SystemdNotifier(manager.getsockname(), watchdog_s=0.01))
    assert heard(manager) == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


def test_an_end_is_told_once_and_signs_of_life_go_on(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = Doctor(monkeypatch, None, None)
    doctor.state.draining = True
    doctor.run(SystemdNotifier(manager.getsockname(), watchdog_s=0.01))
    assert heard(manager) == ["READY=1", "STOPPING=1", "WATCHDOG=1", "WATCHDOG=1"]


def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0twostep-test-{os.getpid()}")
        Doctor(monkeypatch, None).run(SystemdNotifier(f"@twostep-test-{os.getpid()}", watchdog_s=9))
        assert heard(bound)[0] == "READY=1"


def test_nobody_listens_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Doctor(monkeypatch, None, None).run(SystemdNotifier(str(tmp_path / "gone"), watchdog_s=0.01))
    [record] = caplog.records
    assert "No such file or directory" in record.getMessage()


def test_a_manager_that_does_not_read_is_not_waited_for(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    Doctor(monkeypatch, *[None] * 2000).run(SystemdNotifier(manager.getsockname(), watchdog_s=1e-6))
    assert heard(manager)[0] == "READY=1"


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_environment(environ: dict[str, str], watchdog_s: float | None) -> None:
    environ = {**environ, "NOTIFY_SOCKET": "/run/x", "HOME": "/"}
    found = SystemdNotifier.of(environ)
    assert (found._address, found._watchdog_s, environ) == ("/run/x", watchdog_s, {"HOME": "/"})


@pytest.mark.usefixtures("default_model_path")
def test_a_server_from_its_start_to_its_end(manager: socket.socket) -> None:
    environ = {**os.environ, "NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "400000"}
    command = [COMMAND, "serve", "--port", "0", "--kv-memory", "64MiB", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ) as process:
        try:
            assert [manager.recv(4096) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
            process.send_signal(signal.SIGTERM)
            while (message := manager.recv(4096)) != b"STOPPING=1":
                assert message == b"WATCHDOG=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
