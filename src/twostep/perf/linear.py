"""A step-time model that knows nothing beforehand: a few costs, fitted while the engine runs."""

from math import fsum

from twostep.core.step_time import StepShape


class LinearStepTime:
    """Fixed cost + cost a token + cost a pair + cost a sampled row, fitted while running.

    Recursive least squares on relative errors (each row divided by its measured time). Each step a little of the doubt
    of the start comes back, so that costs may change, and no more than that: hours of mere decoding do not tell a
    token's cost from a row's, and what was once known of them must not drift away. Negative costs count as zero. The
    margin is the smoothed size of the relative error, at most a quarter.
    """

    FORGETTING = 1e-5
    """Share of the first doubt that a step brings back."""
    SMOOTHING = 0.05
    WIDEST_MARGIN = 0.25

    def __init__(self, costs_ns: tuple[float, float, float, float] = (3e6, 1e6, 30.0, 2e5), doubt: float = 1.0) -> None:
        """`costs_ns` until measured: fixed, token, pair, sampled row. `doubt`: their standard error, relative."""
        self._costs = list(costs_ns)
        self._doubt = [[(doubt * c) ** 2 if i == j else 0.0 for j in range(4)] for i, c in enumerate(costs_ns)]
        self._covariance = self._doubt
        self._error = 0.1

    def predict_ns(self, shape: StepShape) -> int:
        expected = fsum(max(0.0, c) * x for c, x in zip(self._costs, _features(shape), strict=True))
        return int(expected * (1 + min(self.WIDEST_MARGIN, self._error)))

    def largest_slice(self, load: StepShape, start: int, most: int, budget_ns: int) -> int:
        fits, too_many = 0, most + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.predict_ns(load.with_slice(start, middle, 1)) <= budget_ns:
                fits = middle
            else:
                too_many = middle
        return fits

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        if measured_ns <= 0 or not shape.tokens:
            return
        row = [x / measured_ns for x in _features(shape)]
        error = 1.0 - fsum(c * x for c, x in zip(self._costs, row, strict=True))
        self._error += self.SMOOTHING * (min(abs(error), 1.0) - self._error)
        self._fit(row, error)

    def _fit(self, row: list[float], error: float) -> None:
        """One step of recursive least squares; noise of a measurement taken as a tenth of it."""
        spread = [fsum(p * x for p, x in zip(line, row, strict=True)) for line in self._covariance]
        total = 0.01 + fsum(x * s for x, s in zip(row, spread, strict=True))
        gain = [s / total for s in spread]
        self._costs = [c + g * error for c, g in zip(self._costs, gain, strict=True)]
        learnt = [
            [p - g * s for p, s in zip(line, spread, strict=True)]
            for line, g in zip(self._covariance, gain, strict=True)
        ]
        self._covariance = [
            [p + self.FORGETTING * (first - p) for p, first in zip(line, doubts, strict=True)]
            for line, doubts in zip(learnt, self._doubt, strict=True)
        ]


def _features(shape: StepShape) -> tuple[int, int, int, int]:
    return 1, shape.tokens, shape.pairs, shape.sampled
