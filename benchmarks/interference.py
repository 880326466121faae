"""Latency of four running streams and of a long prompt that arrives, by chunking and by engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import jobs
from benchmarks.measurement import say
from benchmarks.serving_engines import ServingEngine, Twostep
from benchmarks.traces import Gaps, Served, gaps
from twostep.model.loaded import LoadedModel

CHUNKINGS = ("none", "tokens=128", "tokens=256", "tokens=512", "time=30", "time=50", "time=100")


@dataclass(frozen=True)
class Effort:
    newcomer: int
    tokens: int
    after: int
    runs: int
    chunkings: tuple[str, ...]

    def stall(self, run: int) -> jobs.Stall:
        return jobs.stall(run, newcomer=self.newcomer, tokens=self.tokens, after=self.after)


FULL = Effort(newcomer=2048, tokens=480, after=48, runs=3, chunkings=CHUNKINGS)
QUICK = Effort(newcomer=64, tokens=16, after=2, runs=1, chunkings=("none", "tokens=32"))


@dataclass(frozen=True)
class StallPoint:
    """`name`: the chunking, or the engine."""

    name: str
    gaps: Gaps


def engines(model: LoadedModel, effort: Effort, chunkings: Sequence[str], prefix: str = "") -> list[Twostep]:
    """One Twostep engine per chunking, named `prefix` + chunking; a step has room for the whole newcomer."""
    room = effort.newcomer + 512
    return [
        Twostep(model, "", prefix + chunking, chunking=chunking, max_num_seqs=8, max_num_batched_tokens=room)
        for chunking in chunkings
    ]


def measure(served_by: Sequence[ServingEngine], effort: Effort) -> list[StallPoint]:
    """Engines take turns. The first round is a warm-up."""
    runs: dict[str, list[Served]] = {engine.name: [] for engine in served_by}
    for run in range(effort.runs + 1):
        for engine in served_by:
            served = engine.interrupt(effort.stall(run))
            say(f"stall, {engine.name}: longest gap {gaps([served]).longest_ms.median:.0f} ms")
            runs[engine.name].append(served)
    return [StallPoint(name, gaps(done[1:])) for name, done in runs.items()]
