"""`python -m benchmarks.versions --base PYTHON`: this version of the server beside another, installed elsewhere.

Both servers run all the time and get the same requests in turn, a fraction of a second each, so that a machine that
changes its speed from minute to minute changes it for both. The other version also runs a second time, and is compared
with itself: the difference of that ratio from 1 is noise. All are started anew a few times. The result is a JSON file,
from which `benchmarks.report` generates the table of docs/serving.md.
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

STARTS = 4
"""More than one, since where the memory of a process lies changes its speed by several per cent."""
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
class Point:
    """Speed is tokens, of prompts and answers, divided by the time until the last reply is complete."""

    burst: Burst
    pairs: int
    base_tokens_per_s: Spread
    this: Spread
    """Speed of this version divided by the base's in the same round: the median of each start of the servers."""
    base_again: Spread
    """Likewise of a second server of the base: the noise."""


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
    seconds, starts = (1.0, 1) if options.quick else (options.seconds, STARTS)
    return command.run("versions", options, lambda: measure(options.base, options.base_name, seconds, starts))


def measure(base: Path, base_name: str, seconds: float, starts: int) -> Result:
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    found = [list[Rounds]() for _ in BURSTS]
    for start in range(starts):
        with ExitStack() as stack:
            pythons = (base, Path(sys.executable), base)
            ports = [stack.enter_context(Server(path, FLAGS, python)).port for python in pythons]
            for burst, so_far in zip(BURSTS, found, strict=True):
                so_far.append(_rounds(burst, ports, seconds / starts, start))
    points = [point(burst, of_starts) for burst, of_starts in zip(BURSTS, found, strict=True)]
    return Result("make bench-versions", surroundings, path.stem, base_name, points)


Rounds = list[list[float]]
"""Tokens per second of each server, for each round: the base, this version, the base again."""


def point(burst: Burst, starts: Sequence[Rounds]) -> Point:
    """From the rounds of each start."""
    base = [rates[0] for rounds in starts for rates in rounds]
    this, again = ([median(rates[i] / rates[0] for rates in rounds) for rounds in starts] for i in (1, 2))
    return Point(burst, len(base), spread(base), spread(this), spread(again))


def _rounds(burst: Burst, ports: Sequence[int], seconds: float, start: int) -> Rounds:
    rounds, end = Rounds(), perf_counter() + seconds
    _round(burst, ports, start, "warm up")
    while not rounds or perf_counter() < end:
        rounds.append(_round(burst, ports, start, len(rounds)))
    ratio = median(rates[1] / rates[0] for rates in rounds)
    say(f"start {start + 1}: {ratio:.3f} of the base with {burst}")
    return rounds


def _round(burst: Burst, ports: Sequence[int], *key: object) -> list[float]:
    """Tokens per second of each server, measured in random order."""
    rates = dict[int, float]()
    for server in random.sample(range(len(ports)), len(ports)):
        load = closed_loop(ports[server], asks(burst.jobs(*key)), burst.streams)
        for reply in load.replies:
            reply.body()  # raises for an error
        rates[server] = burst.streams * (burst.prompt + burst.tokens) / load.wall_s
    return [rates[server] for server in range(len(ports))]


if __name__ == "__main__":
    sys.exit(main())
