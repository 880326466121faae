"""The backend of one machine: an engine's process, which is started again if it dies, but not for ever.

Requests outlive it: each is sent to the next engine with what was received of it, and goes on where it stood.
"""

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import NoReturn, Self

from twostep.config.configs import EngineConfig
from twostep.engine.backend import Accepted, Capabilities, Phase, Submit, Worker
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.process.engine_client import EngineClient
from twostep.engine.process.engine_process import EngineProcess
from twostep.engine.process.open_requests import Inbox, OnLateOutput, OpenRequest, OpenRequests
from twostep.errors import EngineDiedError, TwostepError

MOST_DEATHS = 3
WINDOW_S = 60.0
"""An engine that died `MOST_DEATHS` times within this time is not started again."""
MOST_DEATHS_OF_REQUEST = 2
"""A request with which so many engines died, see `OpenRequest.deaths`, is not given to another: it may be the cause.
Fewer than `MOST_DEATHS`, so that such a request does not end the service."""
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
        requests: OpenRequests | None = None,
    ) -> None:
        """`requests`: where engines deliver their events."""
        self._requests = OpenRequests() if requests is None else requests
        self._start, self._report, self._now_s = start, report, now_s
        self.client: EngineClient | None = None
        """The engine that was started last; None until the first has its model loaded."""
        self.restarts = 0
        """How many times the engine was started again, successfully or not."""
        self.resumed = 0
        """Requests that were given to another engine."""
        self._draining = False
        self._failed: EngineDiedError | None = None
        """Why there will be no engine any more."""
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        """When the last ones were."""

    @classmethod
    def of(cls, path: Path, config: EngineConfig, report: Report, started: EngineProcess | None = None) -> Self:
        """For the model in this file. A recording holds the run of one engine, so only the first is recorded.

        `started`: the process of the first engine, if it runs already.
        """

        requests = OpenRequests()

        async def start(restart: int) -> EngineClient:
            if restart == 1 and config.record:
                report("recording_ended", f"{config.record}: the recording ends with the engine that died")
            if restart:
                return await EngineClient.start(path, replace(config, record=None), requests)
            return await EngineClient.start(path, config, requests, started)

        return cls(start, report, requests=requests)

    @property
    def phase(self) -> Phase:
        if self.client is None:
            return "loading"
        if self._failed is not None:
            return "failed"
        return "ready" if self.client.died is None else "restarting"

    @property
    def error(self) -> TwostepError | None:
        return self._failed or (self.client.died if self.client else None)

    @property
    def capabilities(self) -> Capabilities | None:
        return self.client.capabilities if self.client else None

    @property
    def outstanding(self) -> int:
        return self._requests.followed

    async def run(self, on_ready: Callable[[], None]) -> NoReturn:
        await self._start_one()
        on_ready()
        while True:
            assert self.client is not None
            died = await self.client.wait_until_dead()
            self._suspect(died)
            try:
                self._count_death(died)
                await self._restart()
            except EngineDiedError as error:
                self._fail(error)
                raise
            self._report("engine_restarted", f"the engine is running again{self._resume()}")

    def drain(self) -> None:
        self._draining = True

    async def stop(self) -> None:
        error = self._failed or EngineDiedError("the engine was stopped")
        self._failed = error
        if self.client is not None:
            await self.client.stop()
        self._fail(error)

    def submit(
        self, requests: Sequence[Submit], on_late_output: OnLateOutput = lambda output: None
    ) -> AsyncGenerator[Event | Accepted]:
        if self.client is None:
            raise EngineDiedError("the engine has not been started")
        return self._follow(requests, on_late_output)

    async def _follow(
        self, submits: Sequence[Submit], on_late_output: OnLateOutput
    ) -> AsyncGenerator[Event | Accepted]:
        if self._failed is not None:
            raise self._failed
        inbox = Inbox()
        requests = [OpenRequest(submit, inbox) for submit in submits]
        frames = [request.frame() for request in requests]  # all or none: one may be impossible to send
        self._requests.add(requests)
        left = {request.submit.id for request in requests}
        try:
            for request, frame in zip(requests, frames, strict=True):
                self._send(request, frame)
            while left:
                event = await inbox.next()
                if isinstance(event, RequestOutput):
                    left.remove(event.id)
                yield event
        finally:
            self._leave(left, inbox, on_late_output)

    def _leave(self, ids: set[str], inbox: Inbox, on_late_output: OnLateOutput) -> None:
        """Nobody follows these any more; some outputs may have arrived meanwhile."""
        while not inbox.events.empty():
            if isinstance(event := inbox.events.get_nowait(), RequestOutput):
                on_late_output(event)
        for id_ in self._requests.leave(ids, on_late_output):
            self.cancel(id_)

    def _send(self, request: OpenRequest, frame: bytearray) -> None:
        """To the engine, if there is one; else the next one gets it."""
        assert self.client is not None
        if self.client.submit(frame):
            request.sent()

    def cancel(self, id: str) -> None:
        if self.client is not None and (request := self._requests.get(id)):
            request.cancelled = True
            self.client.cancel(id)

    def workers(self) -> Sequence[Worker]:
        client, is_up = self.client, self.phase == "ready"
        stalled_s = client.stalled_s if client and is_up else 0.0
        return [Worker(NAME, is_up, self.restarts, stalled_s, client.snapshot if client else None, self.resumed)]

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
        """Raises `EngineDiedError` if the engine is not to be started again: while the server shuts down, only for
        requests that are to be finished."""
        if self._failed is not None:
            raise self._failed
        now_s = self._now_s()
        self._deaths.append(now_s)
        too_many = len(self._deaths) == MOST_DEATHS and now_s - self._deaths[0] <= WINDOW_S
        if self._draining and not self._requests.followed:
            raise EngineDiedError(f"{error}, while the server was shutting down")
        self._report("engine_died", f"{error}{'' if too_many else '; starting it again'}")
        if too_many:
            problem = f"the engine died {MOST_DEATHS} times within {WINDOW_S:g} s and is not started again"
            raise EngineDiedError(problem)

    # --- the requests of an engine that died ----------------------------------------------------------------------

    def _suspect(self, died: EngineDiedError) -> None:
        """Notes the death for each request that the engine had; ends those that were there too often."""
        now_ns = monotonic_ns()
        for request in self._requests:
            request.died(now_ns)
            if request.deaths == MOST_DEATHS_OF_REQUEST:
                why = f"{died}, as did the one before, each with this request; it is not tried again"
                self._requests.fail(EngineDiedError(why), request)

    def _resume(self) -> str:
        """Gives the open requests to the new engine, in the order of their arrival; says how many it continues."""
        continued = 0
        for request in self._requests:
            try:
                self._send(request, request.frame())
            except TwostepError as error:  # what it was given makes the message too long
                self._requests.fail(error, request)
                continue
            if request.cancelled:
                self.cancel(request.submit.id)
            continued += request.begun and not request.cancelled
        self.resumed += continued
        return f"; requests that continue: {continued}" if continued else ""

    def _fail(self, error: EngineDiedError) -> None:
        self._failed = error
        self._requests.fail(error)
