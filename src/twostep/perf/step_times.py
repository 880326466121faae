"""The roofline model prepared for a simulation, which asks it for millions of steps.

Every kind of work in a step depends on a few numbers of its shape, and on these in straight lines below a maximum. The
lines are read off the model once; what depends on one whole number alone is kept. The estimates are the model's own, up
to the rounding of nanoseconds.
"""

from typing import NamedTuple

from twostep.core.cost import Cost, StepShape, Terms
from twostep.perf.roofline_model import KindTime, RooflineModel

FAR = 1 << 20
"""A number of positions at which lines are read off; a power of two, so that the division is exact."""


class _Lines(NamedTuple):
    """Nanoseconds of one kind of attention: the larger of arithmetic · pairs and kv · positions + row · rows."""

    arithmetic: float
    kv: float
    row: float
    constant: float
    """Of a step that has such work and no other attention."""

    def both_ns(self, pairs: int, positions: int, rows: int) -> tuple[float, float]:
        """Arithmetic and traffic."""
        return self.arithmetic * pairs, self.kv * positions + self.row * rows


class StepTimes:
    """A `CostModel` with the estimates of `roofline`. For a model with sliding windows, whose attention is no straight
    line, it asks `roofline` each time."""

    def __init__(self, roofline: RooflineModel) -> None:
        self._roofline = roofline
        self._margin = 1 + roofline.efficiency.margin
        self._linear: dict[int, tuple[float, float]] = {}
        """By tokens: `fixed` and `linear`."""
        self._logits: dict[int, float] = {0: 0.0}
        """By rows."""
        self._last: tuple[StepShape, Cost] | None = None
        """Planner and executor ask for the same step."""
        self._windowed = any(window is not None for window in roofline.model.layer_windows)
        self._prefill, self._decode = self._lines("prefill attention"), self._lines("decode attention")

    def estimate(self, shape: StepShape) -> Cost:
        if self._last is None or self._last[0] != shape:
            self._last = shape, self._roofline.estimate(shape) if self._windowed else self._sum(shape)
        return self._last[1]

    def _sum(self, shape: StepShape) -> Cost:
        tokens, pairs, prefill_kv, decode_kv, logit_rows, prefills, decodes = shape
        fixed, linear = self._linear.get(tokens) or self._linear_ns(tokens)
        logits = self._logits.get(logit_rows)
        if logits is None:
            logits = self._logits_ns(logit_rows)
        prefill = decode = hidden = 0.0
        if prefills:
            arithmetic, traffic = self._prefill.both_ns(pairs, prefill_kv, tokens - decodes)
            prefill, hidden = max(arithmetic, traffic) + self._prefill.constant, min(arithmetic, traffic)
        if decodes:
            arithmetic, traffic = self._decode.both_ns(decode_kv, decode_kv, decodes)
            decode = max(arithmetic, traffic) + (0.0 if prefills else self._decode.constant)
            hidden += min(arithmetic, traffic)
        expected = fixed + linear + prefill + decode + logits
        terms = Terms(fixed, linear, prefill, decode, logits)
        return Cost(int(expected), int((expected + hidden) * self._margin), terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Does nothing, as the roofline's own."""

    def _linear_ns(self, tokens: int) -> tuple[float, float]:
        terms = self._roofline.estimate(StepShape(tokens)).terms
        self._linear[tokens] = terms.fixed, terms.linear
        return self._linear[tokens]

    def _logits_ns(self, rows: int) -> float:
        self._logits[rows] = self._roofline.estimate(StepShape(rows, logit_rows=rows)).terms.logits
        return self._logits[rows]

    def _lines(self, name: str) -> _Lines:
        """Read off at one row without positions, and at one row with many."""
        if name == "decode attention":
            near, far = StepShape(1, decodes=1), StepShape(1, decode_kv_tokens=FAR, decodes=1)
        else:
            near, far = StepShape(1, prefills=1), StepShape(1, FAR, FAR, prefills=1)
        at, beyond = self._time(name, near), self._time(name, far)
        kv = (beyond.bandwidth_s - at.bandwidth_s) / FAR
        return _Lines(beyond.arithmetic_s / FAR * 1e9, kv * 1e9, at.bandwidth_s * 1e9, at.constant_s * 1e9)

    def _time(self, name: str, shape: StepShape) -> KindTime:
        return next(kind for kind in self._roofline.times(shape) if kind.name == name)
