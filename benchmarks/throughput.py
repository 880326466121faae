"""Throughput of 64 requests of mixed lengths, 16 at a time, on every engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.jobs import Job, serving
from benchmarks.measurement import Spread, say, spread
from benchmarks.serving_engines import ServingEngine


@dataclass(frozen=True)
class Effort:
    requests: int
    outstanding: int
    runs: int


FULL = Effort(requests=64, outstanding=16, runs=3)
QUICK = Effort(requests=3, outstanding=2, runs=1)


@dataclass(frozen=True)
class Throughput:
    engine: str
    version: str
    file: str
    output_tokens_per_s: Spread


def measure(engines: Sequence[ServingEngine], effort: Effort) -> list[Throughput]:
    """Engines take turns. Each first serves as many short answers at a time, as a warm-up."""
    for engine in engines:
        engine.closed([Job(job.prompt, 4) for job in serving(-1, effort.outstanding)], effort.outstanding)
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for run in range(effort.runs):
        for engine in engines:
            served = engine.closed(serving(run, effort.requests), effort.outstanding)
            rates[engine.name].append(served.output_tokens_per_s)
            say(f"{effort.requests} requests, {engine.name}: {served.output_tokens_per_s:.0f} output tokens/s")
    return [Throughput(engine.name, engine.version, engine.file, spread(rates[engine.name])) for engine in engines]
