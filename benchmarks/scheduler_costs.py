"""Cost of scheduling: steps that only decode, and the additional cost of each event of a request."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.measurement import Spread, say, spread
from benchmarks.scheduler_rig import Rig, Turn, step_ns
from twostep.config.configs import SchedulerSettings
from twostep.core.cost import StepShape
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.metrics.summary import percentile

CHUNKINGS = ("tokens", "time")
"""Chunking by tokens, and by time, whose cost model predicts and learns in every step."""
CONTEXT = 1000
PROMPT = 300
"""Approximate prompt length of arriving and preempted requests."""
TOGETHER = 4
"""Requests with an event in the same step, where the benchmark can choose."""
ANSWER = 12
"""Answer length of arriving requests, which end before the next ones arrive."""
LONG_PROMPT, CHUNK_TOKENS = 4096, 256


@dataclass(frozen=True)
class Effort:
    """Number of measurements. `windows`: windows of 16 steps, in which every sequence starts one block."""

    standing: tuple[int, ...]
    events_at: tuple[int, ...]
    windows: int
    episodes: int
    rounds: int


FULL = Effort((16, 64, 256, 1024), (16, 256), windows=40, episodes=30, rounds=5)
QUICK = Effort((16,), (16,), windows=2, episodes=2, rounds=2)


@dataclass(frozen=True)
class StandingCost:
    """Steps with a decode batch of `standing` sequences and no other event, at contexts around 1000."""

    standing: int
    chunking: str
    us: Spread
    """Mean over 16 steps; the median over the windows of a round, spread over rounds."""
    p99_us: Spread
    """p99 of single steps."""
    parts_us: dict[str, float]
    """Parts of the mean: plan, advance, resolve."""


@dataclass(frozen=True)
class EventCost:
    """Additional scheduling cost of one request beside a decode batch of `standing`, over all affected steps."""

    event: str
    standing: int
    chunking: str
    us: Spread


def measure(effort: Effort) -> tuple[list[StandingCost], list[EventCost]]:
    """Every round measures all points, so that disturbances of the machine affect all points alike."""
    points = [(chunking, standing) for chunking in CHUNKINGS for standing in effort.standing]
    cases = [
        (chunking, standing, event)
        for chunking in CHUNKINGS
        for standing in effort.events_at
        for event in EVENTS
        if chunking == "tokens" or event in TIMED_EVENTS
    ]
    windows: dict[tuple[str, int], list[list[Turn]]] = {point: [] for point in points}
    events: dict[tuple[str, int, str], list[float]] = {case: [] for case in cases}
    for number in range(effort.rounds):
        say(f"scheduling without kernels, round {number + 1} of {effort.rounds}")
        for chunking, standing in points:
            windows[chunking, standing].append(_steady(chunking, standing, effort.windows))
        for chunking, standing, event in cases:
            costs = EVENTS[event](chunking, standing, effort.episodes)
            events[chunking, standing, event].append(median(costs) / 1000)
    return (
        [decode_batch_cost(standing, chunking, rounds) for (chunking, standing), rounds in windows.items()],
        [EventCost(event, standing, chunking, spread(us)) for (chunking, standing, event), us in events.items()],
    )


# ------------------------------------------------------------------------------------------------------ only decoding


def decode_batch_cost(standing: int, chunking: str, rounds: list[list[Turn]]) -> StandingCost:
    """`rounds`: steps of each round, a whole number of windows."""
    turns = [turn for turns in rounds for turn in turns]
    return StandingCost(
        standing=standing,
        chunking=chunking,
        us=spread([median(_window_means_us(turns)) for turns in rounds]),
        p99_us=spread([percentile([turn.total_ns / 1000 for turn in turns], 99) for turns in rounds]),
        parts_us={
            "plan": mean(turn.plan_ns for turn in turns) / 1000,
            "advance": mean(turn.advance_ns for turn in turns) / 1000,
            "resolve": mean(turn.resolve_ns for turn in turns) / 1000,
        },
    )


def _window_means_us(turns: list[Turn]) -> list[float]:
    starts = range(0, len(turns), BLOCK_TOKENS)
    return [mean(turn.total_ns for turn in turns[start : start + BLOCK_TOKENS]) / 1000 for start in starts]


def _steady(chunking: str, standing: int, windows: int) -> list[Turn]:
    steps = windows * BLOCK_TOKENS
    rig = _standing_rig(chunking, standing, steps)
    return [rig.turn() for _ in range(steps)]


def _standing_rig(chunking: str, standing: int, steps: int, *, spare_tokens: int = LONG_PROMPT) -> Rig:
    """A rig with a decode batch of `standing` sequences for at least `steps`, at contexts around 1000, evenly
    distributed over block offsets.

    A step also has room for about `spare_tokens` prompt tokens, or for their time.
    """
    first = CONTEXT - steps // 2
    blocks = 2 * (standing + TOGETHER) * blocks_for(first + steps + LONG_PROMPT)
    rig = Rig(_settings(chunking, standing, spare_tokens, blocks))
    for i in range(standing):
        rig.arrive(first + i % BLOCK_TOKENS, 2 * steps + 8 * BLOCK_TOKENS, arrived=True)
    while len(rig.scheduler.decode_batch) < standing:
        rig.turn()
    rig.turn()
    return rig


def _settings(chunking: str, standing: int, spare_tokens: int, blocks: int) -> SchedulerSettings:
    tokens = standing + spare_tokens
    budget_ms = step_ns(StepShape(tokens, spare_tokens * LONG_PROMPT, 0, standing * CONTEXT, standing)) / 1e6
    return SchedulerSettings(
        blocks=(blocks,),
        max_num_seqs=standing + 4 * TOGETHER,
        max_num_batched_tokens=standing + 2 * LONG_PROMPT,
        max_model_len=1 << 20,
        chunking=f"tokens={tokens}" if chunking == "tokens" else f"time={budget_ms:.0f}",
    )


# ------------------------------------------------------------------------------------------------------------- events


def _queued(chunking: str, standing: int, episodes: int) -> list[float]:
    """Queues a request, before any step plans it."""
    rig = _standing_rig(chunking, standing, 1)
    return [mean(rig.arrive(PROMPT, ANSWER) for _ in range(TOGETHER)) for _ in range(episodes)]


def _admitted(chunking: str, standing: int, episodes: int) -> list[float]:
    """Gets a slot, blocks and its whole prefill in one step, and decodes from the next step on."""
    return [cost for cost, _ in _lives(chunking, standing, episodes)]


def _finished(chunking: str, standing: int, episodes: int) -> list[float]:
    """Gets its last token and frees its blocks; the next step tells the executor that it left."""
    return [cost for _, cost in _lives(chunking, standing, episodes)]


def _lives(chunking: str, standing: int, episodes: int) -> list[tuple[float, float]]:
    """Requests arrive and finish together: the additional cost of each at admission, and at its end."""
    steps = BLOCK_TOKENS + ANSWER + 4
    rig = _standing_rig(chunking, standing, episodes * steps)
    return [_life(rig, steps - BLOCK_TOKENS) for _ in range(episodes)]


def _life(rig: Rig, steps: int) -> tuple[float, float]:
    plain_ns = median(rig.turn().total_ns for _ in range(BLOCK_TOKENS))
    for _ in range(TOGETHER):
        rig.arrive(PROMPT, ANSWER)
    turns = [rig.turn() for _ in range(steps)]
    admitted = next(i for i, turn in enumerate(turns) if len(turn.plan.admissions) == TOGETHER)
    finished = next(i for i, turn in enumerate(turns) if len(turn.resolved.finished) == TOGETHER)
    return _added_ns(turns[admitted : admitted + 2], plain_ns), _added_ns(turns[finished : finished + 2], plain_ns)


def _added_ns(turns: list[Turn], plain_ns: float) -> float:
    return (sum(turn.total_ns for turn in turns) - len(turns) * plain_ns) / TOGETHER


def _chunked(chunking: str, standing: int, episodes: int) -> list[float]:
    """One chunk of a prompt, with several long prompts in prefill."""
    rig = _standing_rig(chunking, standing, 4 * episodes + BLOCK_TOKENS, spare_tokens=CHUNK_TOKENS)
    plain_ns = median(rig.turn().total_ns for _ in range(BLOCK_TOKENS))
    costs: list[float] = []
    while len(costs) < episodes:
        if not rig.scheduler.prefill:
            for _ in range(TOGETHER):
                rig.arrive(LONG_PROMPT, 1)
        turn = rig.turn()
        if turn.plan.chunks and not turn.plan.admissions and not turn.resolved.finished:
            costs.append((turn.total_ns - plain_ns) / len(turn.plan.chunks))
    return costs


def _preempted(chunking: str, standing: int, episodes: int) -> list[float]:
    """Loses its blocks so that earlier requests can continue."""
    return [_preemption(chunking, standing) for _ in range(episodes)]


def _preemption(chunking: str, standing: int) -> float:
    """All sequences start a block in the same step. Cost with too few blocks minus cost with enough, per preemption."""
    used = standing * blocks_for(PROMPT)
    roomy = _step_of_new_blocks(chunking, standing, 2 * used)
    tight = _step_of_new_blocks(chunking, standing, used + max(2, used // 50))
    assert not roomy.plan.preemptions, "preempted despite enough blocks"
    return (tight.total_ns - roomy.total_ns) / len(tight.plan.preemptions)


def _step_of_new_blocks(chunking: str, standing: int, blocks: int) -> Turn:
    """The step after all requests were admitted with their last block full."""
    rig = Rig(_settings(chunking, standing, LONG_PROMPT, blocks))
    for _ in range(standing):
        rig.arrive(blocks_for(PROMPT) * BLOCK_TOKENS, 4 * BLOCK_TOKENS, arrived=True)
    while rig.scheduler.waiting:
        rig.turn()
    return rig.turn()


EVENTS: dict[str, Callable[[str, int, int], list[float]]] = {
    "queued": _queued,
    "admitted": _admitted,
    "chunked": _chunked,
    "finished": _finished,
    "preempted": _preempted,
}
"""By name: additional cost of one request in ns, for each episode."""
TIMED_EVENTS = ("admitted", "chunked")
"""Events that use the cost model, which are measured with chunking by time as well."""
