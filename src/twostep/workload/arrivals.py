"""Arrival processes: times of requests in seconds from the start of a workload."""

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
        """Without end, never going back. A process with all rates repeated gives half of these times."""
        ...


@dataclass(frozen=True)
class Renewal:
    """Independent, gamma-distributed gaps with mean 1 / `rate` (per second) and coefficient of variation `cv`: 1 is a
    Poisson process, 0 is even spacing, above 1 arrivals are bursty.

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
    """A Poisson process whose rate changes linearly from `first_rate` to `last_rate` (per second) over `requests`
    expected arrivals, and then stays constant.

    With rate a + c t, the expected arrivals by time t are a t + c t² / 2. An arrival at e of a process with rate 1 is
    mapped to the time with that expectation: t = 2 e / (a + sqrt(a² + 2 c e)). The root is the rate at t.
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
        """Duration of the rate change."""
        return 2 * self.requests / (self.first_rate + self.last_rate)

    def times(self, rng: Random) -> Iterator[float]:
        slope = (self.last_rate - self.first_rate) / self.ramp_s
        for expected in accumulate(rng.expovariate(1) for _ in repeat(None)):
            if expected < self.requests:
                squared = max(0.0, self.first_rate**2 + 2 * slope * expected)  # rounding may give a negative value
                yield 2 * expected / (self.first_rate + sqrt(squared))
            else:
                yield self.ramp_s + (expected - self.requests) / self.last_rate


@dataclass(frozen=True)
class AtOnce:
    """All at the start: for a batch, or for a closed loop, which ignores arrival times."""

    def times(self, rng: Random) -> Iterator[float]:
        return repeat(0.0)
