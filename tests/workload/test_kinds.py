"""Traffic that is made up: its statistics are those that were asked for, and the same seed gives the same."""

from itertools import islice, pairwise
from math import sqrt
from random import Random
from statistics import fmean, median, pstdev
from typing import Any

import pytest

from twostep.errors import InvalidParameterError
from twostep.workload.arrivals import Arrivals, AtOnce, Ramp, Renewal
from twostep.workload.definition import Workload, WorkloadRequest, arrival_cv, mean_rate, starts_s
from twostep.workload.kinds import KINDS, Batch, Chat, Fixed, Rag, make_workload

MANY = 20_000


def gaps(arrivals: Arrivals, count: int = MANY) -> list[float]:
    times = [0.0, *islice(arrivals.times(Random(1)), count)]
    return [after - before for before, after in pairwise(times)]


# --- arrivals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(cv: float) -> None:
    """Within four standard errors: of the mean cv / sqrt(n); of the cv of a gamma distribution (kurtosis 3 + 6 cv²,
    skewness 2 cv), by the delta method, cv sqrt((1 + cv²) / (2 n)), doubled for heavy tails."""
    drawn = gaps(Renewal(rate=8.0, cv=cv))
    assert fmean(drawn) * 8 == pytest.approx(1, abs=4 * cv / sqrt(MANY))
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(cv, rel=8 * sqrt((1 + cv**2) / (2 * MANY)))


def test_poisson_arrivals_are_independent_of_those_before() -> None:
    """Counts in windows have a variance equal to their mean."""
    times = list(islice(Renewal(rate=10.0).times(Random(2)), MANY))
    counts = [0] * (int(times[-1]) + 1)
    for time_s in times:
        counts[int(time_s)] += 1
    assert pstdev(counts[:-1]) ** 2 == pytest.approx(fmean(counts[:-1]), rel=0.15)


def test_evenly_spaced() -> None:
    assert list(islice(Renewal(rate=4.0, cv=0.0).times(Random(1)), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("first", "last"), [(2.0, 20.0), (20.0, 2.0), (7.0, 7.0), (1e6, 1e-6)])
def test_a_ramp_has_the_rates_that_were_asked_for(first: float, last: float) -> None:
    """With rate a + (b - a) t / T, of the arrivals until T the first half of the time has (3 a + b) / (4 (a + b))."""
    ramp = Ramp(first, last, MANY)
    times = list(islice(ramp.times(Random(3)), MANY))
    assert all(before <= after for before, after in pairwise(times))
    early = sum(time_s < ramp.ramp_s / 2 for time_s in times)
    assert early / MANY == pytest.approx((3 * first + last) / (4 * (first + last)), abs=4 / sqrt(MANY))


def test_after_a_ramp_the_rate_stays() -> None:
    ramp = Ramp(1.0, 50.0, 1000)
    late = [time_s for time_s in islice(ramp.times(Random(4)), MANY) if time_s > ramp.ramp_s]
    assert len(late) / (late[-1] - ramp.ramp_s) == pytest.approx(50, rel=4 / sqrt(len(late)))


def test_all_at_once() -> None:
    assert list(islice(AtOnce().times(Random(1)), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arrivals", "told"),
    [
        (lambda: Renewal(0.0), "rate is 0; it must be from 1e-06 to 1e+06"),
        (lambda: Renewal(float("nan")), "rate is nan; it must be from 1e-06 to 1e+06"),
        (lambda: Renewal(1.0, -1.0), "cv is -1; it must be from 0 to 100"),
        (lambda: Ramp(1.0, 0.0, 5), "last_rate is 0; it must be from 1e-06 to 1e+06"),
        (lambda: Ramp(1.0, 2.0, 0), "requests is 0; it must be from 1 to 1e+09"),
    ],
)
def test_arrivals_that_are_none(arrivals: Any, told: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        arrivals()
    assert str(caught.value) == told


# --- kinds --------------------------------------------------------------------------------------------------------


def rules(workload: Workload) -> None:
    """What every workload holds to."""
    last_s = 0.0
    for number, request in enumerate(workload.requests):
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1
        assert request.input_tokens + request.output_tokens <= 4096
        assert len(request.blocks) <= -(-request.input_tokens // workload.block_tokens)
        if request.after is None:
            assert request.arrival_s >= last_s
            last_s = request.arrival_s
        else:
            assert 0 <= request.after < number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrivals", [Renewal(3.0), AtOnce()], ids=["Poisson", "at once"])
def test_same_seed_same_workload(kind: str, arrivals: Arrivals) -> None:
    first, same, other = (make_workload(KINDS[kind](), arrivals, 300, seed) for seed in (1, 1, 2))
    rules(first)
    assert first == same
    assert first.name == kind
    assert len(first.requests) == 300
    assert first.requests != other.requests or kind == "fixed"


@pytest.mark.parametrize("kind", KINDS)
def test_another_rate_has_the_same_requests(kind: str) -> None:
    slow, fast = (make_workload(KINDS[kind](), Renewal(rate), 200, 5) for rate in (1.0, 2.0))

    def prompts(workload: Workload) -> list[tuple[int, int]]:
        return sorted((request.input_tokens, request.output_tokens) for request in workload.requests)

    assert kind == "chat" or prompts(slow) == prompts(fast)
    assert starts_s(fast)[0] == pytest.approx(starts_s(slow)[0] / 2, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_that_of_requests(kind: str) -> None:
    workload = make_workload(KINDS[kind](), Renewal(2.0, 1.0), 6000, 1)
    assert mean_rate(workload) == pytest.approx(2, rel=0.12)
    assert arrival_cv(workload) == pytest.approx(1, abs=0.1)


def test_a_conversation_grows_by_its_answers() -> None:
    workload = make_workload(Chat(turns=5), Renewal(2.0), 2000, 1)
    system = 256 // 16
    for request in workload.requests:
        assert request.blocks[:system] == tuple(range(system))
        assert len(request.blocks) == -(-request.input_tokens // 16)
        if request.after is not None:
            before = workload.requests[request.after]
            assert request.input_tokens > before.input_tokens + before.output_tokens
            assert request.blocks[: len(before.blocks)] == before.blocks


def test_conversations_share_nothing_but_the_system_prompt() -> None:
    workload = make_workload(Chat(turns=3), Renewal(2.0), 500, 1)
    owners: dict[int, int] = {}
    roots: list[int] = []
    for number, request in enumerate(workload.requests):
        roots.append(number if request.after is None else roots[request.after])
        assert {owners.setdefault(block, roots[-1]) for block in request.blocks[16:]} <= {roots[-1]}


def test_conversations_have_so_many_turns_in_the_mean() -> None:
    workload = make_workload(Chat(turns=3.0, think_s=0.0), Renewal(2.0), 6000, 1)
    starts = sum(request.after is None for request in workload.requests)
    assert 6000 / starts == pytest.approx(3, rel=4 * sqrt(2 / 3) / sqrt(starts))


def test_users_think_so_long_in_the_mean() -> None:
    workload = make_workload(Chat(think_s=7.0), Renewal(2.0), 6000, 1)
    thought = [request.arrival_s for request in workload.requests if request.after is not None]
    assert fmean(thought) == pytest.approx(7, rel=0.08)


def test_a_conversation_ends_where_the_context_does() -> None:
    rules(make_workload(Chat(turns=200.0), Renewal(1.0), 500, 1))


def test_what_a_cache_can_find_of_conversations() -> None:
    """Of a follower's prompt all of the prompt before; of a first turn's the system prompt."""
    workload = make_workload(Chat(turns=4), Renewal(2.0), 400, 3)
    shared = list(workload.shared_tokens())
    for request, tokens in zip(workload.requests[1:], shared[1:], strict=True):
        before = 256 if request.after is None else workload.requests[request.after].input_tokens
        assert tokens == before


def test_popular_documents_come_as_often_as_zipf_says() -> None:
    workload = make_workload(Rag(documents=10, zipf=1.0), AtOnce(), 20_000, 1)
    counts: dict[tuple[int, ...], int] = {}
    for request in workload.requests:
        counts[request.blocks] = counts.get(request.blocks, 0) + 1
    harmonic = sum(1 / rank for rank in range(1, 11))
    shares = sorted((count / 20_000 for count in counts.values()), reverse=True)
    assert shares == pytest.approx([1 / rank / harmonic for rank in range(1, 11)], abs=4 * 0.5 / sqrt(20_000))


def test_documents_share_the_instruction_alone() -> None:
    workload = make_workload(Rag(documents=20), AtOnce(), 300, 1)
    documents = {request.blocks for request in workload.requests}
    assert len(documents) > 10
    assert {blocks[:4] for blocks in documents} == {(0, 1, 2, 3)}
    own = [block for blocks in documents for block in blocks[4:]]
    assert len(own) == len(set(own))


def test_medians_are_those_that_were_asked_for() -> None:
    workload = make_workload(Batch(input_tokens=200, answer_tokens=50), AtOnce(), 5000, 1)
    assert median(request.input_tokens for request in workload.requests) == pytest.approx(200, rel=0.05)
    assert median(request.output_tokens for request in workload.requests) == pytest.approx(50, rel=0.05)
    assert set(workload.shared_tokens()) == {0}


def test_fixed_lengths_and_spans() -> None:
    workload = make_workload(Fixed(input_tokens=(7, 7), output_tokens=(2, 5)), AtOnce(), 400, 1)
    assert {request.input_tokens for request in workload.requests} == {7}
    assert {request.output_tokens for request in workload.requests} == {2, 3, 4, 5}


def test_the_source_says_how_it_was_made() -> None:
    source = make_workload(Chat(turns=6), Renewal(0.5), 10, 7).source
    assert "Chat(turns=6, " in source
    assert "Renewal(rate=0.5, cv=1.0), 10 requests, seed 7" in source


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (lambda: Chat(turns=0.5), "turns is 0.5; it must be from 1 to 1000"),
        (lambda: Chat(think_s=-1), "think_s is -1; it must be from 0 to 1e+06"),
        (lambda: Chat(user_tokens=0), "user_tokens is 0; it must be from 1 to 4096"),
        (lambda: Chat(context_tokens=1000),
         "context_tokens is 1000; it must be at least 1296: 256 before, "
         "and 8 times user_tokens 40 and answer_tokens 90"),
        (lambda: Rag(documents=0), "documents is 0; it must be from 1 to 1e+06"),
        (lambda: Rag(document_tokens=4000),
         "context_tokens is 4096; it must be at least 4704: 4064 before, "
         "and 8 times question_tokens 30 and answer_tokens 50"),
        (lambda: Batch(input_tokens=500),
         "context_tokens is 4096; it must be at least 4800: 0 before, "
         "and 8 times input_tokens 500 and answer_tokens 100"),
        (lambda: Fixed(input_tokens=(9, 8)), "input_tokens is 9-8; the smaller number must come first"),
        (lambda: make_workload(Batch(), AtOnce(), 0), "requests is 0; it must be from 1 to 1e+06"),
    ],
)  # fmt: skip
def test_kinds_that_cannot_be(kind: Any, told: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        kind()
    assert str(caught.value) == told


# --- rates --------------------------------------------------------------------------------------------------------


def arriving(*times: float, after: int = 0) -> Workload:
    starts = [WorkloadRequest(time_s, 1, 1) for time_s in times]
    return Workload([*starts, *[WorkloadRequest(9.0, 1, 1, after=0)] * after])


def test_rates_by_hand() -> None:
    """Three starts in 4 s are two gaps, of 1 and 3 s: 0.5 a second, cv 0.5; with three that follow, 1 a second."""
    assert mean_rate(arriving(10, 11, 14)) == 0.5
    assert mean_rate(arriving(10, 11, 14, after=3)) == 1.0
    assert arrival_cv(arriving(10, 11, 14)) == 0.5


@pytest.mark.parametrize("workload", [arriving(), arriving(3), arriving(3, 3, 3)])
def test_rates_that_cannot_be_told(workload: Workload) -> None:
    assert mean_rate(workload) is None
    assert arrival_cv(workload) is None
