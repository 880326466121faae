"""The process of an engine before anybody talks to it, so that it can import its modules while its owner does.

Imports nothing heavy: a command starts the process first.
"""

import os
import signal
import subprocess
from socket import socket, socketpair
from types import TracebackType
from typing import Self

from twostep.processes import environment, signals_held, twostep_module

MANAGER_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Of systemd, which are for the owner only."""


class EngineProcess:
    """A process that waits for `Load` on its socket. A context manager that ends it if nobody has taken it."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        variables = {name: value for name, value in environment().items() if name not in MANAGER_VARIABLES}
        command = twostep_module("twostep.engine.process.engine_host", str(theirs.fileno()))
        # The owner copies the engine's output, so that a step never waits for the reader of the log. Signals that reach
        # the whole process group are the owner's affair, from the process's first moment.
        with signals_held(signal.SIGINT, signal.SIGTERM):
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
            )
        theirs.close()
        self._socket = ours
        self._taken = False

    def take(self) -> "tuple[subprocess.Popen[bytes], socket]":
        """The process and this end of its socket, which the caller has to end and close from now on."""
        self._taken = True
        return self._process, self._socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._taken:
            return
        self._socket.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def single_threaded_numpy() -> None:
    """Keeps numpy's BLAS from starting threads, in this process and its children, unless the user has set their number.

    The kernels have their own. BLAS threads cost a tenth of a second of CPU time as they start, and buffers.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
