"""How many requests run at once in the same KV memory: blocks as they are needed, against room for the longest."""

from dataclasses import dataclass
from random import Random
from statistics import mean

from benchmarks.progress import say
from benchmarks.scheduling import Rig
from benchmarks.spread import Spread, spread
from twostep.config.configs import SchedulerSettings
from twostep.core.request import BLOCK_TOKENS, blocks_for

MOST_TOKENS = 2048
"""What a contiguous cache keeps for each request."""


@dataclass(frozen=True)
class Effort:
    blocks: int
    warm_steps: int
    steps: int
    runs: int


FULL = Effort(blocks=1024, warm_steps=1000, steps=3000, runs=5)
QUICK = Effort(blocks=256, warm_steps=100, steps=100, runs=2)


@dataclass(frozen=True)
class Paging:
    """Means over steps of the real scheduler with more requests waiting than fit, without kernels."""

    blocks: int
    most_tokens: int
    contiguous: int
    """Requests at a time if each has `most_tokens` reserved."""
    paged: Spread
    ratio: Spread
    paged_waste: Spread
    """Share of the positions in blocks held that have no token."""
    contiguous_waste: Spread
    """Share of the positions reserved that have none, of the same requests."""
    preempted: Spread
    """Preemptions over admissions, those of the preempted included."""


@dataclass(frozen=True)
class Steady:
    """Means over the steps of one run."""

    running: float
    used_tokens: float
    held_blocks: float
    preempted: float


def measure(effort: Effort) -> Paging:
    runs = [_steady(effort, run) for run in range(effort.runs)]
    found = paging(effort.blocks, runs)
    say(f"paged {found.paged.median:.1f} requests at a time, contiguous {found.contiguous}")
    return found


def paging(blocks: int, runs: list[Steady]) -> Paging:
    contiguous = blocks // blocks_for(MOST_TOKENS)
    return Paging(
        blocks=blocks,
        most_tokens=MOST_TOKENS,
        contiguous=contiguous,
        paged=spread([run.running for run in runs]),
        ratio=spread([run.running / contiguous for run in runs]),
        paged_waste=spread([1 - run.used_tokens / (run.held_blocks * BLOCK_TOKENS) for run in runs]),
        contiguous_waste=spread([1 - run.used_tokens / (run.running * MOST_TOKENS) for run in runs]),
        preempted=spread([run.preempted for run in runs]),
    )


def _steady(effort: Effort, run: int) -> Steady:
    """Prompts of 32 to 512 tokens, answers of 16 to 256, so many waiting that memory alone limits."""
    generator = Random(run)
    rig = Rig(
        SchedulerSettings(
            blocks=(effort.blocks,),
            max_num_seqs=effort.blocks,
            max_num_batched_tokens=4 * effort.blocks,
            chunking="tokens=1024",
        ),
        hashing=False,
    )
    found = []
    for number in range(effort.warm_steps + effort.steps):
        while len(rig.scheduler.waiting) < 4:
            rig.arrive(generator.randint(32, 512), generator.randint(16, 256))
        rig.turn()
        if number >= effort.warm_steps:
            found.append(_held(rig))
    counters = rig.scheduler.counters
    running, used, held = (mean(values) for values in zip(*found, strict=True))
    return Steady(running, used, held, counters.preemptions / counters.admitted)


def _held(rig: Rig) -> tuple[int, int, int]:
    """Requests that hold blocks after a step, their computed tokens, their blocks."""
    scheduler = rig.scheduler
    holding = [seq for seq in scheduler.live.values() if seq.tables]
    [free] = scheduler.cache.free
    [group] = scheduler.config.groups
    return len(holding), sum(map(scheduler.computed, holding)), group.blocks - free
