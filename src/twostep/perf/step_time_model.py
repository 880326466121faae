"""What a step takes on a machine that was calibrated: a sum of curves and constants, corrected while the engine runs.

    fixed
    + linear(tokens) + tile * tiles of rows
    + pair * query-key pairs + chunk row * rows of prefill slices + chunk KV * positions that prefill slices read
    + KV(positions that all slices read)
    + logits(rows of logits)
    + sequence * slices + prefill * prefill slices

No constant is negative and no curve falls, so that no estimate falls when a slice grows, also from one row, which is a
decode, to two: a prefill slice costs all that a decode does, and more.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import fsum, isfinite
from typing import Any, Literal, NamedTuple, Self, get_args

from twostep.core.cost import Cost, StepShape, Terms
from twostep.errors import TwostepError
from twostep.perf.recursive import RecursiveLeastSquares

Region = Literal["decode", "mixed", "prefill"]
"""Steps without prefill slices, with both, and without decodes: in this order the margins of equal times grow."""
REGIONS: tuple[Region, ...] = get_args(Region)

TABLE_TOKENS = 4096
"""Up to so many tokens the time of the linear layers is looked up."""


class ModelDataError(TwostepError):
    """JSON that is no model of step times: names the field."""


def region_of(shape: StepShape) -> Region:
    if not shape.prefills:
        return "decode"
    return "mixed" if shape.decodes else "prefill"


class Curve(NamedTuple):
    """Straight lines between points that never fall, from 0 at 0; beyond the last point it rises by `slope`."""

    at: tuple[int, ...]
    """Ascending, from 1."""
    ns: tuple[float, ...]
    slope: float = 0.0

    def __call__(self, x: int) -> float:
        at, ns, slope = self
        if x <= 0 or not at:
            return 0.0
        i = bisect_right(at, x)
        if i == 0:
            return x * (ns[0] / at[0])
        if i == len(at):
            return ns[-1] + (x - at[-1]) * slope
        low, high = ns[i - 1], ns[i]
        return min(high, low + (x - at[i - 1]) * ((high - low) / (at[i] - at[i - 1])))

    def to_json(self) -> dict[str, Any]:
        return {"at": list(self.at), "ns": list(self.ns), "slope": self.slope}

    def fault(self) -> str | None:
        """What is wrong with it."""
        numbers = (*self.ns, self.slope)
        if len(self.at) != len(self.ns):
            return "has not a time for each point"
        if any(not isfinite(number) or number < 0 for number in numbers):
            return "has a time that is negative or not finite"
        if list(self.at) != sorted(set(self.at)) or (self.at and self.at[0] < 1) or list(self.ns) != sorted(self.ns):
            return "falls somewhere, or its points are not in order"
        return None


@dataclass(frozen=True)
class StepCosts:
    """The constants of the sum above, in ns, and what is added to an estimate to bound a step's time."""

    fixed: float
    linear: Curve
    tile_rows: int
    """Rows of a tile of the kernels."""
    tile: float
    pair: float
    chunk_row: float
    chunk_kv: float
    kv: Curve
    logits: Curve
    sequence: float
    prefill: float
    margins: Mapping[Region, Curve]
    """By expected time, in ns."""

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        curves = {name: value.to_json() for name, value in values.items() if isinstance(value, Curve)}
        return {**values, **curves, "margins": {name: curve.to_json() for name, curve in self.margins.items()}}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Raises `ModelDataError`."""
        names = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or value.keys() != set(names):
            raise ModelDataError(f"costs of a step need the fields {', '.join(names)}, and no other")
        read: dict[str, Any] = {name: _number(name, value[name]) for name in names if not isinstance(value[name], dict)}
        read |= {name: _curve(name, value[name]) for name in ("linear", "kv", "logits")}
        margins = value["margins"]
        if not isinstance(margins, dict) or margins.keys() != set(REGIONS):
            raise ModelDataError(f"margins have to be those of {', '.join(REGIONS)}")
        read["margins"] = {region: _curve(f"margins.{region}", margins[region]) for region in REGIONS}
        if type(read["tile_rows"]) is not int or not read["tile_rows"]:
            raise ModelDataError(f"tile_rows is {read['tile_rows']!r}; it has to be a whole number from 1")
        return cls(**read)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ModelDataError(f"{name} is {value!r}; it has to be a number from 0")
    return value


def _curve(name: str, value: object) -> Curve:
    try:
        assert isinstance(value, dict)
        at, ns, slope = value["at"], value["ns"], value["slope"]
        curve = Curve(tuple(map(_whole, at)), tuple(_number(name, one) for one in ns), _number(name, slope))
    except (AssertionError, KeyError, TypeError):
        raise ModelDataError(f"{name} has to be a curve: at, ns and slope") from None
    if fault := curve.fault():
        raise ModelDataError(f"{name} {fault}")
    return curve


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value


class StepTimeModel:
    """A `CostModel` of calibrated costs. Measured steps correct it, within bounds: by a factor each for the host's
    work, linear layers, attention and logits, and by one for all margins."""

    LEAST_FACTOR, MOST_FACTOR = 0.67, 1.5
    """Bounds of the factors. What is further away than this is another machine: calibrate again."""
    DOUBT = 0.1
    """Relative standard error of the calibrated terms."""
    MOST_ERROR = 0.5
    """A step that took longer or shorter by more than this share counts as this: it was disturbed."""
    EXCEEDED = 0.0025
    """The share of steps that take longer than their bound: margins widen and narrow until it is that."""
    WIDENING = 0.05
    LEAST_WIDE, MOST_WIDE = 0.25, 4.0
    """A calibration in a noisy minute gives margins that are too wide for a quiet day, and the other way round."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._linear = [self._linear_ns(tokens) for tokens in range(TABLE_TOKENS)]
        self._margins = [costs.margins[region] for region in REGIONS]
        self._fit = RecursiveLeastSquares([1.0] * 4, self.DOUBT)
        self._factors: Sequence[float] = (1.0,) * 4
        self._wide = 1.0

    @property
    def correction(self) -> tuple[float, float, float, float]:
        """The factors at present: host, linear layers, attention, logits."""
        host, linear, attention, logits = self._factors
        return host, linear, attention, logits

    @property
    def widening(self) -> float:
        """The factor of the margins at present."""
        return self._wide

    def estimate(self, shape: StepShape) -> Cost:
        prefills, decodes = shape.prefills, shape.decodes
        host, linear, attention, logits = self._factors
        fixed, linear_ns, prefill_ns, decode_ns, logits_ns, sequences_ns = self._terms(shape)
        terms = Terms(
            host * fixed,
            linear * linear_ns,
            attention * prefill_ns,
            attention * decode_ns,
            logits * logits_ns,
            host * sequences_ns,
        )
        expected = fsum(terms)
        margin = self._margins[(2 if not decodes else 1) if prefills else 0]
        return Cost(int(expected), int(expected + self._wide * margin(int(expected))), terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Ignores steps without tokens or without duration."""
        if measured_ns <= 0 or not shape.tokens:
            return
        exceeds = measured_ns > self.estimate(shape).bound_ns
        change = self.WIDENING * ((1.0 if exceeds else 0.0) - self.EXCEEDED)
        self._wide = min(self.MOST_WIDE, max(self.LEAST_WIDE, self._wide * (1 + change)))
        fixed, linear, prefill, decode, logits, sequences = self._terms(shape)
        row = [ns / measured_ns for ns in (fixed + sequences, linear, prefill + decode, logits)]
        error = self._fit.error(row)
        self._fit.learn(row, min(self.MOST_ERROR, max(-self.MOST_ERROR, error)))
        self._factors = [min(self.MOST_FACTOR, max(self.LEAST_FACTOR, factor)) for factor in self._fit.costs]

    def _terms(self, shape: StepShape) -> tuple[float, float, float, float, float, float]:
        """As calibrated: fixed, linear, prefill attention, decode attention, logits, sequences."""
        tokens, pairs, prefill_kv, decode_kv, logit_rows, prefills, decodes = shape
        costs = self.costs
        linear = self._linear[tokens] if tokens < TABLE_TOKENS else self._linear_ns(tokens)
        kv = costs.kv(prefill_kv + decode_kv)
        of_decodes = kv * (decode_kv / (prefill_kv + decode_kv)) if decode_kv else 0.0
        chunks = costs.pair * pairs + costs.chunk_row * (tokens - decodes) + costs.chunk_kv * prefill_kv
        return (
            costs.fixed,
            linear,
            chunks + (kv - of_decodes),
            of_decodes,
            costs.logits(logit_rows),
            costs.sequence * (prefills + decodes) + costs.prefill * prefills,
        )

    def _linear_ns(self, tokens: int) -> float:
        return self.costs.linear(tokens) + self.costs.tile * -(-tokens // self.costs.tile_rows)
