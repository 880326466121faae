"""The loads of `twostep bench`: which workload is asked how, level by level."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil

from twostep.bench.load.goodput_limits import parse_limits
from twostep.bench.load.run_record import Closed, Mode, Open
from twostep.bench.load.sweep import Search, check_limits, least_s
from twostep.bench.report.text_report import plural
from twostep.cli.bench import DEFAULT_CLIENTS, DEFAULT_REQUESTS, MADE_UP
from twostep.errors import InvalidParameterError
from twostep.terminal import StatusLine
from twostep.workload.arrivals import AtOnce, Renewal
from twostep.workload.definition import Workload, mean_rate, starts_s
from twostep.workload.kinds import KINDS, make_workload
from twostep.workload.reshape import Changes, lasting, reshaped
from twostep.workload.trace_formats import find_workload

DIGITS = dict.fromkeys(map(ord, "0123456789"))
HIGHEST = 1024.0
SHARE = 0.99
LEAST = 1 / 16
"""A sweep looks at loads from this times to that times where it begins; never at less than one client."""


@dataclass(frozen=True)
class Load:
    """One run. `rate`: what the workload was scaled to, if it was."""

    workload: Workload
    mode: Mode
    rate: float | None = None

    def words(self) -> str:
        """What is about to be measured."""
        asked = f"{plural(len(self.workload.requests), 'request')} of {self.workload.name or 'the workload'}"
        if isinstance(self.mode, Closed):
            return f"{asked}, {plural(self.mode.clients, 'client')}{self._idle_words(self.mode.clients)}"
        if self.rate is None:
            return f"{asked}, at their own times"
        starts = starts_s(self.workload)
        return f"{asked}, {self.rate:.4g} requests/s, arrivals last {starts[-1] - starts[0]:.0f} s"

    def _idle_words(self, clients: int) -> str:
        able = len(starts_s(self.workload))
        return f", of whom only {able} can ask at a time" * (clients > able)


class Loads:
    """What to ask at each level. What a workload says when it is read or changed is said once."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises `InvalidParameterError`, for a sweep that has no end that means something."""
        self._options, self._said = options, set[str]()
        limits = parse_limits(options.goodput)
        self._by_rate = bool(options.rate) or options.sweep == "rate"
        self._least_s: float | None = None
        if options.sweep:
            check_limits(limits, by_rate=self._by_rate)
        if options.sweep == "rate":
            self._least_s = least_s(limits, options.sweep_s)
            _check_time(options.time_limit_s, self._least_s)

    def levels(self) -> Sequence[float | None]:
        """None: the workload's own times."""
        given: tuple[float, ...] | None = self._options.rate or self._options.concurrency
        return given or (DEFAULT_CLIENTS if self._options.workload in MADE_UP else (None,))

    def search(self) -> Search:
        """Raises `InvalidParameterError` where the workload has no level to look at."""
        [start] = self._options.rate or self._options.concurrency or (1.0,)
        share = SHARE if self._options.share is None else self._options.share
        if self._by_rate:
            _check_independent(self.at(start).workload)
            return Search(LEAST * start, start, HIGHEST * start, share=share)
        able = len(starts_s(self.at(start).workload))
        if start > able:
            problem = f"--concurrency {start:g} is more than the workload has conversations or requests: {able}"
            raise InvalidParameterError(problem, "concurrency")
        return Search(1, start, min(able, HIGHEST * start), whole=True, share=share)

    def at(self, level: float | None) -> Load:
        """Raises `WorkloadError`, `InvalidParameterError`."""
        rate = level if self._by_rate else None
        workload = self._workload(rate)
        return Load(workload, Open() if self._by_rate or level is None else Closed(int(level)), rate)

    def _workload(self, rate: float | None) -> Workload:
        options = self._options
        needed = 0 if rate is None or self._least_s is None else ceil(rate * self._least_s) + 1
        if options.workload in MADE_UP:
            return self._made_up(rate, max(needed, options.requests or DEFAULT_REQUESTS))
        return self._at_rate(lasting(self._found, needed), rate)

    @cached_property
    def _found(self) -> Workload:
        """The file's, read once for all levels: a pipe gives it only once, and a file may change meanwhile."""
        options = self._options
        return reshaped(find_workload(options.workload, self._say), self._changes(options.requests), self._say)

    def _made_up(self, rate: float | None, requests: int) -> Workload:
        options = self._options
        arrivals = AtOnce() if rate is None else Renewal(rate, 1.0 if options.cv is None else options.cv)
        made = make_workload(KINDS[options.workload](), arrivals, requests, options.seed)
        exact = None if mean_rate(made) is None else rate  # few arrivals have by chance another rate than was asked
        return self._at_rate(reshaped(made, self._changes(None), self._say), exact)

    def _at_rate(self, workload: Workload, rate: float | None) -> Workload:
        return workload if rate is None else reshaped(workload, Changes(rate=rate), self._say)

    def _changes(self, requests: int | None) -> Changes:
        own = ("requests", "rate", "rate_scale", "sample")
        shared = {one.name: getattr(self._options, one.name) for one in fields(Changes) if one.name not in own}
        return Changes(requests=requests, **shared)

    def _say(self, line: str) -> None:
        what = line.translate(DIGITS)  # numbers differ by level, with how many requests it has
        if what not in self._said:
            self._said.add(what)
            StatusLine().say(line)


def _check_time(limit_s: float | None, needed_s: float) -> None:
    if limit_s is not None and limit_s < needed_s:
        problem = f"--time-limit-s {limit_s:g} is too short for --sweep, whose arrivals last {needed_s:g} s at least"
        raise InvalidParameterError(f"{problem}; see --sweep-s", "time_limit_s")


def _check_independent(workload: Workload) -> None:
    if any(one.after is not None for one in workload.requests):
        raise InvalidParameterError(
            f"--sweep by rate: requests of {workload.name or 'the workload'} wait for answers, so a slow server is not "
            "asked at the rate; use --sweep concurrency, or a workload without turns, such as rag",
            "sweep",
        )
