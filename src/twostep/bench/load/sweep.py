"""Finds the highest load that meets the limits, with few noisy measurements.

Pure except for the callback that measures: `next_level` derives the next level from the measurements so far.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from twostep.bench.load.goodput_limits import NAMES, asked
from twostep.errors import InvalidParameterError
from twostep.metrics.load import Limits, LoadSummary

LEVEL_S = 20.0
"""Default duration of the arrivals at each rate, in seconds."""
LIMITS_LONG = 5
"""The arrivals last at least this many times the limit that a growing queue violates."""


class LevelMeasurement(Protocol):
    """What the search needs of a measurement."""

    @property
    def summary(self) -> LoadSummary: ...

    @property
    def kept_pace(self) -> bool:
        """Whether the client kept its schedule."""

    @property
    def kept_up(self) -> bool:
        """Whether the queue of the server did not keep growing."""


class Judgement(StrEnum):
    """The judgement of one measurement."""

    MET = "met"
    MISSED = "missed"
    BEHIND = "fell behind"
    """Within the limits, but the queue grew: a longer run would have missed them."""
    LATE = "client late"
    """The client did not keep its schedule, so the server did not get the full load."""


class Ending(StrEnum):
    FOUND = "found"
    BELOW = "below the lowest"
    """Even the lowest level missed the limits."""
    ABOVE = "above the highest"
    """Even the highest level met them."""
    CLIENT = "the client's limit"
    """The client could not produce a higher load."""
    RUNS = "out of runs"
    STOPPED = "stopped"
    """The caller stopped the search."""


@dataclass(frozen=True)
class Search:
    """The range and precision of the search. Levels are requests per second, or clients of a closed loop."""

    lowest: float
    start: float
    highest: float
    whole: bool = False
    """Only whole numbers are valid levels, as for clients."""
    resolution: float = 0.05
    """The result may be lower than the true level by this share of it."""
    share: float = 0.99
    """Share of requests that must meet every limit; failed ones do not meet them. Of fewer than 100 requests none may
    miss."""
    most_runs: int = 40

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest < float("inf"):
            _refuse(f"levels {self.lowest:g}, {self.start:g}, {self.highest:g} (lowest, start, highest)", "0 < ... <=")
        if self.whole and any(level % 1 for level in (self.lowest, self.start, self.highest)):
            _refuse(f"levels {self.lowest:g}, {self.start:g}, {self.highest:g}", "whole numbers")
        if not 0 < self.resolution < 1:
            _refuse(f"resolution {self.resolution:g}", "between 0 and 1")
        if not 0 < self.share <= 1:
            _refuse(f"share {self.share:g}", "above 0, at most 1")
        if self.most_runs < 1:
            _refuse(f"at most {self.most_runs} runs", "1 or more")


@dataclass(frozen=True)
class Point:
    """One measurement."""

    level: float
    share: float
    """Share of requests that met every limit; 0 if none ended."""
    judgement: Judgement


@dataclass(frozen=True)
class Verdict:
    search: Search
    points: tuple[Point, ...]
    """In the order of measurement."""
    ending: Ending
    met: float | None
    """The highest level that met the limits, with no lower level that missed them."""
    missed: float | None
    """The lowest level that missed the limits."""


def least_s(limits: Limits, asked_s: float | None) -> float:
    """Minimum duration of the arrivals at each rate. Raises `InvalidParameterError` if `asked_s` is too short: a server
    overloaded by a tenth exceeds a limit of 1 s only after about 10 s."""
    limit_s = limits.ttft_s if limits.e2e_s is None else limits.e2e_s
    needed_s = LIMITS_LONG * (limit_s or 0)
    if asked_s is not None and asked_s < needed_s:
        allowed = f"at least {needed_s:g} s: {LIMITS_LONG} times the limit of {limit_s:g} s"
        raise InvalidParameterError(f"sweep: {asked_s:g} s of arrivals are too short; allowed: {allowed}", "sweep_s")
    return max(LEVEL_S, needed_s) if asked_s is None else asked_s


async def sweep(search: Search, measure: Callable[[float], Awaitable[LevelMeasurement | None]]) -> Verdict:
    """Measures level by level, at most `search.most_runs` times. `measure` returns None to stop the search."""
    points = list[Point]()
    while len(points) < search.most_runs and (level := next_level(search, points)) is not None:
        measured = await measure(level)
        if measured is None:
            return _verdict(search, points, Ending.STOPPED)
        points.append(judge(search, level, measured))
    return _verdict(search, points, _ending(search, points))


def judge(search: Search, level: float, measured: LevelMeasurement) -> Point:
    """Judges a measurement. A level at which no request ended in time is missed."""
    share = measured.summary.met / max(1, measured.summary.requests)
    if not measured.kept_pace:
        return Point(level, share, Judgement.LATE)
    if share < search.share:
        return Point(level, share, Judgement.MISSED)
    return Point(level, share, Judgement.MET if measured.kept_up else Judgement.BEHIND)


def stopped(search: Search, measured: Iterable[tuple[float, LevelMeasurement]]) -> Verdict:
    """The verdict of a search that stopped after these measurements."""
    points = [judge(search, level, found) for level, found in measured]
    return _verdict(search, points, Ending.STOPPED)


def next_level(search: Search, points: Sequence[Point]) -> float | None:
    """Doubles the level until one misses, halves it until one meets, then bisects. None when the result is known.

    One measurement decides a level, or two of three if the result depends on it: the lowest miss is repeated at once,
    as no higher level is measured afterwards, and the highest level that met is repeated at the end.
    """
    votes = _votes(points)
    if undecided := [level for level, cast in votes.items() if 2 * sum(cast) == len(cast)]:
        return undecided[0]
    met, missed = _bracket(votes)
    if missed is not None and len(votes[missed]) == 1:
        return missed
    between = None if _client_is_the_limit(points, missed) else _between(search, met, missed)
    if between is None and met is not None and len(votes[met]) == 1:
        return met
    return between


def check_limits(limits: Limits, by_rate: bool) -> None:
    """Raises `InvalidParameterError` if the result of a search would be meaningless."""
    names = [name for name, _ in asked(limits)]
    if not names:
        raise InvalidParameterError(f"sweep: needs --goodput with a limit for one of {', '.join(NAMES)}", "goodput")
    if by_rate and not {"ttft", "e2e"} & set(names):
        raise InvalidParameterError(
            "sweep: by rate it needs a limit on ttft or e2e, as a growing queue violates no other", "goodput"
        )


def verdict_words(verdict: Verdict, unit: str) -> str:
    """The verdict as one sentence; `unit` is `requests/s` or `clients`."""
    search, met, missed = verdict.search, _level(verdict.met), _level(verdict.missed)
    so_far = f"{met} {unit} met the limits" if verdict.met is not None else "no level met the limits"
    match verdict.ending:
        case Ending.FOUND:
            return f"{met} {unit} is the highest load that meets the limits; {_why_not(verdict)}"
        case Ending.BELOW:
            return f"not found: even {_level(search.lowest)} {unit}, the lowest allowed, misses the limits"
        case Ending.ABOVE:
            more = "; a workload of more requests allows more" if search.whole else ""
            return f"not found: even {_level(search.highest)} {unit}, the highest allowed, meets the limits{more}"
        case Ending.CLIENT:
            return f"limited by the client, not the server: it could not send {missed} {unit} on time; {so_far}"
        case Ending.RUNS:
            return f"not found in {search.most_runs} runs; {so_far}"
        case Ending.STOPPED:
            return f"stopped before the result was found; {so_far}"


def _why_not(verdict: Verdict) -> str:
    found = [point.judgement for point in verdict.points if point.level == verdict.missed]
    behind = found.count(Judgement.BEHIND) > found.count(Judgement.MISSED)
    return f"at {_level(verdict.missed)} the server falls behind" if behind else f"{_level(verdict.missed)} misses them"


def _verdict(search: Search, points: Sequence[Point], ending: Ending) -> Verdict:
    return Verdict(search, tuple(points), ending, *_bracket(_votes(points)))


def _ending(search: Search, points: Sequence[Point]) -> Ending:
    met, missed = _bracket(_votes(points))
    if next_level(search, points) is not None:
        return Ending.RUNS
    if missed is None:
        return Ending.ABOVE
    if _client_is_the_limit(points, missed):
        return Ending.CLIENT
    return Ending.BELOW if met is None else Ending.FOUND


def _votes(points: Sequence[Point]) -> dict[float, list[bool]]:
    """For each level, whether each of its measurements met the limits."""
    votes = dict[float, list[bool]]()
    for point in points:
        votes.setdefault(point.level, []).append(point.judgement is Judgement.MET)
    return votes


def _bracket(votes: dict[float, list[bool]]) -> tuple[float | None, float | None]:
    """The highest level that met below the lowest that missed, and the lowest that missed. A tie counts as neither."""
    missed = min((level for level, cast in votes.items() if 2 * sum(cast) < len(cast)), default=None)
    below = (level for level, cast in votes.items() if 2 * sum(cast) > len(cast) and (missed is None or level < missed))
    return max(below, default=None), missed


def _client_is_the_limit(points: Sequence[Point], missed: float | None) -> bool:
    """Whether this level was missed because the client was late rather than because of the server."""
    found = [point.judgement for point in points if point.level == missed]
    late = found.count(Judgement.LATE)
    return late > len(found) - late - found.count(Judgement.MET)


def _between(search: Search, met: float | None, missed: float | None) -> float | None:
    """The next unmeasured level; None if the bracket is narrow enough, or at the end of the allowed range."""
    if missed is None:
        return search.start if met is None else _beyond(met, min(2 * met, search.highest))
    if met is None:
        half = missed // 2 if search.whole else missed / 2
        return _beyond(missed, max(half, search.lowest))
    if missed - met <= max(search.resolution * missed, 1 if search.whole else 0):
        return None
    return (met + missed) // 2 if search.whole else (met + missed) / 2


def _beyond(known: float, level: float) -> float | None:
    return None if level == known else level


def _level(level: float | None) -> str:
    return "-" if level is None else f"{level:.4g}"


def _refuse(what: str, allowed: str) -> None:
    raise InvalidParameterError(f"sweep: {what}, allowed: {allowed}", "sweep")
