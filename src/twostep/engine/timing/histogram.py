"""Counts of values by size, as Prometheus wants them, cheap enough for every token."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Counted(NamedTuple):
    """A histogram at one moment. `counts`: values up to each bound and above the one before, last those above all."""

    counts: tuple[int, ...]
    total: float


class Histogram:
    """`bounds` ascend; a value that equals one counts below it, which Prometheus calls `le`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts `value` so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def counted(self) -> Counted:
        """As it is now."""
        return Counted(tuple(self._counts), self._total)
