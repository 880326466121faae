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
