"""The backend of one machine: an engine's process, which is started again if it dies, but not for ever."""

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import NoReturn, Self

from twostep.config.configs import EngineConfig
from twostep.engine.backend import Accepted, Capabilities, Phase, Submit, Worker
from twostep.engine.outputs import Event
from twostep.engine.process.engine_client import EngineClient, OnLateOutput
from twostep.engine.process.engine_process import EngineProcess
from twostep.errors import EngineDiedError, TwostepError

MOST_DEATHS = 3
WINDOW_S = 60.0
"""An engine that died `MOST_DEATHS` times within this time is not started again."""
NAME = "local"

Start = Callable[[int], Awaitable[EngineClient]]
"""Starts an engine and waits until its model is loaded. The number: 0 for the first start, then 1, 2, ..."""
Report = Callable[[str, str], None]
"""Gets the name of an event and a line about it, for the log."""


class LocalBackend:
    """A `Backend` with one worker."""

    def __init__(
        self,
        start: Start,
        report: Report = lambda event, line: None,
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._start, self._report, self._now_s = start, report, now_s
        self.client: EngineClient | None = None
        """The engine that was started last; None until the first has its model loaded."""
        self.restarts = 0
        """How many times the engine was started again, successfully or not."""
        self._restarting = self._draining = False
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        """When the last ones were."""

    @classmethod
    def of(cls, path: Path, config: EngineConfig, report: Report, started: EngineProcess | None = None) -> Self:
        """For the model in this file. A recording holds the run of one engine, so only the first is recorded.

        `started`: the process of the first engine, if it runs already.
        """

        async def start(restart: int) -> EngineClient:
            if restart == 1 and config.record:
                report("recording_ended", f"{config.record}: the recording ends with the engine that died")
            if restart:
                return await EngineClient.start(path, replace(config, record=None))
            return await EngineClient.start(path, config, started)

        return cls(start, report)

    @property
    def phase(self) -> Phase:
        if self.client is None:
            return "loading"
        if self.client.died is None:
            return "ready"
        return "restarting" if self._restarting else "failed"

    @property
    def error(self) -> TwostepError | None:
        return self.client.died if self.client else None

    @property
    def capabilities(self) -> Capabilities | None:
        return self.client.capabilities if self.client else None

    @property
    def outstanding(self) -> int:
        return self.client.outstanding if self.client else 0

    async def run(self, on_ready: Callable[[], None]) -> NoReturn:
        await self._start_one()
        on_ready()
        while True:
            assert self.client is not None
            self._count_death(await self.client.wait_until_dead())
            self._restarting = True
            try:
                await self._restart()
            finally:
                self._restarting = False
            self._report("engine_restarted", "the engine is running again")

    def drain(self) -> None:
        self._draining = True

    async def stop(self) -> None:
        if self.client is not None:
            await self.client.stop()

    def submit(
        self, requests: Sequence[Submit], on_late_output: OnLateOutput = lambda output: None
    ) -> AsyncGenerator[Event | Accepted]:
        if self.client is None:
            raise EngineDiedError("the engine has not been started")
        return self.client.submit(requests, on_late_output)

    def cancel(self, id: str) -> None:
        if self.client is not None:
            self.client.cancel(id)

    def workers(self) -> Sequence[Worker]:
        client, is_up = self.client, self.phase == "ready"
        stalled_s = client.stalled_s if client and is_up else 0.0
        return [Worker(NAME, is_up, self.restarts, stalled_s, client.snapshot if client else None)]

    async def _start_one(self) -> None:
        self.client = await self._start(self.restarts)
        self.client.ping()  # so that there is a snapshot before the first request

    async def _restart(self) -> None:
        """A start that fails counts as a death."""
        while True:
            self.restarts += 1
            try:
                await self._start_one()
                return
            except TwostepError as error:
                self._count_death(error)

    def _count_death(self, error: TwostepError) -> None:
        """Raises `EngineDiedError` if the engine is not to be started again."""
        now_s = self._now_s()
        self._deaths.append(now_s)
        too_many = len(self._deaths) == MOST_DEATHS and now_s - self._deaths[0] <= WINDOW_S
        if self._draining:
            raise EngineDiedError(f"{error}, while the server was shutting down")
        self._report("engine_died", f"{error}{'' if too_many else '; starting it again'}")
        if too_many:
            problem = f"the engine died {MOST_DEATHS} times within {WINDOW_S:g} s and is not started again"
            raise EngineDiedError(problem)
