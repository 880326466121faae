"""Tells systemd how the server is, by its datagrams (sd_notify): ready, alive, ending."""

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
"""How often it is looked whether the server is ending, at least."""


class SystemdNotifier:
    """Whoever started this process and wants to hear of it; often nobody."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        """`watchdog_s`: without a sign of life for so long the process is killed and started anew."""
        self._address = None if address is None else address.replace("@", "\0", 1) if address[:1] == "@" else address
        self._watchdog_s = watchdog_s
        self._failed = False

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Self:
        """As systemd names itself, with the variables taken away: child processes are not to be heard for this one."""
        address = environ.pop("NOTIFY_SOCKET", None)
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = watchdog_us.isdecimal() and int(watchdog_us) > 0 and pid in ("", str(os.getpid()))
        return cls(address or None, int(watchdog_us) / 1e6 if is_watched else None)

    async def watch(self, state: ServerState) -> None:
        """From when requests are taken on until it is cancelled. There are signs of life as long as `/health` says that
        the server is alive."""
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
        """Never waits; says once in the log that nobody listens."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as ours:
                ours.sendto(message.encode(), self._address)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("NOTIFY_SOCKET %r: %s: %s", self._address, message, error.strerror or error)
