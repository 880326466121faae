"""Share of a decode step outside the kernels: scheduling, bookkeeping, arrays, text, thread hand-over."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from benchmarks.jobs import prompt
from benchmarks.measurement import Spread, say, spread
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
    """Decode of `batch` streams with text, after 128 tokens each. Shares of the wall time."""

    model: str
    batch: int
    overlap: bool
    """Whether planning and text processing overlap with a running step."""
    step_ms: Spread
    outside_kernels: Spread
    """Everything except the forward pass and sampling in the kernels."""
    outside_steps: Spread
    """Everything except the step time as measured by the engine, which includes Python around the kernels."""


class Elapsed(NamedTuple):
    wall_ns: int
    kernels_ns: int
    steps_ns: int


def measure(path: Path, effort: Effort) -> list[HostShare]:
    """Measures with and without overlap in turns, each run with a new engine, so that no other thread pool exists."""
    model = open_model(path)
    runs: dict[bool, list[Elapsed]] = {True: [], False: []}
    for run in range(effort.runs):
        for overlap, done in runs.items():
            done.append(_decode(model, effort, overlap, run))
            say(f"{path.name}, batch {effort.batch}, overlap {overlap}: {share_outside(done[-1])[0]:.1%} not kernels")
    return [_summary(path.stem, overlap, effort, done) for overlap, done in runs.items()]


def share_outside(elapsed: Elapsed) -> tuple[float, float]:
    """Shares outside the kernels and outside the steps."""
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
    """Adds up the time of kernels and steps of an engine from now on. Uses private attributes of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.steps_ns = 0
        inner: Any = engine._executor
        self._parts = inner._kernels, inner._sampler = _Timed(inner._kernels), _Timed(inner._sampler)
        loop: Any = engine._loop
        self._executor: StepExecutor = loop._executor
        self.capabilities = self._executor.capabilities
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
    """A proxy that adds up the time of method calls."""

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
