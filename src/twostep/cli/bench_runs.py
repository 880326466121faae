"""The runs of `twostep bench`: each load in turn, or those that a sweep asks for."""

import argparse
import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from twostep.bench.client.http import Patience
from twostep.bench.client.target import Target
from twostep.bench.load.goodput_limits import parse_limits
from twostep.bench.load.interrupts import Stop, interrupts
from twostep.bench.load.live import LiveLine
from twostep.bench.load.record import End, Fit, Mode, RunRecord
from twostep.bench.load.run import Options
from twostep.bench.load.run import run as run_load
from twostep.bench.load.sweep import Search, Verdict, stopped, sweep
from twostep.bench.report.output import is_replaced
from twostep.bench.report.result import Result, Run, Step, client_machine, workload_facts, write_result
from twostep.cli import connection
from twostep.cli.bench import DEFAULT_URL
from twostep.cli.bench_loads import Loads
from twostep.cli.options import engine_keywords
from twostep.errors import InvalidParameterError, TwostepError
from twostep.terminal import StatusLine
from twostep.turns import take_short_turns
from twostep.workload.workload import Workload

SECRET = ("--api-key", "--header")

Runner = Callable[[Workload, Mode, asyncio.Event], Awaitable[tuple[RunRecord, tuple[Step, ...]]]]
"""A server does not tell its steps."""


class Measuring:
    """All runs of one command. `result` has what there is, whatever ended them, and so has --out after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises `InvalidParameterError`."""
        self.ended_by: signal.Signals | None = None
        """The signal that ended it before it was done."""
        self._options, self._loads = options, Loads(options)
        self._limits = parse_limits(options.goodput)
        self._runs: list[Run] = []
        self._search: Search | None = None
        self._verdict: Verdict | None = None

    def result(self) -> Result:
        verdict = self._verdict
        if self._search is not None and verdict is None:
            whole = (run for run in self._runs if run.record.end is not End.INTERRUPTED)
            verdict = stopped(self._search, ((run.level or 0, run) for run in whole))
        return Result(_command(sys.argv[1:]), client_machine(), tuple(self._runs), verdict)

    async def run(self) -> None:
        """Raises `TargetError`, `WorkloadError`, `InvalidParameterError` before or between runs."""
        with interrupts() as stop:
            try:
                with _runner(self._options) as run_one:
                    await self._levels(partial(self._measured, run_one, stop))
            except TwostepError:
                if stop.by is None:  # else it is of the run that the signal ended
                    raise
            self.ended_by = stop.by

    async def _levels(self, measured: Callable[[float | None], Awaitable[Run | None]]) -> None:
        if self._options.sweep:
            self._search = self._loads.search()
            self._verdict = await sweep(self._search, measured)
            return
        for level in self._loads.levels():
            if await measured(level) is None:
                break

    async def _measured(self, run_one: Runner, stop: Stop, level: float | None) -> Run | None:
        """None: whoever waits has had enough."""
        load = self._loads.at(level)
        StatusLine().say(load.words())
        record, steps = await run_one(load.workload, load.mode, stop)
        self._runs.append(Run(record, workload_facts(load.workload), self._limits, load.rate, steps))
        if self._options.out and is_replaced(self._options.out):
            write_result(self.result(), self._options.out)
        return None if stop.is_set() else self._runs[-1]


# --- whom to ask --------------------------------------------------------------------------------------------------


@contextmanager
def _runner(options: argparse.Namespace) -> Iterator[Runner]:
    if options.offline:
        from twostep.cli.bench_offline import Offline

        with closing(Offline(options, engine_keywords(options))) as offline:
            yield offline.run
    else:
        yield partial(_run_served, options, _target(options))


async def _run_served(
    options: argparse.Namespace, target: Target, workload: Workload, mode: Mode, stop: asyncio.Event
) -> tuple[RunRecord, tuple[Step, ...]]:
    take_short_turns()  # a server on the same machine would keep us from seeing when its tokens come
    line = LiveLine()
    try:
        return await run_load(workload, target, mode, _run_options(options), line, stop), ()
    finally:
        line.clear()


def _target(options: argparse.Namespace) -> Target:
    limits = {"stall_s": options.stall_s, "request_s": options.request_limit_s}
    return Target(
        url=options.url or DEFAULT_URL,
        endpoint=options.endpoint,
        model=options.model,
        api_key=connection.api_key(options),
        trust=connection.trust(options),
        headers=dict(_header(text) for text in options.header),
        extra=_extra(options.extra),
        ignore_eos=not options.no_ignore_eos,
        patience=Patience(**{name: value for name, value in limits.items() if value is not None}),
    )


def _run_options(options: argparse.Namespace) -> Options:
    """A salt of its own for each run: otherwise its prompts would lie in the prefix cache since the run before."""
    return Options(
        salt=options.salt or secrets.token_hex(4),
        warmup=options.warmup,
        limit_s=options.time_limit_s,
        fit=None if options.tokens_per_word is None else Fit(0.0, options.tokens_per_word),
        vocabulary=options.token_ids,
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise InvalidParameterError(f"--header is {text!r}; it has to be NAME:VALUE", "header")
    return name.strip(), value.strip()


def _extra(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidParameterError(f"--extra is {text!r}; it has to be a JSON object", "extra")
    return fields


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """Without what is nobody else's business."""
    shown, is_secret = ["twostep"], False
    for word in words:
        name, equals, _ = word.partition("=")
        shown.append("..." if is_secret else f"{name}=..." if equals and name in SECRET else word)
        is_secret = word in SECRET
    return tuple(shown)
