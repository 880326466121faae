"""Percentiles of one population of values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Summary:
    """Statistics of `n` values, in their unit; exact, not estimated from buckets."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    n: int


def summarise(values: Iterable[float]) -> Summary | None:
    """Returns None without values, which is different from zero."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99, most = (_percentile(ordered, percent) for percent in (50, 90, 99, 100))
    return Summary(fmean(ordered), p50, p90, p99, most, len(ordered))


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile with linear interpolation between the two nearest values, the default of numpy.

    Raises `IndexError` without values.
    """
    return _percentile(sorted(values), percent)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
