"""A linear cost model, fitted while the engine runs."""

from math import fsum

from twostep.core.cost import Cost, StepShape, Terms
from twostep.perf.recursive import RecursiveLeastSquares


class LinearCostModel:
    """Fixed cost + cost per token + cost per query-key pair + cost per row of logits, fitted while running.

    Negative costs count as zero. The margin is the smoothed relative error, at most a quarter. Prefill and decode
    attention share one cost per pair.
    """

    SMOOTHING = 0.05
    WIDEST_MARGIN = 0.25

    def __init__(self, costs_ns: tuple[float, float, float, float] = (3e6, 1e6, 30.0, 2e5), doubt: float = 1.0) -> None:
        """`costs_ns`: initial costs, fixed, token, pair, row of logits. `doubt`: their relative standard error."""
        self._fit = RecursiveLeastSquares(costs_ns, doubt)
        self._known = costs_ns
        """The costs, with negative ones replaced by zero."""
        self._error = 0.1

    def estimate(self, shape: StepShape) -> Cost:
        fixed, token, pair, row = self._known
        tokens, prefill_pairs, _, decode_kv_tokens, logit_rows, _, _ = shape
        linear, logits = token * tokens, row * logit_rows
        expected = fsum((fixed, linear, pair * (prefill_pairs + decode_kv_tokens), logits))
        terms = Terms(fixed, linear, pair * prefill_pairs, pair * decode_kv_tokens, logits)
        return Cost(int(expected), int(expected * (1 + min(self.WIDEST_MARGIN, self._error))), terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Ignores steps without tokens or without duration."""
        if measured_ns <= 0 or not shape.tokens:
            return
        row = [x / measured_ns for x in (1, shape.tokens, shape.pairs, shape.logit_rows)]
        error = self._fit.error(row)
        self._error += self.SMOOTHING * (min(abs(error), 1.0) - self._error)
        self._fit.learn(row, error)
        fixed, token, pair, logits = [cost if cost > 0.0 else 0.0 for cost in self._fit.costs]
        self._known = fixed, token, pair, logits
