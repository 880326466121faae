"""What scheduling costs: a step in which all only decode, and what each request more that something happens to adds."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.progress import say
from benchmarks.scheduling import Rig, Turn, step_ns
from benchmarks.spread import Spread, spread
from twostep.config.configs import SchedulerSettings
from twostep.core.cost import StepShape
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.metrics.summary import percentile

CHUNKINGS = ("tokens", "time")
"""A budget of tokens a step; one of time, whose model predicts and learns in every step."""
CONTEXT = 1000
PROMPT = 300
"""Tokens of the prompts of the requests that come, and of those that are preempted, about."""
TOGETHER = 4
"""Requests that something happens to in one step, where the benchmark can choose."""
ANSWER = 12
"""Tokens that those that come answer with, so that they are gone before the next come."""
LONG_PROMPT, CHUNK_TOKENS = 4096, 256


@dataclass(frozen=True)
class Effort:
    """How often is measured. `windows`: of 16 steps, in which every sequence begins one block."""

    standing: tuple[int, ...]
    events_at: tuple[int, ...]
    windows: int
    episodes: int
    rounds: int


FULL = Effort((16, 64, 256, 1024), (16, 256), windows=40, episodes=30, rounds=5)
QUICK = Effort((16,), (16,), windows=2, episodes=2, rounds=2)


@dataclass(frozen=True)
class StandingCost:
    """Steps in which `standing` sequences decode and nothing else happens, at contexts around 1000."""

    standing: int
    chunking: str
    us: Spread
    """Mean over 16 steps; the median of a round's windows, over the rounds."""
    p99_us: Spread
    """Of single steps."""
    parts_us: dict[str, float]
    """Of the mean: plan, advance, resolve."""


@dataclass(frozen=True)
class EventCost:
    """What one request adds to scheduling beside `standing` decodes, over all steps in which it makes a difference."""

    event: str
    standing: int
    chunking: str
    us: Spread


def measure(effort: Effort) -> tuple[list[StandingCost], list[EventCost]]:
    """Rounds go through all that is measured, so that whatever disturbs the machine disturbs all alike."""
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
        [standing_cost(standing, chunking, rounds) for (chunking, standing), rounds in windows.items()],
        [EventCost(event, standing, chunking, spread(us)) for (chunking, standing, event), us in events.items()],
    )


# ------------------------------------------------------------------------------------------------------ only decoding


def standing_cost(standing: int, chunking: str, rounds: list[list[Turn]]) -> StandingCost:
    """Rounds of steps, a whole number of windows each."""
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
    """`standing` sequences decode, as many at each place of a block, for at least `steps`, at contexts around 1000.

    Beside them a step has room for about `spare_tokens` of prompts, or for the time that they take.
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
    """Takes a request on, before any step sees it."""
    rig = _standing_rig(chunking, standing, 1)
    return [mean(rig.arrive(PROMPT, ANSWER) for _ in range(TOGETHER)) for _ in range(episodes)]


def _admitted(chunking: str, standing: int, episodes: int) -> list[float]:
    """Gets seat and blocks and its whole prompt in one step, decodes from the next step on."""
    return [cost for cost, _ in _lives(chunking, standing, episodes)]


def _finished(chunking: str, standing: int, episodes: int) -> list[float]:
    """Gets its last token, its blocks go back; the next step tells the executor that it left."""
    return [cost for _, cost in _lives(chunking, standing, episodes)]


def _lives(chunking: str, standing: int, episodes: int) -> list[tuple[float, float]]:
    """Requests come and go together: what each added when it was admitted, and when it finished."""
    steps = BLOCK_TOKENS + ANSWER + 4
    rig = _standing_rig(chunking, standing, episodes * steps)
    return [_life(rig, steps - BLOCK_TOKENS) for _ in range(episodes)]


def _life(rig: Rig, steps: int) -> tuple[float, float]:
    plain_ns = median(rig.turn().total_ns for _ in range(BLOCK_TOKENS))
    for _ in range(TOGETHER):
        rig.arrive(PROMPT, ANSWER)
    turns = [rig.turn() for _ in range(steps)]
    came = next(i for i, turn in enumerate(turns) if len(turn.plan.admissions) == TOGETHER)
    went = next(i for i, turn in enumerate(turns) if len(turn.resolved.finished) == TOGETHER)
    return _added_ns(turns[came : came + 2], plain_ns), _added_ns(turns[went : went + 2], plain_ns)


def _added_ns(turns: list[Turn], plain_ns: float) -> float:
    return (sum(turn.total_ns for turn in turns) - len(turns) * plain_ns) / TOGETHER


def _chunked(chunking: str, standing: int, episodes: int) -> list[float]:
    """One slice of a prompt that is cut: of long prompts in mid-prefill, several at a time."""
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
    """Gives its blocks back so that those who came before it can go on."""
    return [_preemption(chunking, standing) for _ in range(episodes)]


def _preemption(chunking: str, standing: int) -> float:
    """All begin a block in the same step: with too few blocks for that, less with enough, by those preempted."""
    held = standing * blocks_for(PROMPT)
    roomy = _step_of_new_blocks(chunking, standing, 2 * held)
    tight = _step_of_new_blocks(chunking, standing, held + max(2, held // 50))
    assert not roomy.plan.preemptions, "enough blocks were not enough"
    return (tight.total_ns - roomy.total_ns) / len(tight.plan.preemptions)


def _step_of_new_blocks(chunking: str, standing: int, blocks: int) -> Turn:
    """The step after all came, with their last block full."""
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
"""By name: what one request adds, ns, in each of so many episodes."""
TIMED_EVENTS = ("admitted", "chunked")
"""Those that ask the time model, measured with it as well."""
