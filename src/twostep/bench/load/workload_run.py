"""Runs a workload against a server: open or closed loop, warm-up, time limit, progress, early end."""

import asyncio
import resource
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from time import monotonic, monotonic_ns
from typing import Any, TypeVar

from twostep.bench.client.client import Ask, Client, connect
from twostep.bench.client.outcome import Outcome
from twostep.bench.client.target import Prompt, Target
from twostep.bench.load.prompts import FIRST_ID, IdSource, Source, WordSource, find_fit
from twostep.bench.load.run_record import End, Fit, RunRecord
from twostep.errors import InvalidParameterError, TargetError
from twostep.metrics.summary import summarise
from twostep.terminal import StatusLine, bar
from twostep.workload.definition import Workload
from twostep.workload.schedule import Closed, Mode, schedule

T = TypeVar("T")
ShowProgress = Callable[["RunProgress"], None]


@dataclass(frozen=True)
class Options:
    """Options of a run. Raises `InvalidParameterError`."""

    salt: str
    """Seed of the prompt content. With the salt of an earlier run, prompts are found in the prefix cache."""
    warmup: int = 0
    """Warm-up requests, one after the other: the first of the workload, with the same lengths but other content."""
    limit_s: float | None = None
    """The run ends after this time with the requests sent so far."""
    fit: Fit | None = None
    """None: measured with probe requests."""
    vocabulary: int | None = None
    """If set, prompts are token ids below it instead of words."""

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < 2 * FIRST_ID:
            raise InvalidParameterError(
                f"the vocabulary has {self.vocabulary} tokens; it must have at least {2 * FIRST_ID}, as token ids from "
                f"{FIRST_ID} are used",
                "vocabulary",
            )


async def run(
    workload: Workload,
    target: Target,
    mode: Mode,
    options: Options,
    show_progress: ShowProgress | None = None,
    stop: asyncio.Event | None = None,
) -> RunRecord:
    """Sends all requests of the workload. Calls `show_progress` several times a second; setting `stop` ends the run.

    Failed requests become outcomes. Raises `TargetError` if the server cannot be reached or the run ends before its
    first request, and `InvalidParameterError` for a workload or mode that cannot be run.
    """
    _check(workload, target, mode, options)
    stop = stop or asyncio.Event()
    room = make_room(mode, len(workload.requests))
    client, fit = await _unless(stop, _prepared(workload, target, options))
    running = Running(workload, mode, client, _source(workload, fit, options, options.salt), room)
    started_at = datetime.now(UTC)
    end = await running.run(stop, options.limit_s, show_progress)
    outcomes = sent(running.outcomes())
    return RunRecord(
        server=client.server,
        workload=workload.name,
        source=workload.source,
        mode=mode,
        started_at=started_at,
        outcomes=outcomes,
        end=end,
        lateness=summarise(running.lateness_s),
        lag=summarise(running.lag_s),
        salt=options.salt,
        fit=fit,
        warmup=options.warmup,
    )


def sent(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Returns `outcomes`. Raises `TargetError` if it is empty."""
    if not outcomes:
        raise TargetError("the run ended before its first request was sent")
    return outcomes


def _check(workload: Workload, target: Target, mode: Mode, options: Options) -> None:
    if not workload.requests:
        raise InvalidParameterError("the workload has no requests", "workload")
    if isinstance(mode, Closed) and mode.clients < 1:
        raise InvalidParameterError(f"the number of clients is {mode.clients}; it must be at least 1", "concurrency")
    if options.vocabulary is not None and target.endpoint == "chat":
        raise InvalidParameterError("prompts of token ids need --endpoint completions", "endpoint")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`. Cancels it and raises `TargetError` if `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
    raise TargetError("stopped before the first request of the run")


async def _prepared(workload: Workload, target: Target, options: Options) -> tuple[Client, Fit | None]:
    """Connects, measures tokens per word, and warms up."""
    client = await connect(target)
    fit = await _fit(workload, client, options)
    await _warm_up(workload, client, _source(workload, fit, options, f"{options.salt}/warm-up"), options.warmup)
    return client, fit


async def _fit(workload: Workload, client: Client, options: Options) -> Fit | None:
    """None if no prompt is made of words."""
    if options.vocabulary is not None or all(request.text is not None for request in workload.requests):
        return None
    return options.fit or await find_fit(client, options.salt)


def _source(workload: Workload, fit: Fit | None, options: Options, salt: str) -> Source:
    if options.vocabulary is not None:
        return IdSource(options.vocabulary, workload.block_tokens, salt)
    return WordSource(fit or Fit(overhead=0, per_word=1), workload.block_tokens, salt)


async def _warm_up(workload: Workload, client: Client, source: Source, requests: int) -> None:
    """Raises `TargetError` if a warm-up request fails, as the run would fail too."""
    for number, request in enumerate(islice(workload.requests, requests)):
        prompt = source.prompt(number, request)
        outcome = await client.ask(Ask(number, prompt, request.input_tokens, request.output_tokens, due_ns=0), 0)
        if failure := outcome.failure:
            raise TargetError(f"{client.server.url}: a warm-up request failed: {failure.kind}: {failure.detail}")


# --- progress ---------------------------------------------------------------------------------------------------------

QUIET_S = 10
"""Seconds between lines when not on a terminal."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run."""

    requests: int
    sent: int
    done: int
    """Successful or failed."""
    failed: int
    tokens: int
    """Tokens of ended requests, and chunks with text of running ones."""
    elapsed_s: float

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        per_s = self.tokens / self.elapsed_s if self.elapsed_s else 0.0
        running = self.sent - self.done
        return (
            f"{self.done}/{self.requests} requests, {running} running{failed}, "
            f"{self.tokens} tokens ({per_s:.0f}/s), {self.elapsed_s:.0f} s"
        )


class LiveLine:
    """Shows progress on standard error; pass it to `run` as `show_progress`. Redraws a line on a terminal, otherwise
    prints one line every 10 s."""

    def __init__(self, line: StatusLine | None = None) -> None:
        self._line = line or StatusLine()
        self._said_s = monotonic()

    def __call__(self, progress: RunProgress) -> None:
        if self._line.live:
            self._line.show(f"{bar(progress.done, progress.requests)} {progress}")
        elif monotonic() - self._said_s >= QUIET_S:
            self._said_s = monotonic()
            self._line.say(str(progress))

    def clear(self) -> None:
        """Removes the line at the end of the run."""
        self._line.clear()


# --- open files -------------------------------------------------------------------------------------------------------

SPARE = 64
"""Open files reserved for everything else."""


def make_room(mode: Mode, requests: int) -> int:
    """Raises the open-file limit of the process as far as needed and allowed. Returns the possible connections.

    Raises `InvalidParameterError` if these are fewer than the clients of a closed loop, or none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(mode.clients, requests) if isinstance(mode, Closed) else requests
    wanted = most + SPARE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if isinstance(mode, Closed) and allowed < wanted:
        message = f"{most} clients need {wanted} open files; the limit of this process is {hard} (ulimit -Hn)"
        raise InvalidParameterError(message, "concurrency")
    room = max(allowed, soft) - SPARE
    if room < 1:
        raise InvalidParameterError(
            f"at least {SPARE + 1} open files are needed; the limit of this process is {hard} (ulimit -Hn)"
        )
    return room


# --- the loop --------------------------------------------------------------------------------------------------------

TICK_S = 0.05
"""Interval at which the lateness of the client's timers is measured."""
TICKS_PER_REPORT = 5


class Running:
    """The loop of one run: sends due requests, collects outcomes, measures its own lateness."""

    def __init__(self, workload: Workload, mode: Mode, client: Client, source: Source, room: int) -> None:
        """`room`: maximum number of connections at a time."""
        self.lateness_s: list[float] = []
        """Of each request that was sent, in seconds."""
        self.lag_s: list[float] = []
        self._requests, self._client, self._source, self._room = workload.requests, client, source, room
        self._schedule = schedule(workload.requests, mode)
        self._prepared: tuple[int, Prompt] | None = None
        """Number and prompt of the request that is probably next."""
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}
        """Running requests by number."""
        self._outcomes: dict[int, Outcome] = {}
        self._failed = self._tokens = 0
        self._defect: BaseException | None = None
        self._wake = asyncio.Event()
        self._origin_ns = monotonic_ns()

    async def run(self, stop: asyncio.Event, limit_s: float | None, show_progress: ShowProgress | None) -> End:
        """Runs until all requests have ended, `stop` is set, or the time limit is reached.

        Raises `TargetError` if more connections are needed than this process can open.
        """
        self._origin_ns = monotonic_ns()
        driving, stopping = asyncio.create_task(self._drive()), asyncio.create_task(stop.wait())
        ticking = asyncio.create_task(self._tick(show_progress))
        try:
            await asyncio.wait({driving, stopping, ticking}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end = End.WHOLE if driving.done() else End.INTERRUPTED if stopping.done() else End.LIMIT
            await _cancelled([driving, stopping, ticking, *self._tasks.values()])
            self._report(show_progress)
        return end

    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of all requests that were sent, ordered by number."""
        return tuple(self._outcomes[number] for number in sorted(self._outcomes))

    # --- due requests -------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        while len(self._outcomes) < len(self._requests):
            for number, due_ns in self._schedule.take(self._now_ns()):
                self._send(number, due_ns)
            self._prepare()
            await self._wait(self._schedule.next_ns())
            if self._defect:
                raise self._defect

    async def _wait(self, next_ns: int | None) -> None:
        """Waits until a request has ended or it is `next_ns`."""
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
                f"{self._client.server.url}: {len(self._tasks)} requests are running, and this process cannot open "
                "more files (ulimit -Hn); use a lower rate"
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
        """Makes the next prompt in advance, so that it does not delay a request that is due."""
        number = self._schedule.ahead()
        if number is not None:
            self._prepared = number, self._prompt(number)

    # --- ended requests -----------------------------------------------------------------------------------------------

    def _ended(self, number: int, task: asyncio.Task[Outcome]) -> None:
        del self._tasks[number]
        self._wake.set()
        if task.cancelled():  # before it started
            return
        if task.exception():
            self._defect = task.exception()
            return
        outcome = self._outcomes[number] = task.result()
        self.lateness_s.append((outcome.sent_ns - outcome.due_ns) / 1e9)
        self._failed += outcome.failure is not None and not outcome.cut
        self._tokens += len(outcome.token_ns)
        self._schedule.ended(number, self._now_ns())

    # --- own lateness and progress ------------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return monotonic_ns() - self._origin_ns

    async def _tick(self, show_progress: ShowProgress | None) -> None:
        ticks = 0
        while True:
            before_ns = monotonic_ns()
            await asyncio.sleep(TICK_S)
            self.lag_s.append(max(0.0, (monotonic_ns() - before_ns) / 1e9 - TICK_S))
            ticks += 1
            if ticks % TICKS_PER_REPORT == 0:
                self._report(show_progress)

    def _report(self, show_progress: ShowProgress | None) -> None:
        if show_progress is not None:
            done, running = len(self._outcomes), len(self._tasks)
            tokens = self._tokens + self._client.pieces
            elapsed_s = self._now_ns() / 1e9
            show_progress(RunProgress(len(self._requests), done + running, done, self._failed, tokens, elapsed_s))


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits for them. Raises the first error among their results."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
