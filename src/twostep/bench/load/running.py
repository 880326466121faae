"""The loop of a run: sends what is due, gathers what ends, watches itself."""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any

from twostep.bench.client.client import Ask, Client
from twostep.bench.client.outcome import Outcome
from twostep.bench.client.target import Prompt
from twostep.bench.load.live import Progress
from twostep.bench.load.prompts import Source
from twostep.bench.load.record import End, Mode
from twostep.bench.load.schedule import schedule
from twostep.errors import TargetError
from twostep.workload.workload import Workload

TICK_S = 0.05
"""Between looks at how late the client's own timers come."""
TICKS_PER_REPORT = 5

Report = Callable[[Progress], None]


class Running:
    """One run, from its begin to its end."""

    def __init__(self, workload: Workload, mode: Mode, client: Client, source: Source, room: int) -> None:
        """`room`: so many connections at a time are possible."""
        self.lateness_s: list[float] = []
        """Of each request that was sent."""
        self.lag_s: list[float] = []
        self._requests, self._client, self._source, self._room = workload.requests, client, source, room
        self._schedule = schedule(workload.requests, mode)
        self._prepared: tuple[int, Prompt] | None = None
        """Number and prompt of the request that is probably next."""
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}
        """Of requests that have been sent and not ended."""
        self._outcomes: dict[int, Outcome] = {}
        self._failed = self._tokens = 0
        self._defect: BaseException | None = None
        self._wake = asyncio.Event()
        self._origin_ns = monotonic_ns()

    async def run(self, stop: asyncio.Event, limit_s: float | None, report: Report | None) -> End:
        """Until all requests have ended, `stop` is set or the time is over.

        Raises `TargetError` when more requests are outstanding than this process can have connections.
        """
        self._origin_ns = monotonic_ns()
        driving, stopping = asyncio.create_task(self._drive()), asyncio.create_task(stop.wait())
        ticking = asyncio.create_task(self._tick(report))
        try:
            await asyncio.wait({driving, stopping, ticking}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end = End.WHOLE if driving.done() else End.INTERRUPTED if stopping.done() else End.LIMIT
            await _cancelled([driving, stopping, ticking, *self._tasks.values()])
            self._report(report)
        return end

    def outcomes(self) -> tuple[Outcome, ...]:
        """Of the requests that were sent, by number."""
        return tuple(self._outcomes[number] for number in sorted(self._outcomes))

    # --- what is due ----------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        while len(self._outcomes) < len(self._requests):
            for number, due_ns in self._schedule.take(self._now_ns()):
                self._send(number, due_ns)
            self._prepare()
            await self._something(self._schedule.next_ns())
            if self._defect:
                raise self._defect

    async def _something(self, next_ns: int | None) -> None:
        """Waits until a request has ended or the time has come."""
        self._wake.clear()
        loop = asyncio.get_running_loop()
        timer = loop.call_later((next_ns - self._now_ns()) / 1e9, self._wake.set) if next_ns is not None else None
        try:
            await self._wake.wait()
        finally:
            if timer:
                timer.cancel()

    def _send(self, number: int, due_ns: int) -> None:
        if len(self._tasks) >= self._room:
            raise TargetError(
                f"{self._client.server.url}: {len(self._tasks)} requests are outstanding, and this process may open "
                "no more files (ulimit -Hn); ask more slowly"
            )
        request, prompt = self._requests[number], self._prompt(number)
        ask = Ask(number, prompt, request.input_tokens, request.output_tokens, due_ns)
        task = asyncio.create_task(self._client.ask(ask, self._origin_ns))
        self._tasks[number] = task
        task.add_done_callback(lambda task: self._ended(number, task))

    def _prompt(self, number: int) -> Prompt:
        if self._prepared and self._prepared[0] == number:
            return self._prepared[1]
        return self._source.prompt(number, self._requests[number])

    def _prepare(self) -> None:
        """So that making a prompt keeps no request waiting that is due."""
        number = self._schedule.ahead()
        if number is not None:
            self._prepared = number, self._prompt(number)

    # --- what ends --------------------------------------------------------------------------------------------------

    def _ended(self, number: int, task: asyncio.Task[Outcome]) -> None:
        del self._tasks[number]
        self._wake.set()
        if task.cancelled():  # before it could begin
            return
        if task.exception():
            self._defect = task.exception()
            return
        outcome = self._outcomes[number] = task.result()
        self.lateness_s.append((outcome.sent_ns - outcome.due_ns) / 1e9)
        self._failed += outcome.failure is not None and not outcome.cut
        self._tokens += len(outcome.token_ns)
        self._schedule.ended(number, self._now_ns())

    # --- itself -----------------------------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return monotonic_ns() - self._origin_ns

    async def _tick(self, report: Report | None) -> None:
        ticks = 0
        while True:
            before_ns = monotonic_ns()
            await asyncio.sleep(TICK_S)
            self.lag_s.append(max(0.0, (monotonic_ns() - before_ns) / 1e9 - TICK_S))
            ticks += 1
            if ticks % TICKS_PER_REPORT == 0:
                self._report(report)

    def _report(self, report: Report | None) -> None:
        if report is not None:
            done, running = len(self._outcomes), len(self._tasks)
            tokens = self._tokens + self._client.pieces
            elapsed_s = self._now_ns() / 1e9
            report(Progress(len(self._requests), done + running, done, self._failed, tokens, elapsed_s))


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Ends them. Raises the first error that one of them ended with."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
