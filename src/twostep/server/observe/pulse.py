"""Whether the engine makes progress: with work pending, its steps have to go on."""

import asyncio
from time import monotonic

from twostep.engine.process.client import EngineClient

PULSE_S = 1.0
"""How often the engine is asked how it is; it answers between two steps."""


class Pulse:
    """Remembers when the engine last got on."""

    def __init__(self) -> None:
        self._steps = -1
        self._since_s = monotonic()
        self._asked_s = 0.0

    def stalled_s(self, client: EngineClient) -> float:
        """For how long there has been work and no step, as far as the engine's last message tells; without work 0."""
        steps = client.snapshot.steps if client.snapshot else 0
        if steps != self._steps or not client.outstanding:
            self._steps, self._since_s = steps, monotonic()
        return monotonic() - self._since_s

    async def run(self, client: EngineClient) -> None:
        """Until it is cancelled. An engine that has not answered is not asked again."""
        while True:
            self.stalled_s(client)
            if client.outstanding and client.heard_s >= self._asked_s:
                self._asked_s = monotonic()
                client.ping()
            await asyncio.sleep(PULSE_S)
