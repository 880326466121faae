"""Recursive least squares: a fit that each new measurement corrects, as cheaply as a step of serving allows."""

from collections.abc import Sequence
from math import fsum


class RecursiveLeastSquares:
    """Fits `costs` so that `row · costs` is 1 for each row: what was counted, divided by what was measured.

    Each row restores a small part of the initial variance, so that costs can change. It restores no more than that:
    rows that are alike cannot separate their costs, and the estimates must not drift.
    """

    FORGETTING = 1e-5
    """Share of the initial variance that a row restores."""
    NOISE = 0.01
    """Variance of a measurement: 10 %, squared."""

    def __init__(self, costs: Sequence[float], doubt: float) -> None:
        """`costs`: initial values. `doubt`: their relative standard error."""
        self.costs = list(costs)
        self._doubt = [
            [(doubt * cost) ** 2 if i == j else 0.0 for j in range(len(costs))] for i, cost in enumerate(costs)
        ]
        self._covariance = self._doubt

    def error(self, row: Sequence[float]) -> float:
        """By what share of the measured time the costs fall short of it; negative if they exceed it."""
        return 1.0 - fsum(c * x for c, x in zip(self.costs, row, strict=True))

    def learn(self, row: Sequence[float], error: float) -> None:
        """`error`: that of the row, perhaps limited by the caller."""
        spread = [fsum(p * x for p, x in zip(line, row, strict=True)) for line in self._covariance]
        total = self.NOISE + fsum(x * s for x, s in zip(row, spread, strict=True))
        gain = [s / total for s in spread]
        self.costs = [c + g * error for c, g in zip(self.costs, gain, strict=True)]
        updated = [
            [p - g * s for p, s in zip(line, spread, strict=True)]
            for line, g in zip(self._covariance, gain, strict=True)
        ]
        self._covariance = [
            [p + self.FORGETTING * (first - p) for p, first in zip(line, doubts, strict=True)]
            for line, doubts in zip(updated, self._doubt, strict=True)
        ]
