"""What scheduling promises, in numbers: budgets, gaps between tokens, progress of prompts, order, passing."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checked_executor import CheckedExecutor
from support.scheduling import MS, Session, config, text

from twostep.core.kv_cache import BlockGroup
from twostep.core.policies import (
    MOST_PASSES,
    ChunkPolicy,
    Order,
    ShortestPrefill,
    TimeBudget,
    TokenBudget,
    Unchunked,
    by_priority,
    fcfs,
)
from twostep.core.reasons import Why
from twostep.core.scheduler import SchedulerConfig

CONTEXT_TOKENS = 700
ORDERS: list[Order] = [fcfs, by_priority, ShortestPrefill(CONTEXT_TOKENS)]
CUTTING: list[ChunkPolicy] = [TokenBudget(8), TokenBudget(64), TimeBudget(40 * MS)]
few_examples = settings(max_examples=25, deadline=None, derandomize=True)

asked = st.lists(
    st.tuples(
        st.sampled_from([1, 15, 40, 200, 600]),  # tokens of the prompt
        st.sampled_from([1, 10, 60]),  # tokens of the answer
        st.integers(0, 2000),  # ms of arrival
        st.sampled_from([0, 0, 1]),  # priority
        st.integers(0, 3),  # which text
    ),
    min_size=1,
    max_size=30,
)
Asked = list[tuple[int, int, int, int, int]]


def served(config: SchedulerConfig, requests: Asked) -> Session:
    """Each plan is held against the rules (budgets among them), each answer against that of the request alone."""
    session = Session(config)
    for prompt_tokens, max_tokens, at_ms, priority, which in requests:
        session.ask(text(prompt_tokens, which), max_tokens, at_ns=at_ms * MS, priority=priority)
    session.run()
    session.check_answers()
    return session


def steps_of(session: Session) -> Iterator[tuple[int, dict[int, int]]]:
    """For each step its number and how many tokens of each sequence it computes."""
    standing: set[int] = set()
    for step in session.steps:
        standing = (standing - set(step.left)) | {number for number, _ in step.joined}
        yield step.plan.step, dict.fromkeys(standing, 1) | {chunk.number: chunk.tokens for chunk in step.plan.chunks}


@few_examples
@given(requests=asked, chunking=st.sampled_from([*CUTTING, Unchunked(300)]), order=st.sampled_from(ORDERS))
def test_a_stream_gets_a_token_in_every_step_until_it_ends(
    requests: Asked, chunking: ChunkPolicy, order: Order
) -> None:
    """More than asked: every second step would do. With room for all, so that nobody is preempted."""
    session = served(config(max_model_len=CONTEXT_TOKENS, chunking=chunking, order=order, blocks=2000), requests)
    computed_in = defaultdict(list)
    sampled_from: dict[int, int] = {}
    for step, tokens in steps_of(session):
        for number in tokens:
            computed_in[number].append(step)
    for plan in (step.plan for step in session.steps):
        sampled_from |= {chunk.number: plan.step for chunk in plan.chunks if chunk.samples}
    for number, first in sampled_from.items():
        life = session.lives[number]
        after = [step for step in computed_in[number] if step >= first]
        assert after == list(range(first, first + life.request.max_tokens))


@few_examples
@given(requests=asked, chunking=st.sampled_from(CUTTING), order=st.sampled_from(ORDERS))
def test_a_prompt_in_prefill_advances_at_least_every_fourth_step(
    requests: Asked, chunking: ChunkPolicy, order: Order
) -> None:
    """By 16 tokens, or by all that it lacks, however little budget there is."""
    session = served(config(max_model_len=CONTEXT_TOKENS, chunking=chunking, order=order, blocks=2000), requests)
    assert longest_wait_of_prompts(session) <= 4


@pytest.mark.parametrize("at_ms", [900, 950, 1000, 1050, 1100, 1150])
def test_it_does_so_also_when_half_of_those_in_turn_leave(at_ms: int) -> None:
    """With fewer prompts, fewer have their turn in a step; those that wait for theirs already must not wait longer."""
    session = Session(config(chunking=TokenBudget(8)))
    names = [session.ask(text(600, i), 1) for i in range(8)]
    for name in names[4:]:
        session.abort(name, at_ms * MS)
    session.run()
    assert longest_wait_of_prompts(session) == 4


def longest_wait_of_prompts(session: Session) -> int:
    """Most steps from one chunk of 16 tokens, or all that was left, of a prompt to its next."""
    chunks = defaultdict(list)
    for step in session.steps:
        for chunk in step.plan.chunks:
            if chunk.tokens >= 16 or chunk.samples:
                chunks[chunk.number].append(step.plan.step)
    assert chunks.keys() == session.lives.keys()
    return max((after - before for steps in chunks.values() for before, after in pairwise(steps)), default=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", [60, 2000])
def test_no_more_than_64_later_ones_of_its_priority_pass_a_request(order: Order, blocks: int) -> None:
    """One waits for a prefix that a long prompt computes at the least pace; short ones stream in behind it."""
    chunking = TokenBudget(64)
    settings = config(blocks=blocks, chunking=chunking, max_model_len=CONTEXT_TOKENS, order=order, max_num_seqs=48)
    session = Session(settings)
    long = text(690)
    session.ask(long, 2)
    waiting = session.ask([*long[:680], 9, 9], 2, at_ns=30 * MS)
    for i in range(400):
        session.ask(text(1 + i % 4, 5 + i), 2, at_ns=(40 + 2 * i) * MS)
    session.run()
    admitted = [admission.number for step in session.steps for admission in step.plan.admissions]
    assert session.preemptions == [] or blocks == 60
    for place, number in enumerate(admitted):
        assert sum(earlier > number for earlier in set(admitted[:place])) <= MOST_PASSES
    [number] = [n for n, life in session.lives.items() if life.request.id == waiting]
    if blocks == 2000:
        passing = [later for later in admitted[: admitted.index(number)] if later > number]
        assert len(passing) == MOST_PASSES, "as many as may"


def test_shortest_prefill_ages_so_that_short_ones_pass_a_long_one_but_not_for_ever() -> None:
    session = Session(config(order=ShortestPrefill(CONTEXT_TOKENS), max_num_seqs=1, max_model_len=CONTEXT_TOKENS))
    session.ask(text(10), 20)
    long = session.ask(text(690, 1), 1)
    for i in range(200):
        session.ask(text(3, i), 1)
    session.run()
    admitted = [admission.number for step in session.steps for admission in step.plan.admissions]
    [number] = [n for n, life in session.lives.items() if life.request.id == long]
    assert 32 <= admitted.index(number) <= MOST_PASSES + 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("chunking", [*CUTTING, Unchunked(200)])
def test_equals_get_their_first_tokens_in_the_order_of_arrival(order: Order, chunking: ChunkPolicy) -> None:
    session = Session(config(order=order, chunking=chunking, max_num_seqs=4, max_model_len=CONTEXT_TOKENS))
    names = [session.ask(text(150, i), 3, at_ns=i * MS) for i in range(20)]
    session.run()
    first_tokens = [session.life(name).token_ns[0] for name in names]
    assert first_tokens == sorted(first_tokens)


@few_examples
@given(requests=asked, chunking=st.sampled_from(CUTTING), blocks=st.integers(45, 70))
def test_the_earliest_of_the_most_urgent_is_never_preempted(
    requests: Asked, chunking: ChunkPolicy, blocks: int
) -> None:
    """So there is always one that ends, then another: no livelock."""
    settings = config(max_model_len=CONTEXT_TOKENS, chunking=chunking, blocks=blocks, max_num_batched_tokens=300)
    session = served(settings, requests)
    first = min(session.lives, key=lambda number: (session.lives[number].request.priority, number))
    assert first not in {preemption.number for preemption in session.preemptions}


def test_priority_does_not_preempt_unless_allowed() -> None:
    """The urgent one waits for a seat; where the policy allows it, it takes that of the latest less urgent one."""
    preempted = {}
    ttft_ns = {}
    for allowed in (False, True):
        session = Session(config(max_num_seqs=2, priority_preempts=allowed))
        for i in range(2):
            session.ask(text(40, i), 200, priority=1)
        urgent = session.ask(text(40, 7), 5, at_ns=200 * MS)
        session.run()
        session.check_answers()
        preempted[allowed] = [(p.number, p.reason.why) for p in session.preemptions]
        ttft_ns[allowed] = session.life(urgent).ttft_ns
    assert not config().priority_preempts
    assert preempted == {False: [], True: [(2, Why.MORE_URGENT)]}
    assert ttft_ns[True] < ttft_ns[False] / 5


def test_an_urgent_one_that_waits_for_a_prefix_takes_no_seat_again_and_again() -> None:
    session = Session(config(max_num_seqs=2, chunking=TokenBudget(32), priority_preempts=True))
    long = text(800)
    session.ask(long, 5, priority=1)
    session.ask(text(30, 5), 200, priority=1)
    session.ask([*long[:700], 1], 5, at_ns=100 * MS)
    session.run()
    session.check_answers()
    assert len(session.preemptions) == 1


def test_an_urgent_one_takes_no_more_blocks_than_it_needs() -> None:
    """Making way for it is no sign that blocks are scarce: the reserve for those that run stays as it was."""
    session = Session(config(blocks=100, priority_preempts=True))
    for i in range(12):
        session.ask(text(100, i), 28, priority=1)
    session.ask(text(300, 77), 5, at_ns=1300 * MS)
    session.run()
    assert [p.reason.why for p in session.preemptions] == [Why.MORE_URGENT] * len(session.preemptions)
    assert 1 <= len(session.preemptions) <= 3


def test_drafts_never_exceed_the_steps_tokens_nor_starve_prompts() -> None:
    settings = config(blocks=200, max_num_seqs=8, max_num_batched_tokens=8 + 256, chunking=TokenBudget(64))
    executor = CheckedExecutor(settings.groups, stops=False, drafts=lambda number, known: 400)
    session = Session(settings, executor)
    for i in range(2):
        session.ask(text(20, i), 300)
    for i in range(2, 8):
        session.ask(text(300, i), 20, at_ns=50 * MS)
    session.run()
    session.check_answers()
    accepted = [chunk.drafts for step in session.steps for chunk in step.plan.chunks if chunk.drafts]
    assert max(accepted) <= 8


def test_a_found_prefix_needs_no_more_of_a_windowed_group_than_a_miss() -> None:
    """The smallest group that admits the request at all serves it also where most of its prompt is found."""
    step_tokens, window = 1 + 256, 40
    smallest = -(-(window + step_tokens + 16) // 16)
    groups = (BlockGroup(200), BlockGroup(smallest, window))
    chunking = TokenBudget(64)
    session = Session(config(groups=groups, max_num_seqs=1, max_num_batched_tokens=step_tokens, chunking=chunking))
    session.ask(text(330), 2)
    session.ask([*text(330), *text(700, 3)], 2, at_ns=1000 * MS)
    session.run()
    session.check_answers()
    assert session.scheduler.counters.prefix_hit_tokens == 320


def test_kv_that_arrives_takes_of_a_windowed_group_only_what_is_still_seen() -> None:
    step_tokens, window = 1 + 256, 40
    groups = (BlockGroup(200), BlockGroup(-(-(window + step_tokens + 16) // 16), window))
    chunking = TokenBudget(64)
    session = Session(config(groups=groups, max_num_seqs=1, max_num_batched_tokens=step_tokens, chunking=chunking))
    request = session.ask(text(1000), 20, arrived_tokens=900)
    session.run()
    session.check_answers()
    assert sum(tokens for _, computed in steps_of(session) for tokens in computed.values()) == 100 + 19
    assert session.life(request).finished is not None
