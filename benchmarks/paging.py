"""Concurrent requests in the same KV memory: blocks on demand against contiguous reservations."""

from dataclasses import dataclass
from random import Random
from statistics import mean

from benchmarks.measurement import Spread, say, spread
from benchmarks.scheduler_rig import Rig
from twostep.config.configs import SchedulerSettings
from twostep.core.request import BLOCK_TOKENS, blocks_for

MOST_TOKENS = 2048
"""Tokens that a contiguous cache reserves per request."""


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
    """Means over steps of the real scheduler under constant overload, without kernels."""

    blocks: int
    most_tokens: int
    contiguous: int
    """Concurrent requests if each reserves `most_tokens`."""
    paged: Spread
    ratio: Spread
    paged_waste: Spread
    """Share of positions in allocated blocks without a token."""
    contiguous_waste: Spread
    """Share of reserved positions without a token, for the same requests."""
    preempted: Spread
    """Preemptions / admissions, including readmissions."""


@dataclass(frozen=True)
class Steady:
    """Means over the steps of one run."""

    running: float
    used_tokens: float
    allocated_blocks: float
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
        paged_waste=spread([1 - run.used_tokens / (run.allocated_blocks * BLOCK_TOKENS) for run in runs]),
        contiguous_waste=spread([1 - run.used_tokens / (run.running * MOST_TOKENS) for run in runs]),
        preempted=spread([run.preempted for run in runs]),
    )


def _steady(effort: Effort, run: int) -> Steady:
    """Prompts of 32 to 512 tokens, answers of 16 to 256, with enough waiting requests that only memory is the limit."""
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
            found.append(_usage(rig))
    counters = rig.scheduler.counters
    running, used, allocated = (mean(values) for values in zip(*found, strict=True))
    return Steady(running, used, allocated, counters.preemptions / counters.admitted)


def _usage(rig: Rig) -> tuple[int, int, int]:
    """Requests with blocks after a step, their computed tokens, their blocks."""
    scheduler = rig.scheduler
    holding = [seq for seq in scheduler.live.values() if seq.tables]
    [free] = scheduler.cache.free
    [group] = scheduler.config.groups
    return len(holding), sum(map(scheduler.computed, holding)), group.blocks - free
