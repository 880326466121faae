"""What users of other servers suffered from, as far as scheduling decides it, on a modelled clock."""

from itertools import pairwise

import pytest
from support.checked_executor import CheckedExecutor, step_ns_of
from support.scheduling import MS, ROOT, Session, config, text

from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.cost import StepShape
from twostep.core.policies import ChunkPolicy, Static, TimeBudget, TokenBudget, Unchunked
from twostep.core.reasons import Why
from twostep.core.request import FinishReason, Request
from twostep.core.scheduler import NeverFitsError, Scheduler

ITL_NS = 60 * MS
LEAST_STEP_NS = step_ns_of(StepShape().with_slice(0, 16, 1))


def computed_tokens(session: Session, number: int) -> int:
    return sum(chunk.tokens for step in session.steps for chunk in step.plan.chunks if chunk.number == number)


# --- time to first token, stalls ----------------------------------------------------------------------------------


def test_a_long_prompt_stretches_no_gap_beyond_the_budget_and_a_least_step() -> None:
    """CASES 1. Unchunked, the same arrival freezes the streams for a second and a half."""
    longest = {}
    for name, chunking in {"time": TimeBudget(ITL_NS), "none": Unchunked(4096)}.items():
        session = Session(config(chunking=chunking))
        streams = [session.ask(text(30, i), 200) for i in range(4)]
        newcomer = session.ask(text(2048, 9), 4, at_ns=500 * MS)
        session.run()
        longest[name] = max(gap for stream in streams for gap in session.life(stream).itl_ns)
        assert all(session.life(stream).token_ns[-1] > session.life(newcomer).token_ns[0] for stream in streams)
    assert longest["time"] <= ITL_NS + LEAST_STEP_NS
    assert longest["none"] > 1500 * MS


@pytest.mark.parametrize("chunking", [TokenBudget(64), TimeBudget(ITL_NS), Unchunked(512)])
def test_a_stream_of_prompts_starves_no_decode_and_streams_starve_no_prompt(chunking: ChunkPolicy) -> None:
    """CASES 2."""
    session = Session(config(chunking=chunking, max_num_seqs=12))
    stream = session.ask(text(20), 400)
    prompts = [session.ask(text(400, i + 1), 2, at_ns=i * 100 * MS) for i in range(40)]
    session.run()
    life = session.life(stream)
    first = next(i for i, step in enumerate(session.steps) if step.joined)
    ends = [step for step in session.steps[first:] if step.plan.decoding or step.plan.chunks]
    assert len(life.token_ns) == 400
    assert len(ends) >= 399
    widest = max(step_ns_of(step.plan.shape) for step in session.steps)
    assert max(life.itl_ns) <= widest, "a stream gets a token from every step"
    assert all(session.life(prompt).finished for prompt in prompts)


@pytest.mark.parametrize("chunking", [TokenBudget(128), TimeBudget(ITL_NS)])
def test_a_short_request_does_not_wait_for_the_rest_of_a_huge_one(chunking: ChunkPolicy) -> None:
    """CASES 3."""
    session = Session(config(chunking=chunking, max_model_len=131_072, blocks=9000))
    huge = session.ask(text(16_000), 1)
    short = session.ask(text(30, 1), 1, at_ns=300 * MS)
    session.run()
    own_ns = step_ns_of(StepShape().with_slice(0, 30, 1))
    ceiling_ns = 250 * MS
    assert session.life(short).ttft_ns <= own_ns + 2 * ceiling_ns
    assert session.life(huge).ttft_ns > 10_000 * MS
    assert computed_tokens(session, 1) == 16_000


@pytest.mark.parametrize("chunking", [TokenBudget(64), TimeBudget(30 * MS)])
def test_a_short_request_does_not_wait_even_where_decodes_alone_exceed_the_budget(chunking: ChunkPolicy) -> None:
    """CASES 3: the first that may join has its first share at least every fourth step. The forty decode by then."""
    session = Session(config(chunking=chunking, max_num_seqs=64, blocks=2000))
    for i in range(40):
        session.ask(text(10, i), 200)
    session.ask(text(2500, 50), 1, at_ns=2200 * MS)
    short = session.ask(text(10, 51), 1, at_ns=3000 * MS)
    session.run()
    step_ns = max(step_ns_of(step.plan.shape) for step in session.steps if step.plan.decoding >= 40)
    assert session.life(short).ttft_ns <= 6 * step_ns


def test_of_several_prompts_the_nearest_to_its_first_token_is_finished_first() -> None:
    """CASES 4: and its token leaves at once, not with that of the last one. One newcomer joins a step."""
    session = Session(config(chunking=TokenBudget(128)))
    names = [session.ask(text(tokens, tokens), 1) for tokens in (900, 500, 300, 120)]
    session.run()
    times = [session.life(name).token_ns[0] for name in names]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)
    assert times[-1] == sum(step_ns_of(step.plan.shape) for step in session.steps[:5])


def test_with_nobody_decoding_a_prompt_is_as_wide_as_the_longest_step() -> None:
    """CASES 5: 2048 tokens in steps of just under 250 ms instead of the 60 ms of the budget."""
    session = Session(config(chunking=TimeBudget(ITL_NS)))
    session.ask(text(2048), 4)
    session.run()
    prefill = [step for step in session.steps if step.plan.chunks]
    wide_ns = [step_ns_of(step.plan.shape) for step in prefill[:-1]]
    assert all(215 * MS < ns <= 250 * MS for ns in wide_ns)
    assert {step.plan.chunks[0].reason.why for step in prefill[:-1]} == {Why.LONGEST_STEP}
    assert prefill[0].plan.chunks[0].reason.words() == "steps of at most 250.0 ms, predicted 248.5 ms"


def test_chunking_for_a_batch_costs_little_over_whole_prompts() -> None:
    """CASES 6: TokenBudget(512), the `batch` preset, against prompts never cut."""
    total_ns = {}
    for budget, chunking in {512: TokenBudget(512), 4096: Unchunked(4096)}.items():
        session = Session(config(chunking=chunking, blocks=3000))
        for i in range(60):
            session.ask(text(32 + (i * 53) % 480, i), 16 + (i * 37) % 240)
        session.run()
        total_ns[budget] = session.clock_ns
    assert total_ns[512] <= 1.05 * total_ns[4096]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 4096])
def test_answers_do_not_depend_on_the_width_of_chunks(chunk: int) -> None:
    """CASES 7. The executor checks the KV that each token sees; chunks of one and seven are least shares here."""
    chunking = TokenBudget(chunk, least_tokens=min(16, chunk))
    session = Session(config(chunking=chunking))
    for i, tokens in enumerate((5, 33, 100, 200)):
        session.ask(text(tokens, i), 8)
    session.run()
    session.check_answers()
    if chunk < 16:
        assert max(c.tokens for step in session.steps for c in step.plan.chunks) == chunk


def test_doubling_a_prompt_lengthens_its_prefill() -> None:
    """CASES 7."""
    ttft_ns = []
    for tokens in (250, 500, 1000, 2000):
        session = Session(config(chunking=TokenBudget(128)))
        name = session.ask(text(tokens), 1)
        session.run()
        ttft_ns.append(session.life(name).ttft_ns)
    assert all(twice > 1.9 * once for once, twice in pairwise(ttft_ns))


def test_an_unfinished_prefill_samples_nothing_and_does_not_decode() -> None:
    """CASES 8. Each plan is also held to it by the rules: it samples just when all known tokens are computed."""
    session = Session(config(chunking=TokenBudget(64)))
    session.ask(text(500), 5)
    while not session.steps or not session.steps[-1].plan.chunks[0].samples:
        session.turn()
        assert len(session.scheduler.decode_batch) == int(session.steps[-1].plan.chunks[0].samples)
        assert len(session.lives[1].token_ns) == int(session.steps[-1].plan.chunks[0].samples)
    assert len(session.steps) == 8


def test_a_step_has_no_more_tokens_than_the_workspace_whatever_the_context() -> None:
    """CASES 9."""
    chunking = TokenBudget(4096)
    session = Session(config(max_num_batched_tokens=272, max_model_len=100_000, blocks=9000, chunking=chunking))
    session.ask(text(20_000), 2)
    session.run()
    assert max(step.plan.shape.tokens for step in session.steps) == 272


# --- prefix cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "again"), [(96, 16), (97, 1), (95, 15), (16, 16), (17, 1), (1, 1)])
def test_a_full_hit_gives_the_same_tokens_and_computes_only_the_last_blocks_rest(tokens: int, again: int) -> None:
    """CASES 11: at most the (N-1)/16 first blocks are taken from the cache, so that the last token is computed."""
    session = Session(config())
    first = session.ask(text(tokens), 10)
    second = session.ask(text(tokens), 10, at_ns=1000 * MS)
    session.run()
    session.check_answers()
    assert session.answer(first) == session.answer(second)
    assert (computed_tokens(session, 1), computed_tokens(session, 2)) == (tokens, again)


def test_a_hit_goes_on_into_the_answer_of_before() -> None:
    """CASES 11: the second turn of a chat finds the first, answer included."""
    session = Session(config())
    first = session.ask(text(50), 40)
    session.run()
    talk = [*text(50), *session.answer(first), *text(30, 5)]
    session.ask(talk, 10, at_ns=session.clock_ns)
    session.run()
    session.check_answers()
    assert computed_tokens(session, 2) == len(talk) - (50 + 40 - 1) // 16 * 16


def test_caches_built_with_different_chunks_agree() -> None:
    """CASES 12: names of blocks do not tell how wide the chunks were; what the cache holds is the same."""
    named = []
    for chunk in (16, 48, 100, 4096):
        session = Session(config(chunking=TokenBudget(chunk)))
        for i in range(3):
            session.ask([*text(100), *text(60, i)], 20)
        session.run()
        named.append(set(session.scheduler.cache.pools[0]._named))
    assert all(names == named[0] for names in named)
    assert len(named[0]) == 6 + 3 * 5


def test_a_salt_keeps_tenants_apart() -> None:
    """CASES 12."""
    session = Session(config())
    session.ask(text(100), 2)
    session.ask(text(100), 2, at_ns=1000 * MS, root=root_hash("checked", "test", salt="another tenant"))
    session.run()
    assert session.scheduler.counters.prefix_hit_tokens == 0
    assert computed_tokens(session, 2) == 100


def test_what_an_aborted_request_has_computed_is_found_by_its_retry() -> None:
    """CASES 13: in mid-prefill, while a step of it is under way."""
    session = Session(config(chunking=TokenBudget(64)))
    gone = session.ask(text(600), 5)
    session.abort(gone, at_ns=400 * MS)
    session.ask(text(600), 5, at_ns=500 * MS)
    session.run()
    session.check_answers()
    before = sum(chunk.tokens for step in session.steps for chunk in step.plan.chunks if chunk.number == 1)
    assert 300 < before < 600
    assert computed_tokens(session, 2) == 600 - (before - 64)


def test_who_shares_a_prefix_that_is_being_computed_waits_for_it() -> None:
    """Ten at once with 500 tokens in common compute them once."""
    session = Session(config(chunking=TokenBudget(64)))
    for i in range(10):
        session.ask([*text(512), *text(20, i)], 3)
    session.run()
    session.check_answers()
    total = sum(chunk.tokens for step in session.steps for chunk in step.plan.chunks)
    assert total == 512 + 10 * 20
    assert any(held.reason.why is Why.SHARES_PREFIX for step in session.steps for held in step.plan.not_admitted)


def test_the_hit_rate_does_not_decay() -> None:
    """CASES 15: thousands of requests over eight prefixes that fit, among strangers that push old blocks out."""
    session = Session(config(blocks=160, max_num_seqs=4))
    rates = []
    for part in range(6):
        before = session.scheduler.counters.prefix_hit_tokens
        for i in range(400):
            prefix = text(64, i % 8)
            session.ask([*prefix, *text(6, part * 400 + i)], 1, at_ns=session.clock_ns)
            if i % 10 == 0:
                gone = session.ask(text(50, 1000 + part * 400 + i), 3, at_ns=session.clock_ns)
                session.abort(gone, session.clock_ns + 50 * MS)
        session.run()
        rates.append((session.scheduler.counters.prefix_hit_tokens - before) / (400 * 64))
    assert min(rates[1:]) >= 0.95
    assert session.scheduler.counters.prefix_queried_tokens >= 2400 * 70


# --- KV memory, preemption ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "prompt_tokens", "max_tokens", "message"),
    [
        ({}, 4000, 97, "prompt of 4000 + max_tokens of 97 = 4097 tokens; the context has 4096"),
        (
            {"blocks": 10},
            100,
            62,
            "prompt of 100 + max_tokens of 62 = 162 tokens need 11 KV blocks; the whole cache has 10",
        ),
        (
            {"chunking": Unchunked(100), "max_num_batched_tokens": 300},
            200,
            101,
            "prompt of 200 + max_tokens of 101 = 301 tokens; prompts are not cut, and a step has 300",
        ),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once_with_the_arithmetic(
    changes: dict[str, object], prompt_tokens: int, max_tokens: int, message: str
) -> None:
    """CASES 16; one token less fits, and is served. The last token of an answer needs no KV."""
    with pytest.raises(NeverFitsError) as error:
        Scheduler(config(**changes)).add(Request("1", prompt_tokens, max_tokens), 0)
    assert str(error.value) == message
    session = Session(config(**changes))
    refused = session.ask(text(prompt_tokens), max_tokens)
    served = session.ask(text(prompt_tokens, 1), max_tokens - 1)
    session.run()
    session.check_answers()
    assert session.refusals == {refused: message}
    assert session.life(served).finished is not None


@pytest.mark.parametrize("chunking", [TokenBudget(64), TimeBudget(ITL_NS), Unchunked(200)])
@pytest.mark.parametrize("blocks", [16, 24, 60])
def test_in_a_tiny_cache_all_finish_with_the_same_tokens(blocks: int, chunking: ChunkPolicy) -> None:
    """CASES 17: no livelock; the steps are bounded too."""
    session = Session(config(blocks=blocks, chunking=chunking, max_num_batched_tokens=600))
    for i in range(30):
        session.ask(text(20 + 7 * i % 90, i % 4), 100 + i, at_ns=i * 20 * MS, choices=1 + i % 2)
    session.run(most_turns=6000)
    session.check_answers()
    assert session.scheduler.counters.finished[FinishReason.LENGTH] == 45
    assert session.preemptions or blocks == 60


def test_a_preemption_storm_calms_down_and_is_counted() -> None:
    """CASES 18: the reserve widens, the latest go, their place and arrival stay, lost tokens are counted."""
    session = Session(config(blocks=40, max_num_seqs=16))
    arrivals: dict[int, int] = {}
    for i in range(40):
        session.ask(text(30, i), 150)
    while session.turn() or not session.steps:
        for seq in session.scheduler.live.values():
            assert arrivals.setdefault(seq.number, seq.arrival_ns) == seq.arrival_ns
    session.check_answers()
    counters = session.scheduler.counters
    lost = sum(preemption.lost for preemption in session.preemptions)
    assert (counters.preemptions, counters.preempted_tokens) == (len(session.preemptions), lost)
    first_tokens = [session.lives[n].token_ns[0] for n in sorted(session.lives)]
    assert first_tokens == sorted(first_tokens), "a preempted one keeps its place"
    assert 1 <= counters.preemptions < 0.7 * preemptions_without_reserve(requests=40)


def preemptions_without_reserve(requests: int) -> int:
    """The same load where admission leaves nothing to those that run, however often they run out."""

    class Reckless(Scheduler):
        def reserved_blocks(self) -> tuple[int, ...]:
            return tuple(0 for _ in self.config.groups)

    session = Session(config(blocks=40, max_num_seqs=16), scheduler=Reckless)
    for i in range(requests):
        session.ask(text(30, i), 150)
    return session.run().scheduler.counters.preemptions


def test_a_preempted_request_finds_its_blocks_again() -> None:
    """CASES 18: what it computed before is lost only as far as others took the blocks."""
    session = Session(config(blocks=40, max_num_seqs=4, watermark=0.0))
    for i in range(4):
        session.ask(text(100, i), 120)
    session.run()
    session.check_answers()
    again = [a for step in session.steps for a in step.plan.admissions if a.known > 100]
    assert session.preemptions
    assert any(admission.cached > 0 for admission in again)


def test_a_failed_step_ends_only_whom_it_blames_and_spoils_nothing() -> None:
    """CASES 20: all others compute again what the step may have spoilt, and answer as ever."""
    settings = config(chunking=TokenBudget(64))
    session = Session(settings, CheckedExecutor(settings.groups, stops=False))
    names = [session.ask(text(40 + 30 * i, i), 40, choices=1 + i % 2) for i in range(6)]
    for _ in range(6):
        session.turn()
    [blamed] = [n for n, life in session.lives.items() if (life.request.id, life.choice) == (names[2], 0)]
    session.executor.fail_step, session.executor.failing = True, {blamed}
    session.run()
    session.check_answers()
    ends = {life.finished.reason for n, life in session.lives.items() if n != blamed and life.finished}
    assert session.life(names[2]).finished == session.lives[blamed].finished
    assert session.scheduler.counters.finished[FinishReason.FAILED] == 1
    assert ends == {FinishReason.LENGTH}
    assert {p.reason.why for p in session.preemptions} == {Why.STEP_FAILED}
    assert prompt_hashes(ROOT, text(40))[0] in session.scheduler.cache.pools[0]._named


# --- leaving early ------------------------------------------------------------------------------------------------


def test_fifty_that_leave_at_any_moment_leave_no_residue() -> None:
    """CASES 21: waiting, in prefill, while they decode, between steps and while one runs."""
    session = Session(config(blocks=120, chunking=TokenBudget(64)))
    for i in range(60):
        name = session.ask(text(50 + i, i % 7), 50, at_ns=i * 30 * MS, choices=1 + i % 3)
        if i < 50:
            session.abort(name, at_ns=(i * 61 + 7 * i * i % 500) * MS)
    session.run()
    session.check_answers()
    assert session.scheduler.cache.free == (120,)
    assert session.scheduler.counters.finished[FinishReason.ABORTED] > 50


# --- batching -----------------------------------------------------------------------------------------------------


def test_a_static_batch_is_finished_whole_before_the_next_begins() -> None:
    session = Session(config(batching=Static(4), chunking=Unchunked(4096)))
    names = [session.ask(text(20, i), 5 + 30 * (i % 3)) for i in range(12)]
    session.run()
    ends = [session.life(name).token_ns[-1] for name in names]
    firsts = [session.life(name).token_ns[0] for name in names]
    assert max(ends[0:4]) < min(firsts[4:8])
    assert max(ends[4:8]) < min(firsts[8:12])


def test_a_static_batch_that_is_not_full_begins_when_patience_ends() -> None:
    """Also where the last event before was an abort while a step ran, after which nothing but time changes."""
    session = Session(config(batching=Static(3, patience_ns=100 * MS)))
    first = session.ask(text(20), 30)
    second = session.ask(text(20, 2), 3, at_ns=120 * MS)
    session.abort(first, at_ns=160 * MS)
    session.run()
    assert session.scheduler.idle
    assert 220 * MS < session.life(second).token_ns[0] < 250 * MS
