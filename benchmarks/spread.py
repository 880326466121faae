"""What several runs of the same measurement say: the median, and how far the runs lie apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of `n` values, in their unit."""

    median: float
    min: float
    max: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Raises `StatisticsError` for no values."""
    return Spread(median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, by where it falls between them. Raises `IndexError` for no values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
