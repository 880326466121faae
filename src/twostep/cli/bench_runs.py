"""The runs of `twostep bench`: each load in turn, or the loads that a sweep asks for."""

import argparse
import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial

from twostep.bench.client.http import Patience
from twostep.bench.client.target import Target
from twostep.bench.load.goodput_limits import parse_limits
from twostep.bench.load.run_record import End, Fit, RunRecord
from twostep.bench.load.sweep import Search, Verdict, stopped, sweep
from twostep.bench.load.workload_run import LiveLine, Options
from twostep.bench.load.workload_run import run as run_load
from twostep.bench.report.output_files import is_replaced
from twostep.bench.report.result import EngineStep, Result, Run, client_machine, workload_facts, write_result
from twostep.cli import connection
from twostep.cli.bench import DEFAULT_URL
from twostep.cli.bench_loads import Loads
from twostep.cli.options import engine_keywords
from twostep.errors import InvalidParameterError, TwostepError
from twostep.terminal import StatusLine
from twostep.turns import take_short_turns
from twostep.workload.definition import Workload
from twostep.workload.schedule import Mode

SECRET = ("--api-key", "--header")

Runner = Callable[[Workload, Mode, asyncio.Event], Awaitable[tuple[RunRecord, tuple[EngineStep, ...]]]]
"""Runs one workload. Steps are empty for a server, which does not report them."""
Runners = AbstractContextManager[Runner]
"""A runner, and what it holds meanwhile."""


# --- signals ----------------------------------------------------------------------------------------------------------

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(asyncio.Event):
    """Set by the first signal received."""

    def __init__(self) -> None:
        super().__init__()
        self.by: signal.Signals | None = None

    def ask(self, which: signal.Signals) -> None:
        self.by = self.by or which
        self.set()


@contextmanager
def interrupts() -> Iterator[Stop]:
    """An event that SIGINT, SIGTERM and SIGHUP set, except those that the process ignores (SIGHUP under nohup).

    Works only in the event loop of the main thread. Restores the previous handlers at the end."""
    loop, stop = asyncio.get_running_loop(), Stop()
    before = {which: signal.getsignal(which) for which in ASKING}
    handled = [which for which in ASKING if before[which] is not signal.SIG_IGN]
    for which in handled:
        loop.add_signal_handler(which, stop.ask, which)
    try:
        yield stop
    finally:
        for which in handled:
            loop.remove_signal_handler(which)
            signal.signal(which, before[which])


# --- runs -------------------------------------------------------------------------------------------------------------


class Measuring:
    """All runs of one command. `result()` and --out contain all complete runs, even after an error or a signal."""

    def __init__(
        self, options: argparse.Namespace, runner: Callable[[argparse.Namespace], Runners] | None = None
    ) -> None:
        """`runner`: what runs a workload; None: what the options of `twostep bench` name. Raises
        `InvalidParameterError`."""
        self._runner = runner or _runner
        self.ended_by: signal.Signals | None = None
        """The signal that ended the measurement early."""
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
                with self._runner(self._options) as run_one:
                    await self._levels(partial(self._measured, run_one, stop))
            except TwostepError:
                if stop.by is None:  # otherwise the error is a consequence of the signal
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
        """Runs one level. Returns None if a signal stopped it."""
        load = self._loads.at(level)
        StatusLine().say(load.words())
        record, steps = await run_one(load.workload, load.mode, stop)
        self._runs.append(Run(record, workload_facts(load.workload), self._limits, load.rate, steps))
        if self._options.out and is_replaced(self._options.out):
            write_result(self.result(), self._options.out)
        return None if stop.is_set() else self._runs[-1]


# --- the target --------------------------------------------------------------------------------------------------


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
) -> tuple[RunRecord, tuple[EngineStep, ...]]:
    take_short_turns()  # a server on the same machine would delay this client and distort token times
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
    """Each run gets a new salt, so that its prompts are not in the prefix cache from the previous run."""
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
        raise InvalidParameterError(f"--header is {text!r}; it must have the form NAME:VALUE", "header")
    return name.strip(), value.strip()


def _extra(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidParameterError(f"--extra is {text!r}; it must be a JSON object", "extra")
    return fields


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The command line with secrets replaced by dots."""
    shown, is_secret = ["twostep"], False
    for word in words:
        name, equals, _ = word.partition("=")
        shown.append("..." if is_secret else f"{name}=..." if equals and name in SECRET else word)
        is_secret = word in SECRET
    return tuple(shown)
