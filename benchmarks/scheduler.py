"""`python -m benchmarks.scheduler`: what scheduling costs, without kernels and beside them.

The result is one JSON file, from which `benchmarks.report` makes the tables of docs/batching.md.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import host_share, machine, scheduler_costs
from benchmarks.host_share import HostShare
from benchmarks.progress import say
from benchmarks.results import check_writable, write
from benchmarks.scheduler_costs import EventCost, StandingCost
from twostep.errors import TwostepError
from twostep.store.cache import cached_files
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.progress import Progress
from twostep.store.resolve import resolve

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
    options = _parser().parse_args(arguments)
    try:
        check_writable(options.out)
        result = measure(options)
    except TwostepError as error:
        print(f"benchmarks.scheduler: {error}", file=sys.stderr)
        return 1
    write(result, f"scheduler-{machine.slug(result.machine.cpu)}.json", options.out, quick=options.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description="Measures scheduling.")
    parser.add_argument("--quick", action="store_true", help="a few small points, to see that all works; for no table")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: benchmarks/results; --quick: standard output"
    )
    return parser


def measure(options: argparse.Namespace) -> Result:
    surroundings = machine.watched()
    standing, events = scheduler_costs.measure(scheduler_costs.QUICK if options.quick else scheduler_costs.FULL)
    host = [share for path, effort in _models(options.quick) for share in host_share.measure(path, effort)]
    return Result("python -m benchmarks.scheduler", surroundings, surroundings.threads, standing, events, host)


def _models(quick: bool) -> Iterator[tuple[Path, host_share.Effort]]:
    """The default model; the larger one if its file is here, since it is not fetched by itself."""
    yield resolve(DEFAULT_MODEL, Progress()), host_share.QUICK if quick else host_share.FULL
    larger = [] if quick else [path for path in cached_files() if path.stem == LARGER_MODEL]
    for path in larger:
        yield path, host_share.LARGER
    if not (quick or larger):
        say(f"{LARGER_MODEL} is not in the cache folder: left out")


if __name__ == "__main__":
    sys.exit(main())
