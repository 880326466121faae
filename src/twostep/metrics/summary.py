"""What many values say: percentiles of one population, which the caller names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Summary:
    """Of `n` values, in their unit; no member is estimated from buckets."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    n: int


def summarise(values: Iterable[float]) -> Summary | None:
    """None where there is no value: nothing was measured, which is not zero."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99, most = (_percentile(ordered, percent) for percent in (50, 90, 99, 100))
    return Summary(fmean(ordered), p50, p90, p99, most, len(ordered))


def percentile(values: Iterable[float], percent: float) -> float:
    """Between the two nearest values, by where it falls between them (the linear rule that numpy has as its default).

    Raises `IndexError` for no values.
    """
    return _percentile(sorted(values), percent)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
