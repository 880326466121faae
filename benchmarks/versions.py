"""`python -m benchmarks.versions --base PYTHON`: this version of the server beside another, installed elsewhere.

Both servers run all the time and get the same requests in turn, a fraction of a second each, so that a machine that
changes its speed from minute to minute changes it for both. The other version also runs a second time, and is compared
with itself: the difference of that ratio from 1 is noise. The result is a JSON file, from which `benchmarks.report`
generates the table of docs/serving.md.
"""

import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks import command, machine
from benchmarks.http_load import asks, closed_loop
from benchmarks.jobs import Job, prompt
from benchmarks.measurement import Spread, say, spread
from benchmarks.server_process import Server
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

RESAMPLES = 1000
FLAGS = ("--kv-memory", "512MiB")


@dataclass(frozen=True)
class Burst:
    """Requests at once, each with a prompt that no cache has."""

    streams: int
    prompt: int
    tokens: int

    def jobs(self, *key: object) -> list[Job]:
        return [Job(prompt(self.prompt, self, stream, *key), self.tokens) for stream in range(self.streams)]


BURSTS = (
    Burst(1, 32, 60), Burst(3, 32, 60), Burst(3, 32, 20), Burst(16, 32, 40),
    Burst(1, 100, 1), Burst(1, 600, 1), Burst(1, 2048, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """Speed of one server divided by the base's in the same round: the median, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    burst: Burst
    rounds: int
    base_tokens_per_s: Spread
    """Tokens, of prompts and answers, divided by the time until the last reply is complete."""
    this: Ratio
    base_again: Ratio
    """A second server of the base: the noise."""


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    base: str
    """What the user calls the other version."""
    points: list[Point]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("versions", "Compares this version of the server with another.")
    parser.add_argument("--base", type=Path, required=True, metavar="PYTHON", help="Python with the other version")
    parser.add_argument(
        "--base-name", required=True, metavar="TEXT", help="what it is, for the table, such as its commit"
    )
    parser.add_argument("--seconds", type=float, default=60, help="for each load (default: 60)")
    options = parser.parse_args(arguments)
    seconds = 1.0 if options.quick else options.seconds
    return command.run("versions", options, lambda: measure(options.base, options.base_name, seconds))


def measure(base: Path, base_name: str, seconds: float) -> Result:
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    with ExitStack() as stack:
        pythons = (base, Path(sys.executable), base)
        ports = [stack.enter_context(Server(path, FLAGS, python)).port for python in pythons]
        points = [_point(burst, ports, seconds) for burst in BURSTS]
    return Result("make bench-versions", surroundings, path.stem, base_name, points)


def _point(burst: Burst, ports: Sequence[int], seconds: float) -> Point:
    rounds, end = list[list[float]](), perf_counter() + seconds
    _round(burst, ports, "warm up")
    while not rounds or perf_counter() < end:
        rounds.append(_round(burst, ports, len(rounds)))
    base, this, again = zip(*rounds, strict=True)
    point = Point(burst, len(rounds), spread(base), ratio(this, base), ratio(again, base))
    say(f"{burst}: {point.this.median:.3f} of the base, which is {point.base_again.median:.3f} of itself")
    return point


def _round(burst: Burst, ports: Sequence[int], key: object) -> list[float]:
    """Tokens per second of each server, measured in random order."""
    rates = dict[int, float]()
    for server in random.sample(range(len(ports)), len(ports)):
        load = closed_loop(ports[server], asks(burst.jobs(key)), burst.streams)
        for reply in load.replies:
            reply.body()  # raises for an error
        rates[server] = burst.streams * (burst.prompt + burst.tokens) / load.wall_s
    return [rates[server] for server in range(len(ports))]


def ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """Of values measured in pairs. The interval is that of the median over resampled pairs."""
    pairs = [value / one for value, one in zip(values, base, strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(median(pairs), medians[RESAMPLES // 40], medians[-RESAMPLES // 40 - 1])


if __name__ == "__main__":
    sys.exit(main())
