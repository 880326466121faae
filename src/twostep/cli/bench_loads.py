"""The loads of `twostep bench`: the workload and mode of each run."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil

from twostep.bench.load.goodput_limits import parse_limits
from twostep.bench.load.sweep import Search, check_limits, least_s
from twostep.bench.report.text_report import plural
from twostep.cli.bench import DEFAULT_CLIENTS, DEFAULT_REQUESTS, MADE_UP
from twostep.errors import InvalidParameterError
from twostep.terminal import StatusLine
from twostep.workload.arrivals import AtOnce, Renewal
from twostep.workload.definition import Workload, mean_rate, starts_s
from twostep.workload.kinds import KINDS, make_workload
from twostep.workload.reshape import Changes, lasting, reshaped
from twostep.workload.schedule import Closed, Mode, Open
from twostep.workload.trace_formats import find_workload

DIGITS = dict.fromkeys(map(ord, "0123456789"))
HIGHEST = 1024.0
SHARE = 0.99
LEAST = 1 / 16
"""A sweep covers loads from LEAST to HIGHEST times the starting load, and at least one client."""


@dataclass(frozen=True)
class RunLoad:
    """One run. `rate`: requests per second that the workload was scaled to; None if it was not."""

    workload: Workload
    mode: Mode
    rate: float | None = None

    def words(self) -> str:
        """Describes the run for a progress line."""
        asked = f"{plural(len(self.workload.requests), 'request')} of {self.workload.name or 'the workload'}"
        if isinstance(self.mode, Closed):
            return f"{asked}, {plural(self.mode.clients, 'client')}{self._idle_words(self.mode.clients)}"
        if self.rate is None:
            return f"{asked}, at the arrival times of the workload"
        starts = starts_s(self.workload)
        return f"{asked}, {self.rate:.4g} requests/s, arrivals last {starts[-1] - starts[0]:.0f} s"

    def _idle_words(self, clients: int) -> str:
        able = len(starts_s(self.workload))
        return f", of which at most {able} can be active at once" * (clients > able)


class Loads:
    """The workload and mode at each level. Notes about reading or changing the workload are printed once."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises `InvalidParameterError` for a sweep whose result would be meaningless."""
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
        """None stands for the arrival times of the workload."""
        given: tuple[float, ...] | None = self._options.rate or self._options.concurrency
        return given or (DEFAULT_CLIENTS if self._options.workload in MADE_UP else (None,))

    def search(self) -> Search:
        """Raises `InvalidParameterError` if the workload cannot be run at the starting level."""
        [start] = self._options.rate or self._options.concurrency or (1.0,)
        share = SHARE if self._options.share is None else self._options.share
        if self._by_rate:
            _check_independent(self.at(start).workload)
            return Search(LEAST * start, start, HIGHEST * start, share=share)
        able = len(starts_s(self.at(start).workload))
        if start > able:
            problem = (
                f"--concurrency {start:g} is more than the {able} conversations or requests that can be active at once"
            )
            raise InvalidParameterError(problem, "concurrency")
        return Search(1, start, min(able, HIGHEST * start), whole=True, share=share)

    def at(self, level: float | None) -> RunLoad:
        """Raises `WorkloadError`, `InvalidParameterError`."""
        rate = level if self._by_rate else None
        workload = self._workload(rate)
        return RunLoad(workload, Open() if self._by_rate or level is None else Closed(int(level)), rate)

    def _workload(self, rate: float | None) -> Workload:
        options = self._options
        needed = 0 if rate is None or self._least_s is None else ceil(rate * self._least_s) + 1
        if options.workload in MADE_UP:
            return self._made_up(rate, max(needed, options.requests or DEFAULT_REQUESTS))
        return self._at_rate(lasting(self._found, needed), rate)

    @cached_property
    def _found(self) -> Workload:
        """The workload in the file. Read once for all levels: a pipe cannot be read twice, and a file may change."""
        options = self._options
        return reshaped(find_workload(options.workload, self._say), self._changes(options.requests), self._say)

    def _made_up(self, rate: float | None, requests: int) -> Workload:
        options = self._options
        arrivals = AtOnce() if rate is None else Renewal(rate, 1.0 if options.cv is None else options.cv)
        made = make_workload(KINDS[options.workload](), arrivals, requests, options.seed)
        exact = (
            None if mean_rate(made) is None else rate
        )  # with few arrivals, the random rate differs from the requested one
        return self._at_rate(reshaped(made, self._changes(None), self._say), exact)

    def _at_rate(self, workload: Workload, rate: float | None) -> Workload:
        return workload if rate is None else reshaped(workload, Changes(rate=rate), self._say)

    def _changes(self, requests: int | None) -> Changes:
        own = ("requests", "rate", "rate_scale", "sample")
        shared = {one.name: getattr(self._options, one.name) for one in fields(Changes) if one.name not in own}
        return Changes(requests=requests, **shared)

    def _say(self, line: str) -> None:
        pattern = line.translate(DIGITS)  # numbers differ by level
        if pattern not in self._said:
            self._said.add(pattern)
            StatusLine().say(line)


def _check_time(limit_s: float | None, needed_s: float) -> None:
    if limit_s is not None and limit_s < needed_s:
        problem = f"--time-limit-s {limit_s:g} is too short for --sweep, whose arrivals last at least {needed_s:g} s"
        raise InvalidParameterError(f"{problem}; see --sweep-s", "time_limit_s")


def _check_independent(workload: Workload) -> None:
    if any(one.after is not None for one in workload.requests):
        raise InvalidParameterError(
            f"--sweep rate: requests of {workload.name or 'the workload'} wait for earlier answers, so a slow server "
            "does not get the full rate; use --sweep concurrency, or a workload without conversations, such as rag",
            "sweep",
        )
