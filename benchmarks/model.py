"""`python -m benchmarks.model`: speed of one model in this process, with each part compared with its hardware limit.

Measures prefill and decode separately, over a grid of lengths, batches and contexts. The result is a JSON file, from
which `benchmarks.report` generates the tables of README and docs/performance.md.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import command, counters, loading, machine
from benchmarks.jobs import prompt
from benchmarks.measurement import say
from benchmarks.model_driver import Driver, Run
from benchmarks.model_points import Point, decode_point, prefill_point, step_bytes
from twostep.kernels.machine_limits import Limits, measure_limits, read_bandwidth
from twostep.model.loaded import LoadedModel, open_model
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress


@dataclass(frozen=True)
class Grid:
    """The measured points. A decode run has enough steps to generate `decode_tokens` tokens, at least `least_steps`."""

    prefills: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_tokens: int
    least_steps: int
    runs: int

    def steps(self, batch: int) -> int:
        return max(self.least_steps, self.decode_tokens // batch)

    @property
    def positions(self) -> int:
        """Positions of the longest decoded sequence."""
        return max(self.contexts) + self.steps(min(self.batches))

    def driver(self, model: LoadedModel, threads: int | None) -> Driver:
        """A driver with room for every point."""
        longest, batch = max(self.prefills), max(self.batches)
        return Driver(model.network, prompt=longest, batch=batch, positions=self.positions, threads=threads)


FULL = Grid((128, 512, 1024, 2048), (1, 4, 16, 64), (128, 1024), decode_tokens=64, least_steps=4, runs=5)
QUICK = Grid((32, 64), (1, 4), (32,), decode_tokens=8, least_steps=2, runs=2)
COUNTED_PREFILL, COUNTED_STEPS = 512, 32
"""Sizes of the runs under hardware counters."""


@dataclass(frozen=True)
class ModelInfo:
    name: str
    file: str
    file_bytes: int
    weight_bytes: int
    """Size of the repacked weights, which a decode step reads."""
    kv_bytes_per_token: int
    isa: str
    threads: int


@dataclass(frozen=True)
class Counted:
    """Hardware counts by event of a prefill and of single-sequence decode steps, or why there are none."""

    missing: str | None
    prefill: dict[str, int | None]
    decode: dict[str, int | None]


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: ModelInfo
    loading: loading.Loading
    limits: Limits
    prefill: list[Point]
    decode: list[Point]
    counters: Counted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("model", "Measures one model, part by part.")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="model name, stem of a cached file, or path (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores available to this process")
    options = parser.parse_args(arguments)
    return command.run(
        "model",
        options,
        lambda: measure(options),
        f"model-{machine.slug(options.model)}",
    )


def measure(options: argparse.Namespace) -> Result:
    grid = QUICK if options.quick else FULL
    surroundings = machine.watched()
    path = resolve(options.model, FetchProgress())
    say(f"loading {path.name}, {grid.runs} times, in process and as a command")
    load = loading.measure(options.model, path, grid.runs, options.threads)
    model = open_model(path)
    driver = grid.driver(model, options.threads)
    say("limits of this machine")
    bounds = measure_limits(driver.executor.isa, driver.executor.threads, driver.executor.weight_bytes)
    return Result(
        command="python -m benchmarks.model" + (f" --model {options.model}" if options.model != DEFAULT_MODEL else ""),
        machine=surroundings,
        model=_info(options.model, model, driver),
        loading=load,
        limits=bounds,
        prefill=[_prefill(driver, tokens, grid, bounds) for tokens in grid.prefills],
        decode=_decode_all(driver, grid, bounds),
        counters=_count(driver),
    )


def _info(name: str, model: LoadedModel, driver: Driver) -> ModelInfo:
    executor = driver.executor
    return ModelInfo(
        name=name,
        file=model.path.name,
        file_bytes=model.path.stat().st_size,
        weight_bytes=executor.weight_bytes,
        kv_bytes_per_token=driver.shape.kv_bytes_per_token(),
        isa=executor.isa,
        threads=executor.threads,
    )


def _prefill(driver: Driver, tokens: int, grid: Grid, bounds: Limits) -> Point:
    runs = [driver.prefill(prompt(tokens, "prefill", run)) for run in range(grid.runs + 1)]
    point = prefill_point(_without_first(runs), bounds)
    say(f"prefill {tokens}: {point.tokens_per_s.median:.0f} tokens/s")
    return point


def _decode_all(driver: Driver, grid: Grid, bounds: Limits) -> list[Point]:
    say("filling the KV cache")
    driver.fill()
    return [_decode(driver, batch, context, grid, bounds) for context in grid.contexts for batch in grid.batches]


def _decode(driver: Driver, batch: int, context: int, grid: Grid, bounds: Limits) -> Point:
    steps, weight_bytes = grid.steps(batch), driver.executor.weight_bytes
    runs = _without_first([driver.decode(batch, context, steps) for _ in range(grid.runs + 1)])
    read = read_bandwidth(step_bytes(runs[0], steps, weight_bytes), bounds.threads)
    point = decode_point(batch, context, steps, runs, bounds, weight_bytes, read)
    say(f"decode, batch {batch}, context {context}: {point.tokens_per_s.median:.0f} tokens/s")
    return point


def _without_first(runs: list[Run]) -> list[Run]:
    """Drops the first run of a point, which includes growing buffers and cold caches."""
    return runs[1:]


def _count(driver: Driver) -> Counted:
    missing = counters.missing_counters()
    if missing is not None:
        return Counted(missing, {}, {})
    tokens = prompt(COUNTED_PREFILL, "counted")
    prefill = counters.count(lambda: driver.prefill(tokens))
    return Counted(None, prefill, counters.count(lambda: driver.decode(1, 128, COUNTED_STEPS)))


if __name__ == "__main__":
    sys.exit(main())
