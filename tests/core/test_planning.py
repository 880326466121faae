"""Planning by itself: what the ledger keeps, and the example of docs/scheduling.md, step by step."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import config

from twostep.core.cost import decode_shape
from twostep.core.plan import Chunk, Plan, StepResult
from twostep.core.planning import Ledger
from twostep.core.policies import Static, TokenBudget, Unchunked
from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import Request
from twostep.core.scheduler import Scheduler
from twostep.recording.plan_words import plan_words

DOCS = Path(__file__).parents[2] / "docs" / "scheduling.md"


def ledger(blocks: tuple[int, ...] = (10, 4), slots: int = 2) -> Ledger:
    return Ledger(blocks, slots, 128, TokenBudget(64), decode_shape(2, 40), cuts=True)


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_what_fits_can_be_taken_and_what_is_taken_does_not_fit_again() -> None:
    left = ledger()
    assert left.fits((10, 4), 2)
    left.take((10, 3), 1)
    assert left.fits((0, 1), 1)
    assert not left.fits((1, 0))
    assert not left.fits((0, 2))
    assert not left.fits((0, 0), 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)), max_size=6))
def test_a_refund_undoes_what_was_taken(taken: list[tuple[int, int, int]]) -> None:
    left = ledger((100, 100), 10)
    for first, second, slots in taken:
        left.take((first, second), slots)
    for first, second, slots in taken:
        left.refund((first, second), slots)
    assert (left.blocks, left.slots) == ([100, 100], 10)


def test_slices_use_up_tokens_and_give_them_back() -> None:
    left = ledger()
    assert left.grant(0, 100) == (48, Reason(Why.TOKEN_BUDGET, (64,)))  # 62 left, to the end of a block
    left.take_slice(0, 48, 0)
    assert left.tokens == 128 - 50
    assert left.grant(48, 20).tokens == 0
    left.refund_slice(0, 48, 0)
    assert left.load == decode_shape(2, 40)


def test_what_a_step_holds_limits_whatever_the_policy_says() -> None:
    wide = Ledger((1,), 1, 30, TokenBudget(1000), decode_shape(2, 40), cuts=True)
    assert wide.grant(4, 100) == (28, Reason(Why.TOKEN_BUDGET, (30,)))
    whole = Ledger((1,), 1, 30, Unchunked(1000), decode_shape(2, 40), cuts=False)
    assert whole.grant(4, 28) == (28, WHOLE)
    assert whole.grant(4, 29) == (0, Reason(Why.TOKEN_BUDGET, (30,)))


# --- when to look again -------------------------------------------------------------------------------------------


def test_a_plan_that_waits_only_for_time_says_until_when() -> None:
    scheduler = Scheduler(config(batching=Static(3, patience_ns=100)))
    assert scheduler.plan(0).next_wake_ns is None
    scheduler.add(Request("a", 20, 4), 7)
    plan = scheduler.plan(50)
    assert (plan.empty, plan.next_wake_ns) == (True, 107)
    assert scheduler.plan(106).empty
    begun = scheduler.plan(107)
    assert (begun.decoding, len(begun.admissions), begun.next_wake_ns) == (0, 1, None)


def test_a_batch_under_way_is_no_matter_of_time() -> None:
    """The second has to wait for the end of the first, whatever the time: that its step ends is what wakes the loop."""
    scheduler = Scheduler(config(batching=Static(3, patience_ns=100)))
    scheduler.add(Request("a", 20, 1), 0)
    scheduler.advance(scheduler.plan(100))
    scheduler.add(Request("b", 20, 1), 110)
    plan = scheduler.plan(5000)
    assert (plan.empty, plan.next_wake_ns) == (True, None)
    scheduler.resolve(StepResult(1))
    assert len(scheduler.plan(5000).admissions) == 1


# --- the example --------------------------------------------------------------------------------------------------


def example() -> list[Plan]:
    """Two requests decode when three prompts arrive together: the plans of steps 2, 3 and 4."""
    scheduler = Scheduler(config(chunking=TokenBudget(64)))
    for name in ("A", "B"):
        scheduler.add(Request(name, 10, 100), 0)
    scheduler.advance(scheduler.plan(0))
    scheduler.resolve(StepResult(1))
    for name, tokens in (("C", 200), ("D", 100), ("E", 40)):
        scheduler.add(Request(name, tokens, 100), 1)
    plans = []
    for now in (2, 3, 4):
        plans.append(scheduler.plan(now))
        scheduler.advance(plans[-1])
        scheduler.resolve(StepResult(1))
    return plans


def test_the_example_in_the_docs_is_what_is_planned() -> None:
    text = DOCS.read_text()
    for plan in example():
        assert plan_words(plan) in text


@pytest.mark.parametrize(
    ("step", "chunks"),
    [
        (2, [(3, 0, 48)]),
        (3, [(3, 48, 16), (4, 0, 32)]),
        (4, [(3, 64, 16), (5, 0, 40)]),
    ],
)
def test_the_example_by_hand(step: int, chunks: list[tuple[int, int, int]]) -> None:
    plan = example()[step - 2]
    assert (plan.step, plan.decoding) == (step, 2)
    assert [chunk[:3] for chunk in plan.chunks] == chunks
    assert all(isinstance(chunk, Chunk) and chunk.samples == (chunk.number == 5) for chunk in plan.chunks)
