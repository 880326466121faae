"""`python -m benchmarks.serve`: overhead of the server compared with the engine alone.

Measures tokens per second over HTTP and through `LLM`, overhead on the first token, `/health` during a long prefill,
start time and memory. The result is a JSON file, from which `benchmarks.report` generates the table of docs/serving.md.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks import command, machine, serving_front, serving_rates
from benchmarks.measurement import Spread, say, spread
from benchmarks.server_process import Pair, Server
from benchmarks.serving_front import Health, Idle
from benchmarks.serving_rates import Rates
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress


@dataclass(frozen=True)
class Effort:
    rates: serving_rates.Effort
    front: serving_front.Effort
    starts: int


FULL = Effort(serving_rates.FULL, serving_front.FULL, starts=5)
QUICK = Effort(serving_rates.QUICK, serving_front.QUICK, starts=1)


@dataclass(frozen=True)
class Start:
    """Start with the file in the page cache; memory in MB when ready."""

    ready_s: Spread
    front_mb: Spread
    engine_mb: Spread


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    flags: str
    """Flags of the server; `LLM` uses the same settings."""
    rates: Rates
    idle: Idle
    health: Health
    start: Start


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("serve", "Measures the server.").parse_args(arguments)
    return command.run("serve", options, lambda: measure(QUICK if options.quick else FULL))


def measure(effort: Effort) -> Result:
    """Clients run in a separate, spawned process, which shares nothing with the engine in this process."""
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    start = _starts(path, effort.starts)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients:
        with Server(path, serving_rates.FLAGS) as server:
            idle = serving_front.measure_idle(clients, server.port, effort.front)
            health = serving_front.measure_health(clients, server.port, effort.front)
        rates = serving_rates.measure(clients, path, effort.rates)
    flags = " ".join(serving_rates.FLAGS)
    return Result("python -m benchmarks.serve", surroundings, path.stem, flags, rates, idle, health, start)


def _starts(path: Path, count: int) -> Start:
    found = list[tuple[float, Pair]]()
    for _ in range(count):
        with Server(path, serving_rates.FLAGS) as server:
            found.append((server.ready_s, server.resident_bytes()))
    ready_s, resident = zip(*found, strict=True)
    say(f"ready after {min(ready_s):.2f} s")
    front, engine = (spread([one[i] / 1e6 for one in resident]) for i in (0, 1))
    return Start(spread(ready_s), front, engine)


if __name__ == "__main__":
    sys.exit(main())
