"""What every measurement needs: the spread of its runs, progress lines, and the error of an engine that is compared."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from twostep.errors import TwostepError


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of `n` values, in their unit."""

    median: float
    min: float
    max: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Raises `StatisticsError` without values."""
    return Spread(median(values), min(values), max(values), len(values))


_STARTED_S = perf_counter()


def say(line: str) -> None:
    print(f"{perf_counter() - _STARTED_S:6.1f} s  {line}", file=sys.stderr, flush=True)


class EngineError(TwostepError):
    """An engine could not be started or measured: names the program and its message."""
