"""Axes: from values to where they lie, with round ticks."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from math import floor, log, log10

TICKS = 5
"""About so many on an axis."""
WIDE = 50
"""Greatest by smallest value from which an axis is logarithmic."""
DECADES = 4
"""More are not shown: what is smaller lies at the axis' begin."""


@dataclass(frozen=True)
class Axis:
    """From zero. `top`: the greatest value shown; ticks lie at multiples of `step` up to it."""

    title: str
    top: float
    step: float

    def ticks(self) -> list[float]:
        return [i * self.step for i in range(int(self.top / self.step + 1e-9) + 1)]

    def share(self, value: float) -> float:
        """Where it lies: 0 at the axis' begin, 1 at its end."""
        return value / self.top


@dataclass(frozen=True)
class LogAxis:
    """From `low` to `top`, both of 1, 2 and 5 times a power of ten."""

    title: str
    low: float
    top: float

    def ticks(self) -> list[float]:
        """At most twice `TICKS`: else the powers of ten alone."""
        steps = _round_numbers(self.low, self.top)
        return steps if len(steps) <= 2 * TICKS else [step for step in steps if f"{step:e}".startswith("1.0")]

    def share(self, value: float) -> float:
        return log(max(value, self.low) / self.low) / log(self.top / self.low)


def axis(title: str, most: float) -> Axis:
    """From zero to at least `most`, with about five round ticks; to one where there is nothing to show."""
    rough = (most or 1) / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return Axis(title, step * -(-(most or 1) // step), step)


def fitting_axis(title: str, values: Iterable[float]) -> Axis | LogAxis:
    """Logarithmic where the values above zero lie far apart, which the title then says."""
    above = [value for value in values if value > 0]
    if not above or max(above) < WIDE * min(above):
        return axis(title, max(above, default=0))
    low, top = max(min(above), max(above) / 10**DECADES), max(above)
    steps = _round_numbers(low / 5, 5 * top)
    below, beyond = [step for step in steps if step <= low * 1.001], [step for step in steps if step >= top * 0.999]
    return LogAxis(f"{title}, log scale", below[-1], beyond[0])


def tick_words(value: float) -> str:
    return f"{value:,.10g}"


def _round_numbers(low: float, top: float) -> list[float]:
    found = list[float]()
    for power in count(floor(log10(low))):
        found += [n * 10.0**power for n in (1, 2, 5)]
        if found[-1] >= top:
            return [step for step in found if low * 0.999 <= step <= top * 1.001]
    raise AssertionError("count has no end")
