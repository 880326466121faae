"""`python -m benchmarks.busy`: decode of one stream beside busy loops, which other programs on the machine stand for.

Twostep with all its threads, Twostep with one thread and llama.cpp take turns beside the same loops, without HTTP.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from os import getpid
from pathlib import Path

from benchmarks import command, machine
from benchmarks.engines import Decode, Engine, LlamaCpp, Twostep, requantise
from benchmarks.measurement import EngineError, Spread
from benchmarks.peers_model import LLAMA_BEST, take_turns
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

LOOP = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""
"""Keeps one CPU busy until it is ended, or the process that started it is gone."""

ALL_THREADS, ONE_THREAD = "Twostep", "Twostep, 1 thread"


@dataclass(frozen=True)
class Effort:
    loops: tuple[int, ...]
    decode: Decode
    runs: int


FULL = Effort(loops=(0, 1, 2, 4), decode=Decode(1, 128, 128), runs=5)
QUICK = Effort(loops=(0, 1), decode=Decode(1, 16, 4), runs=2)


@dataclass(frozen=True)
class Contender:
    name: str
    version: str
    file: str


@dataclass(frozen=True)
class Point:
    """Beside `loops` busy loops: the fair share, and the rates by name of the contender."""

    loops: int
    fair_share: float
    tokens_per_s: dict[str, Spread]


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    threads: int
    context: int
    tokens: int
    runs: int
    contenders: list[Contender]
    points: list[Point]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("busy", "Measures decode of one stream beside 0, 1, 2 and 4 busy loops.")
    parser.add_argument("--llama-dir", type=Path, metavar="DIR", help="folder of llama.cpp's programs, to compare")
    parser.add_argument("--llama-version", metavar="TEXT", help="where llama-bench --version does not know it")
    options = parser.parse_args(arguments)
    if options.llama_version and not options.llama_dir:
        parser.error("--llama-version needs --llama-dir")
    return command.run("busy", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings, effort = machine.watched(), QUICK if options.quick else FULL
    threads = surroundings.threads
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(engine)) for engine in _engines(options, stack, surroundings, effort)]
        for engine in engines:
            engine.warm_up([effort.decode])
        points = [_point(engines, loops, surroundings, effort) for loops in effort.loops]
    told = f"python -m benchmarks.busy{' --llama-dir DIR' if options.llama_dir else ''}"
    contenders = [Contender(engine.name, engine.version, engine.file) for engine in engines]
    decode = effort.decode
    return Result(told, surroundings, threads, decode.context, decode.tokens, effort.runs, contenders, points)


def _engines(
    options: argparse.Namespace, stack: ExitStack, surroundings: machine.Machine, effort: Effort
) -> Iterator[Engine]:
    """With one core there is no other number of threads to compare with."""
    path, version = resolve(DEFAULT_MODEL, FetchProgress()), f"commit {surroundings.commit}"
    for name, threads in ((ALL_THREADS, surroundings.threads), (ONE_THREAD, 1)):
        if name == ALL_THREADS or surroundings.threads > 1:
            engine = Twostep(path, version, threads, [effort.decode])
            engine.name = name
            yield engine
    if options.llama_dir is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights = requantise(options.llama_dir, path, LLAMA_BEST, folder)
        yield LlamaCpp(options.llama_dir, options.llama_version, surroundings.threads, weights, LLAMA_BEST)


def _point(engines: Sequence[Engine], loops: int, surroundings: machine.Machine, effort: Effort) -> Point:
    with busy_loops(loops):
        rates = take_turns(engines, [effort.decode], effort.runs)
    by_name = {name: rate[effort.decode.name] for name, rate in rates.items()}
    return Point(loops, fair_share(surroundings.cpus, surroundings.threads, loops), by_name)


def fair_share(cpus: int, threads: int, loops: int) -> float:
    """Of the CPU time that `threads` threads have alone, what a scheduler leaves them that treats all threads alike."""
    return min(1.0, cpus / (threads + loops))


@contextmanager
def busy_loops(number: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """So many processes that compute all the time; they run when this is entered, and are gone when it is left."""
    words = [sys.executable, "-S", "-c", LOOP, str(getpid())]
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            loops.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
        for loop in loops:
            if loop.stdout is None or not loop.stdout.readline():
                raise EngineError("a busy loop ended before the measurement began")
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


if __name__ == "__main__":
    sys.exit(main())
