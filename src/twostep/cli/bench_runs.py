"""The runs of `twostep bench`: each load in turn, or those that a sweep asks for."""

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from twostep.bench.http import Patience
from twostep.bench.interrupts import interrupts
from twostep.bench.limits import parse_limits
from twostep.bench.live import LiveLine
from twostep.bench.record import Closed, End, Fit, Mode, Open, RunRecord
from twostep.bench.result import Result, Run, Step, client_machine, workload_facts
from twostep.bench.run import Options
from twostep.bench.run import run as run_load
from twostep.bench.sweep import Search, check_limits, sweep
from twostep.bench.target import Target
from twostep.cli import engine_options
from twostep.cli.bench import DEFAULT_CLIENTS, DEFAULT_REQUESTS, DEFAULT_URL, MADE_UP
from twostep.errors import InvalidParameterError, ResultError
from twostep.metrics.load import Limits
from twostep.terminal import StatusLine
from twostep.turns import take_short_turns
from twostep.workload.arrivals import AtOnce, Renewal
from twostep.workload.find import find_workload
from twostep.workload.kinds import KINDS, make_workload
from twostep.workload.rates import mean_rate
from twostep.workload.reshape import Changes, reshaped
from twostep.workload.workload import Workload

SECRET = ("--api-key", "--header")
FOR_SERVERS = ("url", "api_key", "header", "extra", "tokens_per_word", "token_ids", "stall_s", "request_limit_s")
HIGHEST = 1024.0
SHARE = 0.99
LEAST = 1 / 16
"""A sweep looks at loads from this times to that times where it begins; never at less than one client."""

Runner = Callable[[Workload, Mode, asyncio.Event], Awaitable[tuple[RunRecord, tuple[Step, ...]]]]
"""A server does not tell its steps."""


@dataclass(frozen=True)
class Load:
    """One run. `rate`: what the workload was scaled to, if it was."""

    workload: Workload
    mode: Mode
    rate: float | None = None


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """What contradicts itself is refused before anything is asked."""
    for name in FOR_SERVERS if options.offline else engine_options.NAMES:
        if getattr(options, name):
            whose = "a server; --offline has none" if options.offline else "--offline"
            parser.error(f"--{name.replace('_', '-')} is for {whose}")
    if options.share is not None and not options.sweep:
        parser.error("--share is for --sweep")
    if options.cv is not None and options.workload not in MADE_UP:
        parser.error("--cv is for what is made up; a file has its own arrivals")
    levels = options.rate or options.concurrency or ()
    if options.sweep and len(levels) > 1:
        parser.error("--sweep begins with one --rate or --concurrency, not several")
    if options.sweep and levels and bool(options.rate) != (options.sweep == "rate"):
        parser.error(f"--sweep looks for the highest {options.sweep}; give --{options.sweep} to begin with")
    if any(level % 1 for level in options.concurrency or ()):
        parser.error("--concurrency is a number of clients")


def measure(options: argparse.Namespace) -> Result:
    """Raises `TargetError`, `WorkloadError`, `InvalidParameterError` before or between runs."""
    _check_folders(options.out, options.html)
    limits = parse_limits(options.goodput)
    if options.sweep:
        check_limits(limits, by_rate=options.sweep == "rate")
    return asyncio.run(_measure(options, limits))


def _check_folders(*paths: Path | None) -> None:
    """Before minutes of measuring."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ResultError(f"{path}: no such folder")


async def _measure(options: argparse.Namespace, limits: Limits) -> Result:
    say = StatusLine().say
    runs: list[Run] = []
    with interrupts() as stop, _runner(options) as run_one:

        async def measured(level: float | None) -> Run | None:
            """None: whoever waits has had enough."""
            load = _load(options, level)
            say(_words(options, load))
            record, steps = await run_one(load.workload, load.mode, stop)
            runs.append(Run(record, workload_facts(load.workload), limits, load.rate, steps))
            return None if record.end is End.INTERRUPTED else runs[-1]

        verdict = None
        if options.sweep:
            verdict = await sweep(_search(options), measured)
        else:
            for level in _levels(options):
                if await measured(level) is None:
                    break
    return Result(_command(sys.argv[1:]), client_machine(), tuple(runs), verdict)


def _levels(options: argparse.Namespace) -> Sequence[float | None]:
    """None: the workload's own times."""
    given: tuple[float, ...] | None = options.rate or options.concurrency
    return given or (DEFAULT_CLIENTS if options.workload in MADE_UP else (None,))


def _search(options: argparse.Namespace) -> Search:
    [start] = options.rate or options.concurrency or (1.0,)
    share = SHARE if options.share is None else options.share
    if options.sweep == "concurrency":
        return Search(1, start, HIGHEST * start, whole=True, share=share)
    return Search(LEAST * start, start, HIGHEST * start, share=share)


# --- workloads ----------------------------------------------------------------------------------------------------


def _load(options: argparse.Namespace, level: float | None) -> Load:
    by_rate = bool(options.rate) or options.sweep == "rate"
    rate = level if by_rate else None
    workload = _workload(options, rate)
    return Load(workload, Open() if by_rate or level is None else Closed(int(level)), rate)


def _workload(options: argparse.Namespace, rate: float | None) -> Workload:
    say = StatusLine().say
    if options.workload in MADE_UP:
        arrivals = AtOnce() if rate is None else Renewal(rate, 1.0 if options.cv is None else options.cv)
        made = make_workload(KINDS[options.workload](), arrivals, options.requests or DEFAULT_REQUESTS, options.seed)
        exact = None if mean_rate(made) is None else rate  # few arrivals have by chance another rate than was asked
        return reshaped(made, _changes(options, rate=exact), say)
    return reshaped(find_workload(options.workload, say), _changes(options, options.requests, rate), say)


def _changes(options: argparse.Namespace, requests: int | None = None, rate: float | None = None) -> Changes:
    own = ("requests", "rate", "rate_scale", "sample")
    shared = {one.name: getattr(options, one.name) for one in fields(Changes) if one.name not in own}
    return Changes(requests=requests, rate=rate, **shared)


def _words(options: argparse.Namespace, load: Load) -> str:
    """What is about to be measured."""
    count, mode = len(load.workload.requests), load.mode
    name = load.workload.name or options.workload
    how = f"{mode.clients} clients" if isinstance(mode, Closed) else f"{load.rate:g} requests/s" if load.rate else ""
    return f"{count} requests of {name}, {how or 'at their own times'}"


# --- whom to ask --------------------------------------------------------------------------------------------------


@contextmanager
def _runner(options: argparse.Namespace) -> Iterator[Runner]:
    if options.offline:
        from twostep.cli.bench_offline import Offline

        with closing(Offline(options, engine_options.settings(options))) as offline:
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
        api_key=options.api_key or os.environ.get("TWOSTEP_API_KEY"),
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
