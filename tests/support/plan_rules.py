"""What every plan keeps to, whatever the policies: asked of a plan before it is carried out."""

import pickle

from twostep.core.cost import decode_shape
from twostep.core.plan import Plan
from twostep.core.policies import MOST_PASSES, TimeBudget, TokenBudget
from twostep.core.reasons import Why
from twostep.core.request import Sequence, Stage
from twostep.core.scheduler import Scheduler


def planned(scheduler: Scheduler, now: int) -> Plan:
    """The next plan, made twice to see that planning changes nothing, and held against all rules."""
    before = pickle.dumps(scheduler)
    plan = scheduler.plan(now)
    assert scheduler.plan(now) == plan, "the same state and time gave two plans"
    assert pickle.dumps(scheduler) == before, "planning changed the scheduler"
    check_plan(scheduler, plan)
    return plan


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    assert hash(plan) == hash(plan)
    _check_slices(scheduler, plan)
    _check_budget(scheduler, plan)
    _check_preemptions(scheduler, plan)
    _check_admissions(scheduler, plan)


def _check_slices(scheduler: Scheduler, plan: Plan) -> None:
    """Every slice goes on where its sequence is, computes only known tokens, and samples just when it has caught up."""
    gone = {preemption.number for preemption in plan.preemptions}
    standing = {seq.number for seq in scheduler.decode_batch.members}
    assert plan.decoding == len(standing - gone)
    assert len({chunk.number for chunk in plan.chunks}) == len(plan.chunks), "two slices of one sequence"
    starts = {admission.number: max(admission.cached * 16, admission.arrived) for admission in plan.admissions}
    for chunk in plan.chunks:
        seq = scheduler.live[chunk.number]
        assert chunk.number not in gone | standing
        assert chunk.start == starts.get(chunk.number, seq.computed)
        end = chunk.start + chunk.tokens
        assert chunk.tokens > 0
        assert end <= seq.known + seq.drafts
        assert chunk.samples == (end - chunk.drafts == seq.known), "a row is sampled just when all known is computed"
        assert {scheduler.live[fork].stage for fork in chunk.forks} <= {Stage.FORK_WAITING}


def _check_budget(scheduler: Scheduler, plan: Plan) -> None:
    config, shape = scheduler.config, plan.shape
    assert shape.tokens <= config.max_num_batched_tokens
    if any(scheduler.live[chunk.number].drafts for chunk in plan.chunks):
        return
    least = sum(min(config.chunking.least_tokens, chunk.tokens) for chunk in plan.chunks)
    if isinstance(config.chunking, TokenBudget):
        assert shape.tokens <= max(config.chunking.budget_tokens, plan.decoding + least)
    if isinstance(config.chunking, TimeBudget):
        _check_time(scheduler, config.chunking, plan)


def _check_time(scheduler: Scheduler, chunking: TimeBudget, plan: Plan) -> None:
    """A step with decodes keeps its promise, or knowingly breaks it: with one least share at most, a narrow one.
    One without decodes ends before the ceiling, unless it is narrow."""
    least = sum(min(chunking.least_tokens, chunk.tokens) for chunk in plan.chunks)
    assert plan.predicted_ns is not None
    if plan.promise is None:
        assert not plan.decoding
        few = plan.shape.tokens <= max(least, chunking.alone_tokens)
        assert few or plan.predicted_ns <= chunking.ceiling_ns
    elif plan.predicted_ns + plan.promise.overhead_ns > plan.promise.budget_ns:
        assert plan.over_budget
        assert len(plan.chunks) <= 1
        assert plan.shape.tokens - plan.decoding == least
        if least > 1:
            decodes_ns = plan.promise.decodes_ns
            one_ns = scheduler.sizer.predicted_ns(decode_shape(plan.decoding, 0).with_slice(0, 1, 1))
            assert one_ns is not None
            assert plan.predicted_ns <= max(decodes_ns * 9 / 8, decodes_ns + one_ns)


def _check_preemptions(scheduler: Scheduler, plan: Plan) -> None:
    """The latest go first, for those before them; nobody is admitted in such a step."""
    assert not (plan.preemptions and plan.admissions)
    running = [seq for seq in scheduler.live.values() if seq.stage in (Stage.DECODE, Stage.PREFILL)]
    for preemption in plan.preemptions:
        victim = max(running, key=lambda seq: seq.rank)
        assert preemption.number == victim.number, "the victim is the least urgent, the latest among equals"
        assert preemption.lost == scheduler.computed(victim)
        running.remove(victim)
        cause = scheduler.live[preemption.reason.numbers[0]]
        if preemption.reason.why is Why.MORE_URGENT:
            assert scheduler.config.priority_preempts
            assert cause.request.priority < victim.request.priority
        else:
            assert preemption.reason.why is Why.OUT_OF_BLOCKS
            assert cause.stage in (Stage.DECODE, Stage.PREFILL), "who waits takes blocks from nobody"
            assert cause.rank <= victim.rank


def _check_admissions(scheduler: Scheduler, plan: Plan) -> None:
    """In the queue's order. Who is passed waits for a prefix, and is passed by few of its priority."""
    admitted = {admission.number for admission in plan.admissions}
    why = {waiting.number: waiting.reason.why for waiting in plan.not_admitted}
    for number in admitted:
        seq = scheduler.live[number]
        queue = list(scheduler.waiting)
        for earlier in queue[: queue.index(seq)]:
            if earlier.number not in admitted:
                assert why[earlier.number] is Why.SHARES_PREFIX
                assert _few_pass(seq, earlier)


def _few_pass(later: Sequence, earlier: Sequence) -> bool:
    return later.request.priority != earlier.request.priority or later.number - earlier.number <= MOST_PASSES
