"""Policies by themselves: small pure objects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import MS, TrueModel, config

from twostep.core.cost import Cost, StepShape, Terms, decode_shape
from twostep.core.kv_cache import BlockGroup
from twostep.core.plan import StepResult
from twostep.core.planning import may_pass
from twostep.core.policies import (
    MOST_PASSES,
    ChunkPolicy,
    Continuous,
    Order,
    ShortestPrefill,
    Static,
    TimeBudget,
    TokenBudget,
    Unchunked,
    by_priority,
    fcfs,
)
from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import Request, Sequence
from twostep.core.scheduler import Scheduler, WaitingQueue


def waiting(number: int, tokens: int = 10, priority: int = 0) -> Sequence:
    return Sequence(number, 0, Request(str(number), tokens, 1, priority=priority), 0, tokens)


# --- batching -----------------------------------------------------------------------------------------------------


def test_continuous_lets_everybody_join() -> None:
    assert Continuous().open(running=7, waiting=5, left=0, waited_ns=0) == 5


@pytest.mark.parametrize(
    ("running", "waiting", "left", "waited_ns", "joins"),
    [
        (0, 4, 0, 0, 4),  # a full batch
        (0, 9, 0, 0, 4),  # no more than a batch
        (0, 3, 0, 99, 0),  # not full, patience left
        (0, 3, 0, 100, 3),  # not full, patience at an end
        (2, 9, 0, 999, 0),  # one under way, all let in
        (2, 9, 2, 0, 2),  # one under way, two more of it to admit
        (2, 1, 2, 0, 1),
    ],
)
def test_static_gathers_a_batch_and_finishes_it(
    running: int, waiting: int, left: int, waited_ns: int, joins: int
) -> None:
    assert Static(4, patience_ns=100).open(running, waiting, left, waited_ns) == joins


# --- admission ----------------------------------------------------------------------------------------------------


def test_orders() -> None:
    sequences = [waiting(1, 500, 1), waiting(2, 600, 0), waiting(3, 20, 0), waiting(4, 5, 1)]
    orders: list[Order] = [fcfs, by_priority, ShortestPrefill(1000)]
    numbers = [[seq.number for seq in sorted(sequences, key=order)] for order in orders]
    assert numbers == [[1, 2, 3, 4], [2, 3, 1, 4], [3, 2, 4, 1]]


@given(longest=st.integers(1, 100_000), early=st.integers(1, 100_000), later=st.integers(1, 100_000))
def test_shortest_prefill_lets_no_more_than_64_later_ones_pass(longest: int, early: int, later: int) -> None:
    order = ShortestPrefill(longest)
    first = waiting(5, min(early, longest))
    behind = waiting(5 + MOST_PASSES, min(later, longest))
    assert order(first) < order(behind)
    assert order(waiting(5, 10)) < order(waiting(6, 10))


def test_the_queue_is_in_order_however_it_came_to_be() -> None:
    queue = WaitingQueue(by_priority)
    sequences = [waiting(n, priority=n % 2) for n in (5, 2, 9, 4, 1)]
    for seq in sequences:
        queue.put(seq)
    queue.remove(sequences[1])
    assert [seq.number for seq in queue] == [4, 1, 5, 9]
    assert len(queue) == 4


def test_only_the_next_64_of_its_priority_may_pass() -> None:
    first = waiting(1)
    assert may_pass(waiting(65), first)
    assert not may_pass(waiting(66), first)
    assert may_pass(waiting(66, priority=-1), first)


# --- chunking -----------------------------------------------------------------------------------------------------

EIGHT_DECODE = decode_shape(8, 800)


@pytest.mark.parametrize(
    ("start", "wanted", "tokens"),
    [
        (0, 56, 56),  # fits exactly
        (0, 57, 48),  # cut, to the end of a block
        (8, 100, 56),  # as above from the middle of one: 8 + 56 = 64
        (10, 100, 54),
        (60, 100, 52),
    ],
)
def test_a_token_budget_counts_decodes_and_cuts_at_blocks(start: int, wanted: int, tokens: int) -> None:
    grant = TokenBudget(64).grant(EIGHT_DECODE, start, wanted, None)
    assert grant.tokens == tokens
    assert grant.reason == (WHOLE if tokens == wanted else Reason(Why.TOKEN_BUDGET, (64,)))


def test_a_budget_that_ends_before_the_block_does_gives_nothing() -> None:
    """The planner's least shares see to it that prompts go on all the same."""
    assert TokenBudget(12).grant(StepShape(), 0, 100, None).tokens == 0
    assert TokenBudget(12).grant(StepShape(), 8, 100, None).tokens == 8
    assert TokenBudget(4).grant(EIGHT_DECODE, 0, 100, None).tokens == 0


def test_unchunked_takes_whole_prompts_up_to_its_budget_and_always_the_first() -> None:
    chunking = Unchunked(100)
    assert chunking.grant(EIGHT_DECODE, 0, 1000, None).tokens == 1000
    beside = EIGHT_DECODE.with_slice(0, 60, 1)
    assert chunking.grant(beside, 0, 32, None).tokens == 32
    assert chunking.grant(beside, 0, 33, None) == (0, Reason(Why.TOKEN_BUDGET, (100,)))


@pytest.mark.parametrize(("decoding", "limit", "why"), [(True, 40, Why.ITL_BUDGET), (False, 250, Why.LONGEST_STEP)])
def test_a_time_budget_binds_while_others_decode_and_else_the_ceiling(decoding: bool, limit: int, why: Why) -> None:
    model = TrueModel()
    load = EIGHT_DECODE if decoding else StepShape()
    sizer = TimeBudget(40 * MS).sizer(model)
    grant = sizer.grant(load, 0, 2000, sizer.promise(load, 0) if decoding else None)
    predicted_ns = model.estimate(load.with_slice(0, grant.tokens, 0)).bound_ns
    assert grant.reason == Reason(why, (limit * MS, predicted_ns))
    assert predicted_ns <= limit * MS < model.estimate(load.with_slice(0, grant.tokens + 16, 1)).bound_ns
    assert grant.tokens % 16 == 0


def test_without_decodes_a_step_is_not_narrow_however_slow_the_machine() -> None:
    class Slow(TrueModel):
        def estimate(self, shape: StepShape) -> Cost:
            return Cost(10_000 * MS, 10_000 * MS, Terms())

    chunking = TimeBudget(40 * MS).sizer(Slow())
    alone = chunking.grant(StepShape(), 0, 2000, None)
    assert (alone.tokens, alone.reason.why) == (64, Why.LONGEST_STEP)
    assert chunking.grant(StepShape().with_slice(0, 16, 0), 16, 2000, None).tokens == 48
    assert chunking.grant(StepShape(), 0, 2000, chunking.promise(StepShape(), 0)).tokens == 0


def test_a_time_budget_needs_a_cost_model() -> None:
    with pytest.raises(ValueError, match="need a cost model"):
        Scheduler(config(chunking=TimeBudget(40 * MS)))


class Listening(TrueModel):
    def __init__(self) -> None:
        self.heard: list[tuple[StepShape, int]] = []

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        self.heard.append((shape, measured_ns))


@pytest.mark.parametrize(("chunking", "learned"), [(TimeBudget(40 * MS), 61), (TokenBudget(64), 1 + 4)])
def test_the_cost_model_learns_from_every_step_only_where_chunks_are_sized_by_time(
    chunking: ChunkPolicy, learned: int
) -> None:
    """A prompt, then 60 steps that only decode: of those the first, and then one in 16, tells enough."""
    model = Listening()
    scheduler = Scheduler(config(chunking=chunking), model)
    scheduler.add(Request("a", 20, 200), 0)
    for step in range(61):
        scheduler.advance(scheduler.plan(step))
        scheduler.resolve(StepResult(1000 + step))
    assert len(model.heard) == learned
    assert model.heard[0] == (StepShape().with_slice(0, 20, 1), 1000)
    assert model.heard[1] == (decode_shape(1, 21), 1001)


def test_a_failed_step_teaches_nothing() -> None:
    model = Listening()
    scheduler = Scheduler(config(), model)
    scheduler.add(Request("a", 20, 200), 0)
    scheduler.advance(scheduler.plan(0))
    scheduler.resolve(StepResult(1000, failed=True))
    assert model.heard == []


# --- settings that contradict each other --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it has to be at least 1"),
        ({"groups": ()}, "a block in each group"),
        ({"groups": (BlockGroup(5), BlockGroup(0, 16))}, "a block in each group"),
        ({"max_num_batched_tokens": 271}, "max_num_batched_tokens is 271; it has to be at least 272: 16 for decodes"),
        ({"priority_preempts": True, "order": fcfs}, "priority_preempts needs an order by priority"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)
