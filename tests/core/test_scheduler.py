"""The scheduler's calls one by one: what each takes, refuses and returns; plans are values."""

import dataclasses
from dataclasses import replace
from functools import partial

import pytest
from support.checked_executor import CheckedExecutor
from support.plan_rules import planned
from support.scheduling import MS, ROOT, Session, config, text

from twostep.core.blocks import prompt_hashes
from twostep.core.kv_cache import BlockGroup
from twostep.core.plan import Chunk, Finished, SliceOutcome, StepResult
from twostep.core.policies import TimeBudget, TokenBudget
from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import FinishReason, Request, Sequence, Stage
from twostep.core.scheduler import Scheduler


def started(**changes: object) -> Scheduler:
    """Sequence 1 has 40 of its 100 prompt tokens computed; nothing is under way."""
    scheduler = Scheduler(config(chunking=TokenBudget(48), **changes))
    scheduler.add(Request("a", 100, 10), 0)
    scheduler.advance(scheduler.plan(0))
    scheduler.resolve(StepResult(1))
    return scheduler


# --- plans are values ---------------------------------------------------------------------------------------------


def test_plans_are_immutable_comparable_and_hashable() -> None:
    scheduler = started()
    plan, again = planned(scheduler, 5), planned(scheduler, 5)
    assert plan == again
    assert len({plan, again}) == 1
    assert plan != replace(plan, step=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step = 9  # type: ignore[misc]
    assert plan.chunks == (Chunk(1, 48, 48, False, Reason(Why.TOKEN_BUDGET, (48,))),)


def test_the_same_calls_give_the_same_plans() -> None:
    def plans() -> list[object]:
        session = Session(config(blocks=60, chunking=TimeBudget(40 * MS), max_num_batched_tokens=400))
        for i in range(20):
            session.ask(text(40 + 9 * i, i % 3), 30, at_ns=i * 40 * MS, priority=i % 2, choices=1 + i % 2)
        session.abort("7", 500 * MS)
        return [(step.plan, step.granted) for step in session.run().steps]

    assert plans() == plans()


def test_a_void_plan_is_not_carried_out() -> None:
    scheduler = started()
    plan = scheduler.plan(0)
    scheduler.add(Request("b", 10, 1), 0)
    with pytest.raises(ValueError, match="plan of step 2 is void"):
        scheduler.advance(plan)


def test_one_step_is_under_way_at_a_time() -> None:
    scheduler = started()
    scheduler.advance(scheduler.plan(0))
    with pytest.raises(ValueError, match="the step before it has not ended"):
        scheduler.advance(scheduler.plan(0))
    scheduler.resolve(StepResult(1))
    with pytest.raises(ValueError, match="no step is under way"):
        scheduler.resolve(StepResult(1))


def test_a_plan_made_while_only_decodes_run_holds_when_they_end() -> None:
    """What makes overlap worth it: nothing changed, so it need not be made again."""
    session = Session(config())
    session.ask(text(20), 60)
    for _ in range(5):
        session.turn()
    scheduler = session.scheduler
    scheduler.advance(scheduler.plan(0))
    early = scheduler.plan(0)
    scheduler.resolve(StepResult(1))
    assert early.changes == scheduler.changes
    assert early == scheduler.plan(10**9)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (WHOLE, "all that was left"),
        (Reason(Why.ITL_BUDGET, (40_000_000, 38_900_000)), "ITL budget 40.0 ms, predicted 38.9 ms"),
        (Reason(Why.TOKEN_BUDGET, (512,)), "token budget of 512 a step"),
        (
            Reason(Why.NO_BLOCKS, (0, 7, 5, 1)),
            "block group 0: needs 7, 5 are free, 1 of them reserved for running requests",
        ),
        (Reason(Why.SHARES_PREFIX, (3,)), "waits for sequence 3, which is computing the same prefix"),
        (Reason(Why.OUT_OF_BLOCKS, (3,)), "sequence 3 needed its blocks"),
    ],
)
def test_reasons_are_put_into_words(reason: Reason, words: str) -> None:
    assert reason.words() == words


def test_every_reason_of_an_eventful_run_has_its_numbers() -> None:
    session = Session(config(blocks=40, max_num_seqs=6, chunking=TimeBudget(40 * MS), priority_preempts=True))
    for i in range(30):
        session.ask(text(40 + 9 * i, i % 3), 30, at_ns=i * 40 * MS, priority=i % 2, choices=1 + i % 2)
    session.run()
    plans = [step.plan for step in session.steps]
    reasons = {chunk.reason for plan in plans for chunk in plan.chunks}
    reasons |= {preemption.reason for plan in plans for preemption in plan.preemptions}
    reasons |= {waiting.reason for plan in plans for waiting in plan.not_admitted}
    assert all(reason.words() for reason in reasons)
    assert {Why.ITL_BUDGET, Why.LEAST_SHARE, Why.NO_BLOCKS, Why.OUT_OF_BLOCKS} <= {reason.why for reason in reasons}


# --- coming and going ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        Request("b", 0, 1),
        Request("b", 1, 0),
        Request("b", 1, 1, choices=0),
        Request("b", 5, 1, arrived_tokens=5),
        Request("b", 5, 1, arrived_tokens=-1),
    ],
)
def test_senseless_counts_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="at least one token each, and one left to compute"):
        Scheduler(config()).add(request_, 0)


@pytest.mark.parametrize(
    "request_",
    [
        Request("b", 1, 3, choices=2, given=(1,)),
        Request("b", 1, 3, given=(3,)),
        Request("b", 1, 3, given=(-1,)),
        Request("b", 5, 3, given=(1,), arrived_tokens=2),
    ],
)
def test_senseless_counts_of_given_tokens_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="given: a count below max_tokens for each choice"):
        Scheduler(config()).add(request_, 0)


def test_choices_that_have_output_compute_it_each_for_itself_and_go_on() -> None:
    """As after a preemption: nothing is forked, and each ends at the same length as if it had begun here."""
    settings = config(chunking=TokenBudget(48))
    scheduler, executor = Scheduler(settings), CheckedExecutor(settings.groups, stops=False)
    numbers = scheduler.add(Request("a", 30, 8, choices=3, given=(5, 0, 7)), 0)
    assert [seq.known for seq in scheduler.waiting] == [35, 30, 37]
    for choice, (number, given) in enumerate(zip(numbers, (5, 0, 7), strict=True)):
        executor.add(number, text(30 + given), choice, ())
    finished: list[Finished] = []
    while not scheduler.idle:
        step = scheduler.advance(scheduler.plan(0))
        assert not any(chunk.forks for chunk in step.plan.chunks)
        executor.start(step)
        finished += scheduler.resolve(executor.result()).finished
        scheduler.check()
    assert sorted(finished) == [Finished(number, FinishReason.LENGTH, 38) for number in numbers]


def test_an_id_is_in_use_until_its_request_has_ended() -> None:
    scheduler = started()
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        scheduler.add(Request("a", 1, 1), 0)
    scheduler.abort("a")
    assert scheduler.add(Request("a", 1, 1), 0) == (2,)


def test_aborting_what_is_not_there_changes_nothing() -> None:
    scheduler = started()
    changes = scheduler.changes
    assert scheduler.abort("nobody") == ()
    assert scheduler.abort("a", choice=5) == ()
    assert scheduler.changes == changes


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 60])
def test_an_abort_gives_blocks_back_at_once_and_counts_given_tokens(steps: int, under_way: bool) -> None:
    """In the queue, in prefill, while it decodes and in its last step; also while a step computes a token of it."""
    settings = config(chunking=TokenBudget(48))
    scheduler, executor = Scheduler(settings), CheckedExecutor(settings.groups, stops=False)
    [number] = scheduler.add(Request("a", 100, 60), 0)
    executor.add(number, text(100), 0, ())
    for _ in range(steps):
        executor.start(scheduler.advance(scheduler.plan(0)))
        scheduler.resolve(executor.result())
    if under_way:
        scheduler.advance(scheduler.plan(0))
    ended = scheduler.abort("a")
    assert ended == (Finished(number, FinishReason.ABORTED, len(executor.tokens[number])),)
    assert (scheduler.cache.free, scheduler.idle) == ((400,), True)
    scheduler.check()
    if under_way:
        scheduler.resolve(StepResult(1))
        scheduler.check()


def test_one_choice_of_several_can_be_aborted_before_they_part() -> None:
    for gone in range(3):
        session = Session(config(chunking=TokenBudget(32)))
        name = session.ask(text(100), 20, choices=3)
        session.turn()
        session.abort(name, session.clock_ns, choice=gone)
        session.run()
        session.check_answers()
        reasons = [session.life(name, choice).finished for choice in range(3)]
        assert [end.reason for end in reasons if end].count(FinishReason.ABORTED) == 1


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("tokens", [48, 50])
def test_choices_share_the_prompt_that_was_computed_once(tokens: int, slots: int) -> None:
    """With slots for all they fork; else the later ones find the whole blocks and compute the rest."""
    session = Session(config(max_num_seqs=slots))
    name = session.ask(text(tokens), 20, choices=4)
    session.run()
    session.check_answers()
    total = sum(chunk.tokens for step in session.steps for chunk in step.plan.chunks)
    forked = min(slots, 4) - 1
    assert total == tokens + (3 - forked) * (tokens - (tokens - 1) // 16 * 16)
    assert len({tuple(session.answer(name, choice)) for choice in range(4)}) == 4


# --- KV that arrives, drafts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrived", [1, 15, 16, 90, 99])
def test_kv_that_arrived_is_not_computed_again_but_offered_to_others(arrived: int) -> None:
    session = Session(config())
    session.ask(text(100), 5, arrived_tokens=arrived)
    session.ask(text(100), 5, at_ns=200 * MS)
    session.run()
    session.check_answers()
    first, second = (sum(c.tokens for s in session.steps for c in s.plan.chunks if c.number == n) for n in (1, 2))
    assert (first, second) == (100 - arrived, 4)


def test_kv_that_arrived_is_computed_here_after_a_preemption() -> None:
    session = Session(config(blocks=20, max_num_seqs=4))
    session.ask(text(100), 150)
    session.ask(text(100, 1), 150, arrived_tokens=90, keep=False)
    session.run()
    session.check_answers()
    assert [p.number for p in session.preemptions] == [2]
    assert [a.arrived for s in session.steps for a in s.plan.admissions if a.number == 2] == [90, 0]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("drafts", [1, 3, 30])
def test_drafts_save_steps_and_change_no_token(drafts: int, window: int | None) -> None:
    groups = (BlockGroup(400), BlockGroup(400, window))
    steps = []
    for proposed in (0, drafts):
        executor = CheckedExecutor(groups, stops=False, drafts=partial(lambda n, number, known: n, proposed))
        session = Session(config(groups=groups), executor)
        for i in range(3):
            session.ask(text(30, i), 80)
        session.run()
        session.check_answers()
        steps.append(len(session.steps))
    assert steps[1] < steps[0]
    assert all(len(life.token_ns) == 80 for life in session.lives.values())


def test_what_a_stopped_sequence_would_have_computed_next_is_not_planned() -> None:
    scheduler = Scheduler(config())
    [number] = scheduler.add(Request("a", 20, 60, prompt_hashes(ROOT, text(20))), 0)
    scheduler.advance(scheduler.plan(0))
    resolved = scheduler.resolve(StepResult(1, {number: SliceOutcome(finished=FinishReason.STOP)}))
    assert resolved.finished == (Finished(number, FinishReason.STOP, 21),)
    assert scheduler.plan(0).empty
    assert scheduler.cache.match(prompt_hashes(ROOT, text(20)), 1) == 1


# --- the check itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("breach", ["place", "stage", "computed", "blocks", "waiting holds blocks"])
def test_broken_books_are_found(breach: str) -> None:
    scheduler = started()
    seq: Sequence = scheduler.live[1]
    scheduler.check()
    if breach == "place":
        del scheduler.prefill[1]
    elif breach == "stage":
        seq.stage = Stage.PENDING
    elif breach == "computed":
        seq.computed = 101
    elif breach == "blocks":
        seq.tables[0].pop()
    else:
        del scheduler.prefill[1]
        scheduler.waiting.put(seq)
    with pytest.raises(AssertionError):
        scheduler.check()
