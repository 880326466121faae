"""Runs a workload against a server: open loop or closed, with warm-up, time limit and an end at any moment."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from twostep.bench.client.client import Ask, Client, connect
from twostep.bench.client.files import make_room
from twostep.bench.client.outcome import Outcome
from twostep.bench.client.probe import find_fit
from twostep.bench.client.target import Target
from twostep.bench.load.prompts import FIRST_ID, IdSource, Source, WordSource
from twostep.bench.load.record import Closed, Fit, Mode, RunRecord
from twostep.bench.load.running import Report, Running
from twostep.errors import InvalidParameterError, TargetError
from twostep.metrics.summary import summarise
from twostep.workload.workload import Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Of a run. Raises `InvalidParameterError`."""

    salt: str
    """Prompts are made from it. With that of an earlier run a server finds them in its prefix cache."""
    warmup: int = 0
    """Requests before the run, one after the other: the workload's first, of the same lengths but other content."""
    limit_s: float | None = None
    """The run ends after so long, with what there is."""
    fit: Fit | None = None
    """None: found by asking the server."""
    vocabulary: int | None = None
    """Prompts are token ids below it, in place of words."""

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < 2 * FIRST_ID:
            raise InvalidParameterError(
                f"a vocabulary of {self.vocabulary}: token ids are taken from {FIRST_ID} up, so it has to have "
                f"{2 * FIRST_ID} at least",
                "vocabulary",
            )


async def run(
    workload: Workload,
    target: Target,
    mode: Mode,
    options: Options,
    report: Report | None = None,
    stop: asyncio.Event | None = None,
) -> RunRecord:
    """Asks all of the workload. `report` is called some times a second; setting `stop` ends the run at once.

    Requests that fail are outcomes. Raises `TargetError` if the server cannot be asked at all, or the run ends before
    the first of them is sent, and `InvalidParameterError` for a workload or a mode that cannot be run.
    """
    _check(workload, target, mode, options)
    stop = stop or asyncio.Event()
    room = make_room(mode, len(workload.requests))
    client, fit = await _unless(stop, _prepared(workload, target, options))
    running = Running(workload, mode, client, _source(workload, fit, options, options.salt), room)
    started_at = datetime.now(UTC)
    end = await running.run(stop, options.limit_s, report)
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
    """The same. Raises `TargetError` for none."""
    if not outcomes:
        raise TargetError("the run ended before its first request was sent")
    return outcomes


def _check(workload: Workload, target: Target, mode: Mode, options: Options) -> None:
    if not workload.requests:
        raise InvalidParameterError("the workload has no requests", "workload")
    if isinstance(mode, Closed) and mode.clients < 1:
        raise InvalidParameterError(f"{mode.clients} clients; there has to be one at least", "concurrency")
    if options.vocabulary is not None and target.endpoint == "chat":
        raise InvalidParameterError("prompts of token ids need the endpoint completions", "endpoint")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Raises `TargetError` if `stop` is set before the work is done, which then ends."""
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
    """Connects, asks how long words are, warms up."""
    client = await connect(target)
    fit = await _fit(workload, client, options)
    await _warm_up(workload, client, _source(workload, fit, options, f"{options.salt}/warm-up"), options.warmup)
    return client, fit


async def _fit(workload: Workload, client: Client, options: Options) -> Fit | None:
    """None where no prompt is made of words."""
    if options.vocabulary is not None or all(request.text is not None for request in workload.requests):
        return None
    return options.fit or await find_fit(client, options.salt)


def _source(workload: Workload, fit: Fit | None, options: Options, salt: str) -> Source:
    if options.vocabulary is not None:
        return IdSource(options.vocabulary, workload.block_tokens, salt)
    return WordSource(fit or Fit(overhead=0, per_word=1), workload.block_tokens, salt)


async def _warm_up(workload: Workload, client: Client, source: Source, requests: int) -> None:
    """Raises `TargetError` if one fails: so would the run."""
    for number, request in enumerate(islice(workload.requests, requests)):
        prompt = source.prompt(number, request)
        outcome = await client.ask(Ask(number, prompt, request.input_tokens, request.output_tokens, due_ns=0), 0)
        if failure := outcome.failure:
            raise TargetError(f"{client.server.url}: a warm-up request failed: {failure.kind}: {failure.detail}")
