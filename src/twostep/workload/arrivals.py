"""When requests arrive: processes, in seconds from the begin of a workload."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from math import sqrt
from random import Random
from typing import Protocol

from twostep.workload.checked_fields import check_within

MOST_RATE = 1e6
MOST_CV = 100.0


class Arrivals(Protocol):
    def times(self, rng: Random) -> Iterator[float]:
        """Without end, never going back. A process with all rates doubled gives half of these times."""
        ...


@dataclass(frozen=True)
class Renewal:
    """Gaps that know nothing of each other, gamma distributed, with mean 1 / `rate` (per second) and coefficient of
    variation `cv`: 1 is a Poisson process, 0 evenly spaced, above 1 come bursts.

    Gamma with shape k and scale s has mean k s and coefficient of variation 1 / sqrt(k). vLLM's `burstiness` is k.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        check_within("rate", self.rate, 1 / MOST_RATE, MOST_RATE)
        check_within("cv", self.cv, 0, MOST_CV)

    def times(self, rng: Random) -> Iterator[float]:
        if self.cv == 0:
            return (number / self.rate for number in count())
        shape, scale = self.cv**-2, self.cv**2 / self.rate
        return accumulate(rng.gammavariate(shape, scale) for _ in repeat(None))


@dataclass(frozen=True)
class Ramp:
    """A Poisson process whose rate goes evenly from `first_rate` to `last_rate` (per second) while `requests` arrive,
    in the mean, and stays there.

    With rate a + c t, a t + c t² / 2 arrivals are expected by t. Arrivals of a process with rate 1, at e, are moved to
    where as many are expected: t = 2 e / (a + sqrt(a² + 2 c e)), with the root being the rate then.
    """

    first_rate: float
    last_rate: float
    requests: int

    def __post_init__(self) -> None:
        check_within("first_rate", self.first_rate, 1 / MOST_RATE, MOST_RATE)
        check_within("last_rate", self.last_rate, 1 / MOST_RATE, MOST_RATE)
        check_within("requests", self.requests, 1, 1e9)

    @property
    def ramp_s(self) -> float:
        """How long the rate changes."""
        return 2 * self.requests / (self.first_rate + self.last_rate)

    def times(self, rng: Random) -> Iterator[float]:
        slope = (self.last_rate - self.first_rate) / self.ramp_s
        for expected in accumulate(rng.expovariate(1) for _ in repeat(None)):
            if expected < self.requests:
                squared = max(0.0, self.first_rate**2 + 2 * slope * expected)  # rounding may go below
                yield 2 * expected / (self.first_rate + sqrt(squared))
            else:
                yield self.ramp_s + (expected - self.requests) / self.last_rate


@dataclass(frozen=True)
class AtOnce:
    """All at the begin: a batch, or whatever a client with a fixed number of requests under way will ask."""

    def times(self, rng: Random) -> Iterator[float]:
        return repeat(0.0)
