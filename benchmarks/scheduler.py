"""`python -m benchmarks.scheduler`: cost of scheduling, with and without kernels.

The result is a JSON file, from which `benchmarks.report` generates the tables of docs/batching.md.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, host_share, machine, scheduler_costs
from benchmarks.host_share import HostShare
from benchmarks.measurement import say
from benchmarks.scheduler_costs import EventCost, StandingCost
from twostep.store.catalogue import DEFAULT_MODEL, cached_files
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

LARGER_MODEL = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M"


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    threads: int
    standing: list[StandingCost]
    events: list[EventCost]
    host: list[HostShare]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("scheduler", "Measures scheduling.").parse_args(arguments)
    return command.run("scheduler", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings = machine.watched()
    standing, events = scheduler_costs.measure(scheduler_costs.QUICK if options.quick else scheduler_costs.FULL)
    host = [share for path, effort in _models(options.quick) for share in host_share.measure(path, effort)]
    return Result("python -m benchmarks.scheduler", surroundings, surroundings.threads, standing, events, host)


def _models(quick: bool) -> Iterator[tuple[Path, host_share.Effort]]:
    """The default model, and the larger one if its file is in the cache, as it cannot be fetched."""
    yield resolve(DEFAULT_MODEL, FetchProgress()), host_share.QUICK if quick else host_share.FULL
    larger = [] if quick else [path for path in cached_files() if path.stem == LARGER_MODEL]
    for path in larger:
        yield path, host_share.LARGER
    if not (quick or larger):
        say(f"{LARGER_MODEL} is not in the cache folder: skipped")


if __name__ == "__main__":
    sys.exit(main())
