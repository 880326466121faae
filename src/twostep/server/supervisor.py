"""Keeps an engine running: starts it, logs its death, starts it again, and gives up if it keeps dying."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import NoReturn, Protocol

from twostep.engine.process.client import EngineClient
from twostep.engine.process.messages import Ready
from twostep.errors import EngineDiedError, TwostepError
from twostep.server.observe.progress_watch import ProgressWatch

MOST_DEATHS = 3
WINDOW_S = 60.0
"""An engine that died `MOST_DEATHS` times within this time is not started again."""

Start = Callable[[int], Awaitable[tuple[EngineClient, Ready]]]
"""Starts an engine and waits until its model is loaded. The number: 0 for the first start, then 1, 2, ..."""


class Owner(Protocol):
    """What uses the engine."""

    draining: bool
    """A dead engine is not replaced: the server is about to end."""
    progress: ProgressWatch

    def loaded(self, client: EngineClient, ready: Ready) -> None:
        """This engine accepts requests from now on."""

    def say(self, event: str, words: str) -> None:
        """Writes to the log."""


class Supervisor:
    """For one engine, in one event loop."""

    def __init__(self, owner: Owner, start: Start, now_s: Callable[[], float] = monotonic) -> None:
        self.restarts = 0
        """How many times the engine was started again, successfully or not."""
        self.restarting = False
        """The engine died, and a new one is loading the model."""
        self.client: EngineClient | None = None
        """The engine that was started last; None until the first has its model loaded."""
        self._owner, self._start, self._now_s = owner, start, now_s
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        """When the last ones were."""

    async def run(self, announce: Callable[[Ready], None]) -> NoReturn:
        """Runs until it is cancelled; the engine then lives on, see `stop`. `announce` is called after the first start.

        Raises `TwostepError` if the first start fails, `EngineDiedError` once the engine is given up.
        """
        announce(await self._start_one())
        while True:
            self._note_death(await self._death())
            self.restarting = True
            try:
                await self._restart()
            finally:
                self.restarting = False
            self._owner.say("engine_restarted", "the engine is running again")

    async def stop(self) -> None:
        """Ends the engine, if there is one."""
        if self.client is not None:
            await self.client.stop()

    async def _start_one(self) -> Ready:
        self.client, ready = await self._start(self.restarts)
        self._owner.loaded(self.client, ready)
        return ready

    async def _death(self) -> EngineDiedError:
        """Asks the engine for signs of life until it dies."""
        assert self.client is not None
        watch = asyncio.create_task(self._owner.progress.run(self.client))
        try:
            return await self.client.dead()
        finally:
            watch.cancel()

    async def _restart(self) -> None:
        """A start that fails counts as a death."""
        while True:
            self.restarts += 1
            try:
                await self._start_one()
                return
            except TwostepError as error:
                self._note_death(error)

    def _note_death(self, error: TwostepError) -> None:
        """Raises `EngineDiedError` if the engine is not to be started again."""
        now_s = self._now_s()
        self._deaths.append(now_s)
        given_up = len(self._deaths) == MOST_DEATHS and now_s - self._deaths[0] <= WINDOW_S
        if self._owner.draining:
            raise EngineDiedError(f"{error}, while the server was shutting down")
        self._owner.say("engine_died", f"{error}{'' if given_up else '; starting it again'}")
        if given_up:
            problem = f"the engine died {MOST_DEATHS} times within {WINDOW_S:g} s and is not started again"
            raise EngineDiedError(problem)
