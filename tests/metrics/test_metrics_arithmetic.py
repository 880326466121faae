"""TTFT, ITL, TPOT, E2E, percentiles, goodput: of streams whose figures are worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.bench.client.outcome import Counting, Failure, FailureKind, Outcome
from twostep.bench.client.reply import ChunkArrival, token_times
from twostep.metrics.load import Limits, LoadSummary, RequestTimes, summarise_load
from twostep.metrics.summary import percentile, summarise

MS = 1_000_000


def request(asked_ms: int, *token_ms: int, ended_ms: int | None = None, failure: str | None = None) -> RequestTimes:
    """Ten tokens of prompt; ends with its last token unless said otherwise."""
    ended = ended_ms if ended_ms is not None else token_ms[-1]
    return RequestTimes(asked_ms * MS, [at * MS for at in token_ms], ended * MS, 10, failure)


def in_ms(*seconds: float) -> list[float]:
    return [round(one * 1000, 6) for one in seconds]


# --- one request --------------------------------------------------------------------------------------------------


def test_a_plain_answer() -> None:
    """Asked at 100 ms; tokens at 150, 170, 200, 260 ms."""
    times = request(100, 150, 170, 200, 260, ended_ms=300)
    assert times.ttft_s == pytest.approx(0.050)
    assert in_ms(*times.itl_s) == [20, 30, 60]
    assert times.tpot_s == pytest.approx(0.110 / 3)
    assert times.e2e_s == pytest.approx(0.160)


def test_tokens_of_one_chunk_came_together() -> None:
    """Chunks of one, three and two tokens at 50, 80 and 120 ms: six tokens, five gaps, three of them nothing."""
    times = request(0, 50, 80, 80, 80, 120, 120)
    assert in_ms(*times.itl_s) == [30, 0, 0, 40, 0]
    assert times.tpot_s == pytest.approx(0.070 / 5)


def test_the_first_tokens_coming_together_are_one_ttft() -> None:
    times = request(0, 50, 50)
    assert (times.ttft_s, times.itl_s, times.tpot_s) == (0.050, (0.0,), 0.0)


def test_one_token_has_neither_gap_nor_tpot() -> None:
    times = request(10, 60)
    assert (times.ttft_s, times.itl_s, times.tpot_s, times.e2e_s) == (0.050, (), None, 0.050)


def test_nothing_that_never_came_is_zero() -> None:
    times = request(10, ended_ms=90, failure="stalled")
    assert (times.ttft_s, times.itl_s, times.tpot_s, times.e2e_s) == (None, (), None, None)


@given(st.integers(-(10**15), 10**15))
def test_where_the_clock_begins_does_not_matter(begin_ms: int) -> None:
    """Of the clocks of two machines, or of a run that starts late, only differences count."""
    here, there = (request(0 + b, 50 + b, 80 + b, 85 + b, ended_ms=99 + b) for b in (0, begin_ms))
    assert (here.ttft_s, here.itl_s, here.tpot_s, here.e2e_s) == (there.ttft_s, there.itl_s, there.tpot_s, there.e2e_s)
    assert summarise_load([here]) == summarise_load([there])


def test_a_request_that_is_sent_late_counts_from_when_it_was_due() -> None:
    """Due at 100 ms, sent at 140 ms, first token at 150 ms: whoever waited did so for 50 ms."""
    outcome = Outcome(0, 100 * MS, 140 * MS, (150 * MS,), 151 * MS, 10, 1)
    assert outcome.times().ttft_s == pytest.approx(0.050)


def test_a_role_is_no_token() -> None:
    """The role at 20 ms brings no text, the first token comes at 50 ms: so do chunks become times of tokens."""
    role = ChunkArrival(20 * MS, characters=0)
    tokens = [ChunkArrival(at * MS, characters=4) for at in (50, 70)]
    token_ns, counted = token_times([role, *tokens], total=2)
    times = RequestTimes(0, token_ns, 80 * MS)
    assert (times.ttft_s, in_ms(*times.itl_s), counted) == (0.050, [20], Counting.STATED)


# --- a load -------------------------------------------------------------------------------------------------------


def test_a_load_by_hand() -> None:
    """Three are served within 400 ms, one of them with a single token; two fail, one after some tokens."""
    load = summarise_load(
        [
            request(0, 40, 60, 100),
            request(100, 200, ended_ms=210),
            request(150, 190, 390, ended_ms=400),
            request(20, 30, 35, ended_ms=380, failure="stalled"),
            request(50, ended_ms=50, failure="connection refused"),
        ]
    )
    assert (load.requests, load.served) == (5, 3)
    assert load.duration_s == pytest.approx(0.4)
    assert load.failures == {"stalled": 1, "connection refused": 1}
    assert load.ttft is not None
    assert in_ms(load.ttft.mean, load.ttft.p50, load.ttft.max) == [60, 40, 100]
    assert load.itl is not None
    assert (load.itl.n, in_ms(load.itl.p50, load.itl.max)) == (3, [40, 200])
    assert load.tpot is not None
    assert (load.tpot.n, in_ms(load.tpot.p50, load.tpot.max)) == (2, [115, 200])
    assert load.e2e is not None
    assert (load.e2e.n, in_ms(load.e2e.max)) == (3, [240])
    assert (load.input_tokens, load.output_tokens) == (30, 6)
    assert (load.request_rate, load.input_rate, load.output_rate) == pytest.approx((7.5, 75, 15))
    assert load.met == 3
    assert load.goodput == pytest.approx(7.5)


def test_a_load_that_all_failed_has_no_latency() -> None:
    load = summarise_load([request(0, ended_ms=100, failure="stalled")])
    assert (load.ttft, load.itl, load.tpot, load.e2e) == (None, None, None, None)
    assert (load.served, load.met, load.goodput, load.output_rate) == (0, 0, 0, 0)


def test_no_requests_are_no_load() -> None:
    with pytest.raises(ValueError, match="empty"):
        summarise_load([])


def test_failures_are_counted_the_most_frequent_first() -> None:
    failed = [request(0, ended_ms=1, failure=kind) for kind in ("a", "b", "b", "c", "b", "c")]
    assert list(summarise_load(failed).failures.items()) == [("b", 3), ("c", 2), ("a", 1)]


def goodput(requests: list[RequestTimes], **limits: float) -> int:
    load: LoadSummary = summarise_load(requests, Limits(**limits))
    return load.met


def test_goodput_asks_each_limit_of_each_request() -> None:
    """TTFT 50 and 60 ms, the longest gap 100 and 20 ms, TPOT 55 and 20 ms, E2E 160 and 80 ms; one fails at once."""
    requests = [request(0, 50, 60, 160), request(0, 60, 80), request(0, ended_ms=1, failure="stalled")]
    assert goodput(requests) == 2
    assert goodput(requests, ttft_s=0.060) == 2
    assert goodput(requests, ttft_s=0.055) == 1
    assert goodput(requests, itl_s=0.099) == 1
    assert goodput(requests, itl_s=0.100) == 2
    assert goodput(requests, tpot_s=0.054) == 1
    assert goodput(requests, e2e_s=0.079) == 0
    assert goodput(requests, ttft_s=0.055, itl_s=0.050) == 0


def test_what_is_undefined_breaks_no_limit() -> None:
    assert goodput([request(0, 50)], itl_s=0.001, tpot_s=0.001) == 1


def test_an_outcome_tells_of_the_servers_count_or_of_what_was_asked() -> None:
    failure = Failure(FailureKind.STALLED, "no byte for 60 s")
    outcome = Outcome(0, 0, 5, (10, 20), 30, asked_input_tokens=7, asked_output_tokens=2, failure=failure)
    assert outcome.times() == RequestTimes(0, (10, 20), 30, 7, "stalled")
    counted = Outcome(0, 0, 5, (10, 20), 30, asked_input_tokens=7, asked_output_tokens=2, input_tokens=9)
    assert counted.times() == RequestTimes(0, (10, 20), 30, 9, None)


# --- percentiles --------------------------------------------------------------------------------------------------

VALUES = st.lists(st.floats(0, 1e6), min_size=1)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


@given(VALUES)
def test_a_summary_is_ordered(values: list[float]) -> None:
    summary = summarise(values)
    assert summary is not None
    assert summary.n == len(values)
    assert min(values) <= summary.p50 <= summary.p90 <= summary.p99 <= summary.max == max(values)


def test_percentiles_by_hand() -> None:
    summary = summarise([4, 1, 3, 2, 5])
    assert summary is not None
    assert (summary.mean, summary.p50, summary.max) == (3, 3, 5)
    assert summary.p90 == pytest.approx(4.6)
    assert summarise([]) is None
    one = summarise([7])
    assert one is not None
    assert (one.p50, one.p99, one.n) == (7, 7, 1)
