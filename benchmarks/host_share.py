"""What share of a decode step is not kernels: scheduling, books, arrays, text, the threads' hand-over."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from benchmarks.progress import say
from benchmarks.prompts import prompt
from benchmarks.spread import Spread, spread
from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryBlocks
from twostep.core.loop import StepExecutor
from twostep.core.plan import Step, StepResult
from twostep.engine.engine import Engine
from twostep.engine.params import SamplingParams
from twostep.model.loaded import LoadedModel, open_model

CONTEXT = 128
WARM_STEPS = 8


@dataclass(frozen=True)
class Effort:
    batch: int
    steps: int
    runs: int


FULL = Effort(batch=16, steps=200, runs=5)
LARGER = Effort(batch=16, steps=40, runs=3)
QUICK = Effort(batch=2, steps=4, runs=2)


@dataclass(frozen=True)
class HostShare:
    """Decode of `batch` streams with their text, after 128 tokens each; shares of the wall time."""

    model: str
    batch: int
    overlap: bool
    """Whether plans and text are made while a step runs."""
    step_ms: Spread
    outside_kernels: Spread
    """All but the kernels' forward pass and their choice of tokens."""
    outside_steps: Spread
    """All but what the engine itself takes for the step's time, which has the Python around its kernels in it."""


class Elapsed(NamedTuple):
    wall_ns: int
    kernels_ns: int
    steps_ns: int


def measure(path: Path, effort: Effort) -> list[HostShare]:
    """With and without overlap in turns, each run with a new engine, so that no other team of threads is there."""
    model = open_model(path)
    runs: dict[bool, list[Elapsed]] = {True: [], False: []}
    for run in range(effort.runs):
        for overlap, done in runs.items():
            done.append(_decode(model, effort, overlap, run))
            say(f"{path.name}, batch {effort.batch}, overlap {overlap}: {share_outside(done[-1])[0]:.1%} not kernels")
    return [_summary(path.stem, overlap, effort, done) for overlap, done in runs.items()]


def share_outside(elapsed: Elapsed) -> tuple[float, float]:
    """Of the kernels, and of the steps."""
    return 1 - elapsed.kernels_ns / elapsed.wall_ns, 1 - elapsed.steps_ns / elapsed.wall_ns


def _summary(model: str, overlap: bool, effort: Effort, runs: list[Elapsed]) -> HostShare:
    kernels, steps = zip(*map(share_outside, runs), strict=True)
    step_ms = spread([run.wall_ns / effort.steps / 1e6 for run in runs])
    return HostShare(model, effort.batch, overlap, step_ms, spread(kernels), spread(steps))


def _decode(model: LoadedModel, effort: Effort, overlap: bool, run: int) -> Elapsed:
    tokens = effort.steps + 4 * WARM_STEPS
    blocks = effort.batch * (CONTEXT + tokens + 32) // 16
    engine = Engine(model, EngineConfig(max_num_seqs=effort.batch, kv_memory=MemoryBlocks(blocks), overlap=overlap))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for i in range(effort.batch):
            engine.submit(prompt(CONTEXT, "host", run, i), params, stream=True)
        while len(engine.scheduler.decode_batch) < effort.batch:
            engine.turn()
        _turns(engine, WARM_STEPS)
        watch = _Watch(engine)
        started = perf_counter_ns()
        _turns(engine, effort.steps)
        elapsed = Elapsed(perf_counter_ns() - started, watch.kernels_ns(), watch.steps_ns)
        engine.abort_all()
        return elapsed
    finally:
        engine.close()


def _turns(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.turn()


class _Watch:
    """Adds up what an engine's kernels and its steps take, from now on. Reaches inside: nobody else needs to know."""

    def __init__(self, engine: Engine) -> None:
        self.steps_ns = 0
        inner: Any = engine._executor
        self._parts = inner._kernels, inner._sampler = _Timed(inner._kernels), _Timed(inner._sampler)
        loop: Any = engine._loop
        self._executor: StepExecutor = loop._executor
        loop._executor = self

    def kernels_ns(self) -> int:
        return sum(part.ns for part in self._parts)

    def start(self, step: Step) -> None:
        self._executor.start(step)

    def poll(self) -> StepResult | None:
        result = self._executor.poll()
        self.steps_ns += result.step_ns if result else 0
        return result


class _Timed:
    """Stands for an object and adds up the time of its calls."""

    def __init__(self, inner: object) -> None:
        self._inner, self.ns = inner, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        def timed(*arguments: Any) -> Any:
            started = perf_counter_ns()
            try:
                return method(*arguments)
            finally:
                self.ns += perf_counter_ns() - started

        return timed
