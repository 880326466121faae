"""Continuous against static batching, over the variance of output lengths.

The setup follows Anyscale 2023 (prompts of 512 tokens, exponential answers with mean 128, capped at 32 to 1536, all
submitted at once), with prompts an eighth and answers half as long, to run in minutes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, pstdev

from benchmarks.jobs import Job, prompt
from benchmarks.measurement import Spread, say, spread
from benchmarks.serving_engines import Twostep
from twostep.model.loaded import LoadedModel

PROMPT, MEAN = 64, 64
SLOTS_USED = 16
"""Concurrent requests, and the size of a static batch."""

Draw = Callable[[random.Random], int]


@dataclass(frozen=True)
class Effort:
    lengths: tuple[str, ...]
    """Names in `LENGTHS`."""
    requests: int
    runs: int
    scale: int
    """Divisor of all lengths."""


@dataclass(frozen=True)
class LengthsPoint:
    """Results for one distribution of output lengths; rates in output tokens per second."""

    lengths: str
    mean: float
    variation: float
    """Standard deviation / mean of the drawn lengths."""
    longest: int
    static: Spread
    continuous: Spread
    ratio: Spread
    """Continuous / static, of consecutive runs."""


def capped_exponential(cap: int) -> Draw:
    """Mean `MEAN` before the cap."""
    return lambda generator: max(1, min(cap, round(generator.expovariate(1 / MEAN))))


def uniform(least: int, most: int) -> Draw:
    return lambda generator: generator.randint(least, most)


LENGTHS: dict[str, Draw] = {
    f"all {MEAN}": uniform(MEAN, MEAN),
    "uniform, 8 to 128": uniform(8, 128),
    **{f"exponential \N{LESS-THAN OR EQUAL TO} {cap}": capped_exponential(cap) for cap in (16, 64, 256, 768)},
}
FULL = Effort(tuple(LENGTHS), requests=64, runs=3, scale=1)
QUICK = Effort(tuple(LENGTHS)[:2], requests=3, runs=1, scale=16)


def measure(model: LoadedModel, effort: Effort) -> list[LengthsPoint]:
    """Distributions take turns; both kinds of batching run one after the other."""
    draws = {name: draw_lengths(LENGTHS[name], effort) for name in effort.lengths}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in draws}
    for run in range(effort.runs):
        for name, lengths in draws.items():
            jobs = [Job(prompt(PROMPT // effort.scale, "lengths", run, i), n) for i, n in enumerate(lengths)]
            static, continuous = (_rate(model, batching, jobs) for batching in (f"static={SLOTS_USED}", "continuous"))
            rates[name].append((static, continuous))
            say(f"output lengths {name}: static {static:.0f}, continuous {continuous:.0f} tokens/s")
    return [lengths_point(name, lengths, rates[name]) for name, lengths in draws.items()]


def draw_lengths(draw: Draw, effort: Effort) -> list[int]:
    """Output lengths, the same in every run."""
    generator = random.Random(1234)
    return [max(1, draw(generator) // effort.scale) for _ in range(effort.requests)]


def lengths_point(name: str, lengths: list[int], rates: list[tuple[float, float]]) -> LengthsPoint:
    """`rates`: static and continuous rate of each run."""
    static, continuous = zip(*rates, strict=True)
    return LengthsPoint(
        lengths=name,
        mean=mean(lengths),
        variation=pstdev(lengths) / mean(lengths),
        longest=max(lengths),
        static=spread(static),
        continuous=spread(continuous),
        ratio=spread([after / before for before, after in rates]),
    )


def _rate(model: LoadedModel, batching: str, jobs: list[Job]) -> float:
    engine = Twostep(model, "", max_num_seqs=SLOTS_USED, batching=batching)
    return engine.closed(jobs, outstanding=len(jobs)).output_tokens_per_s
