"""Tells systemd the state of the server by datagrams (sd_notify): ready, alive, stopping."""

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Self

from twostep.server.api.server_info import problem
from twostep.server.state import ServerState

log = logging.getLogger(__name__)

READY, ALIVE, STOPPING = "READY=1", "WATCHDOG=1", "STOPPING=1"
LOOK_S = 1.0
"""How often the state of the server is checked, at least."""


class SystemdNotifier:
    """Sends messages to the service manager that started this process, if there is one."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        """`watchdog_s`: systemd restarts the process if it gets no `ALIVE` for so long."""
        self._address = None if address is None else address.replace("@", "\0", 1) if address[:1] == "@" else address
        self._watchdog_s = watchdog_s
        self._failed = False

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Self:
        """Reads systemd's variables and removes them, so that child processes do not notify on behalf of this one."""
        address = environ.pop("NOTIFY_SOCKET", None)
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = watchdog_us.isdecimal() and int(watchdog_us) > 0 and pid in ("", str(os.getpid()))
        return cls(address or None, int(watchdog_us) / 1e6 if is_watched else None)

    async def watch(self, state: ServerState) -> None:
        """Runs from the moment that requests are accepted until it is cancelled. Sends `ALIVE` as long as `/health`
        reports no problem."""
        self._say(READY)
        is_stopping = False
        try:
            while True:
                if state.draining and not is_stopping:
                    is_stopping = True
                    self._say(STOPPING)
                if self._watchdog_s is not None and problem(state) is None:
                    self._say(ALIVE)
                await asyncio.sleep(LOOK_S if self._watchdog_s is None else min(LOOK_S, self._watchdog_s / 4))
        finally:
            if not is_stopping:
                self._say(STOPPING)

    def _say(self, message: str) -> None:
        """Does not wait. Logs the first failure only."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as ours:
                ours.sendto(message.encode(), self._address)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("NOTIFY_SOCKET %r: %s: %s", self._address, message, error.strerror or error)
