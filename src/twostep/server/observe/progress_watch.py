"""Watches whether the engine makes progress: while work is pending, steps must complete."""

import asyncio
from time import monotonic

from twostep.engine.process.client import EngineClient

PING_S = 1.0
"""Interval of pings to the engine, which it answers between two steps."""


class ProgressWatch:
    """Remembers when the engine last made progress."""

    def __init__(self) -> None:
        self._steps = -1
        self._since_s = monotonic()
        self._pinged_s = 0.0

    def stalled_s(self, client: EngineClient) -> float:
        """Seconds without a step while work was pending, according to the engine's last message; 0 without work."""
        steps = client.snapshot.steps if client.snapshot else 0
        if steps != self._steps or not client.outstanding:
            self._steps, self._since_s = steps, monotonic()
        return monotonic() - self._since_s

    async def run(self, client: EngineClient) -> None:
        """Pings until it is cancelled, but not while an answer is outstanding."""
        while True:
            self.stalled_s(client)
            if client.outstanding and client.heard_s >= self._pinged_s:
                self._pinged_s = monotonic()
                client.ping()
            await asyncio.sleep(PING_S)
