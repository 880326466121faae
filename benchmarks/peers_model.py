"""`python -m benchmarks.peers_model`: compares Twostep with llama.cpp and OpenVINO GenAI in one run on one machine.

Engines take turns at every measurement, so that disturbances of the machine affect all alike. All run without HTTP, on
the same number of threads and the same weight file; llama.cpp also uses Q4_0 weights, its fastest format.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import command, machine
from benchmarks.engines import Decode, Engine, LlamaCpp, Measure, Prefill, Twostep, requantise
from benchmarks.measurement import Spread, say, spread
from benchmarks.openvino import OpenVino
from twostep.kernels.threads import default_threads
from twostep.store.catalogue import CATALOGUE, DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

LARGER_MODEL = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M"
LLAMA_BEST = "Q4_0"

PREFILLS: tuple[Measure, ...] = tuple(map(Prefill, (128, 512, 1024, 2048)))
DECODES: tuple[Measure, ...] = (Decode(1, 128, 128), Decode(4, 128, 64), Decode(16, 128, 64))
LARGER: tuple[Measure, ...] = (Decode(1, 128, 64),)
QUICK: tuple[Measure, ...] = (Prefill(32), Decode(1, 32, 4), Decode(4, 32, 4))


@dataclass(frozen=True)
class EngineResult:
    engine: str
    version: str
    file: str
    tokens_per_s: dict[str, Spread]
    """By name of the measurement."""


@dataclass(frozen=True)
class ModelResult:
    model: str
    engines: list[EngineResult]


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    threads: int
    models: list[ModelResult]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser_with_peers("peers_model", "Measures Twostep beside other engines, taking turns.")
    parser.add_argument(
        "--larger-model",
        default=LARGER_MODEL,
        metavar="MODEL",
        help="larger model, for decode only (default: %(default)s)",
    )
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N", help="runs of each measurement (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.llama_dir is None and options.openvino_python is None:
        parser.error("no engine to compare with: give --llama-dir, --openvino-python or both (see --help)")
    return command.run("peers_model", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings = machine.watched()
    threads = default_threads()
    comparisons = (
        [(DEFAULT_MODEL, QUICK)]
        if options.quick
        else [(DEFAULT_MODEL, (*PREFILLS, *DECODES)), (options.larger_model, LARGER)]
    )
    models = [_compare(options, surroundings, threads, model, measures) for model, measures in comparisons]
    return Result(command.command_with_peers("peers_model", options), surroundings, threads, models)


def _compare(
    options: argparse.Namespace, surroundings: machine.Machine, threads: int, model: str, measures: Sequence[Measure]
) -> ModelResult:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = resolve(model, FetchProgress())
        say(f"starting all engines with {path.name}")
        engines: list[Engine] = [Twostep(path, f"commit {surroundings.commit}", threads, measures)]
        for engine in _peers(options, path, folder, threads):
            engines.append(stack.enter_context(closing(engine)))
        for engine in engines:
            engine.warm_up(measures)
        rates = take_turns(engines, measures, 1 if options.quick else options.runs)
    return ModelResult(model, [EngineResult(e.name, e.version, e.file, rates[e.name]) for e in engines])


def _peers(options: argparse.Namespace, path: Path, folder: Path, threads: int) -> Iterator[Engine]:
    """The requested engines on the same file; llama.cpp also with the default model as `LLAMA_BEST`, made in
    `folder`."""
    kind = path.stem.rpartition(".")[2]
    if options.llama_dir is not None:
        llama = partial(LlamaCpp, options.llama_dir, options.llama_version, threads)
        if path.name == CATALOGUE[DEFAULT_MODEL].file:
            yield llama(requantise(options.llama_dir, path, LLAMA_BEST, folder), LLAMA_BEST)
        yield llama(path, kind)
    if options.openvino_python is not None:
        yield OpenVino(options.openvino_python, threads, path, kind)


def take_turns(engines: Sequence[Engine], measures: Sequence[Measure], runs: int) -> dict[str, dict[str, Spread]]:
    """Rates by engine and measurement."""
    rates: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in engines}
    for run in range(runs):
        for measure in measures:
            for engine in engines:
                rate = engine.rate(measure, run)
                rates[engine.name].setdefault(measure.name, []).append(rate)
                say(f"run {run + 1} of {runs}, {measure.name}, {engine.name}: {rate:.1f} tokens/s")
    return {engine: {name: spread(values) for name, values in by_name.items()} for engine, by_name in rates.items()}


if __name__ == "__main__":
    sys.exit(main())
