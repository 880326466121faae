"""Prefix cache on against off, without shared prefixes and with nine tenths of each prompt shared."""

from dataclasses import dataclass
from statistics import mean

from benchmarks.jobs import Job, prompt
from benchmarks.measurement import Spread, say, spread
from benchmarks.serving_engines import Session
from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryBlocks
from twostep.engine.engine import Engine
from twostep.model.loaded import LoadedModel

ANSWER = 8
SLOTS_USED, BLOCKS = 16, 1024


@dataclass(frozen=True)
class Effort:
    requests: int
    prompt: int
    shared: int
    """Length of the shared prefix, in whole blocks."""
    runs: int


FULL = Effort(requests=16, prompt=512, shared=464, runs=5)
QUICK = Effort(requests=2, prompt=48, shared=32, runs=1)


@dataclass(frozen=True)
class PrefixPoint:
    """Rates in prompt tokens per second; answers are 8 tokens."""

    shared: int
    prompt: int
    hit_rate: float
    """Share of prompt tokens found with the cache on."""
    off: Spread
    on: Spread
    ratio: Spread
    """On / off, of consecutive runs."""


def measure(model: LoadedModel, effort: Effort) -> list[PrefixPoint]:
    """Two engines take turns and are kept for all runs, so that the cache is full of earlier prompts."""
    engines = [
        Engine(
            model,
            EngineConfig(max_num_seqs=SLOTS_USED, kv_memory=MemoryBlocks(BLOCKS), enable_prefix_caching=caching),
        )
        for caching in (False, True)
    ]
    try:
        return [_point(engines, effort, shared) for shared in (0, effort.shared)]
    finally:
        for engine in engines:
            engine.close()


def _point(engines: list[Engine], effort: Effort, shared: int) -> PrefixPoint:
    """The first run is a warm-up."""
    rates, hits = list[tuple[float, float]](), list[float]()
    for run in range(effort.runs + 1):
        (off, _), (on, hit) = (_run(engine, effort, shared, run) for engine in engines)
        say(f"prefix cache, {shared} of {effort.prompt} shared: off {off:.0f}, on {on:.0f} tokens/s")
        rates.append((off, on))
        hits.append(hit)
    return prefix_point(shared, effort.prompt, rates[1:], mean(hits[1:]))


def prefix_point(shared: int, prompt_tokens: int, rates: list[tuple[float, float]], hit_rate: float) -> PrefixPoint:
    """`rates`: rates off and on of each run."""
    off, on = zip(*rates, strict=True)
    return PrefixPoint(
        shared, prompt_tokens, hit_rate, spread(off), spread(on), spread([after / before for before, after in rates])
    )


def _run(engine: Engine, effort: Effort, shared: int, run: int) -> tuple[float, float]:
    """Rate and hit rate. A request with only the shared prefix is served first, to fill the cache."""
    common = prompt(shared, "common", run)
    if shared:
        _serve(engine, [Job(common, 1)])
    counters = engine.scheduler.counters
    queried, hit = counters.prefix_queried_tokens, counters.prefix_hit_tokens
    own = effort.prompt - shared
    served_s = _serve(engine, [Job(common + prompt(own, "own", run, i), ANSWER) for i in range(effort.requests)])
    found, asked = counters.prefix_hit_tokens - hit, counters.prefix_queried_tokens - queried
    return effort.requests * effort.prompt / served_s, found / asked if asked else 0.0


def _serve(engine: Engine, jobs: list[Job]) -> float:
    session = Session(engine)
    for job in jobs:
        session.ask(job)
    while engine.outstanding:
        session.turn()
    return session.served().wall_s
