"""A linear cost model, fitted while the engine runs."""

from math import fsum

from twostep.core.cost import Cost, StepShape, Terms


class LinearCostModel:
    """Fixed cost + cost per token + cost per query-key pair + cost per row of logits, fitted while running.

    Recursive least squares on relative errors (each row divided by its measured time). Each step restores a small part
    of the initial variance, so that costs can change. It restores no more than that: pure decoding cannot separate the
    cost of a token from that of a row of logits, and their estimates must not drift. Negative costs count as zero.

    The margin is what 99 of 100 steps keep: a step that takes longer than the bound widens it by a quarter, every other
    one narrows it by 1/400, which is in balance where one step in 89 takes longer. Steps with prompts have a margin of
    their own, at least that of the others, so that the bound grows with every slice.

    Prefill and decode attention share one cost per pair.
    """

    FORGETTING = 1e-5
    """Share of the initial variance that a step restores."""
    WIDENING, NARROWING = 1.25, 1 - 1 / 400
    LEAST_MARGIN, WIDEST_MARGIN = 0.01, 0.5

    def __init__(self, costs_ns: tuple[float, float, float, float] = (3e6, 1e6, 30.0, 2e5), doubt: float = 1.0) -> None:
        """`costs_ns`: initial costs, fixed, token, pair, row of logits. `doubt`: their relative standard error."""
        self._costs = list(costs_ns)
        self._known = costs_ns
        """The costs, with negative ones replaced by zero."""
        self._doubt = [[(doubt * c) ** 2 if i == j else 0.0 for j in range(4)] for i, c in enumerate(costs_ns)]
        self._covariance = self._doubt
        self._margins = [0.1, 0.1]
        """Relative, of steps without and with prompts (or drafts)."""

    def estimate(self, shape: StepShape) -> Cost:
        fixed, token, pair, row = self._known
        tokens, prefill_pairs, _, decode_kv_tokens, logit_rows, _, _ = shape
        linear, logits = token * tokens, row * logit_rows
        expected = fsum((fixed, linear, pair * (prefill_pairs + decode_kv_tokens), logits))
        terms = Terms(fixed, linear, pair * prefill_pairs, pair * decode_kv_tokens, logits)
        margin = max(self._margins) if prefill_pairs else self._margins[0]
        return Cost(int(expected), int(expected * (1 + margin)), terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Ignores steps without tokens or without duration."""
        if measured_ns <= 0 or not shape.tokens:
            return
        row = [x / measured_ns for x in (1, shape.tokens, shape.pairs, shape.logit_rows)]
        error = 1.0 - fsum(c * x for c, x in zip(self._costs, row, strict=True))
        self._widen(int(shape.prefill_pairs > 0), error)
        self._fit(row, error)

    def _widen(self, which: int, error: float) -> None:
        """`error`: by what part of the measured time less was expected."""
        margin = self._margins[which]
        margin *= self.WIDENING if (1 - error) * (1 + margin) < 1 else self.NARROWING
        self._margins[which] = min(self.WIDEST_MARGIN, max(self.LEAST_MARGIN, margin))

    def _fit(self, row: list[float], error: float) -> None:
        """One step of recursive least squares, assuming 10% measurement noise."""
        spread = [fsum(p * x for p, x in zip(line, row, strict=True)) for line in self._covariance]
        total = 0.01 + fsum(x * s for x, s in zip(row, spread, strict=True))
        gain = [s / total for s in spread]
        self._costs = [c + g * error for c, g in zip(self._costs, gain, strict=True)]
        fixed, token, pair, logits = [cost if cost > 0.0 else 0.0 for cost in self._costs]
        self._known = fixed, token, pair, logits
        updated = [
            [p - g * s for p, s in zip(line, spread, strict=True)]
            for line, g in zip(self._covariance, gain, strict=True)
        ]
        self._covariance = [
            [p + self.FORGETTING * (first - p) for p, first in zip(line, doubts, strict=True)]
            for line, doubts in zip(updated, self._doubt, strict=True)
        ]
