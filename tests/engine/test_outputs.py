"""Derived times, by hand. One request: arrives at 1 s, waits half a second, has two chunks, is preempted once."""

import pytest

from twostep.engine.outputs import ChoiceOutput, ChunkTime, PreemptionTime, RequestOutput, Timeline

MS = 1_000_000

WHOLE = Timeline(
    arrival_ns=1000 * MS,
    first_scheduled_ns=1500 * MS,
    chunks=(
        ChunkTime(1500 * MS, 1700 * MS, tokens=256, step=10),
        ChunkTime(1710 * MS, 1790 * MS, tokens=100, step=11),
        ChunkTime(2400 * MS, 2450 * MS, tokens=60, step=30),
    ),
    token_ns=(1800 * MS, 1840 * MS, 1890 * MS, 2460 * MS),
    preemptions=(PreemptionTime(1900 * MS, tokens_lost=359),),
    finish_ns=2461 * MS,
)


def test_times_of_a_whole_request() -> None:
    assert WHOLE.queue_s == 0.5
    assert WHOLE.prefill_s == 0.3
    assert WHOLE.ttft_s == 0.8
    assert WHOLE.itl_s == (0.04, 0.05, 0.57)
    assert WHOLE.tpot_s == pytest.approx(0.22)
    assert WHOLE.e2e_s == 1.46
    assert WHOLE.preempted_s == 0.5
    assert WHOLE.tokens_lost == 359


def test_printed_it_is_short() -> None:
    assert repr(WHOLE) == "<Timeline: queue 500.0 ms, ttft 800.0 ms, tpot 220.0 ms, e2e 1460.0 ms, 1 preemptions>"
    assert repr(Timeline(arrival_ns=5)) == "<Timeline: 0 preemptions>"


def test_queue_and_prefill_are_the_time_to_the_first_token() -> None:
    assert WHOLE.queue_s is not None
    assert WHOLE.prefill_s is not None
    assert WHOLE.queue_s + WHOLE.prefill_s == WHOLE.ttft_s


def test_one_token_has_no_gap() -> None:
    timeline = Timeline(arrival_ns=0, first_scheduled_ns=0, token_ns=(30 * MS,))
    assert (timeline.itl_s, timeline.tpot_s) == ((), None)
    assert timeline.ttft_s == timeline.e2e_s == 0.03


def test_tokens_that_come_together_have_a_gap_of_nothing() -> None:
    timeline = Timeline(arrival_ns=0, first_scheduled_ns=0, token_ns=(10 * MS, 10 * MS, 30 * MS))
    assert timeline.itl_s == (0.0, 0.02)
    assert timeline.tpot_s == 0.01


def test_what_never_happened_has_no_time() -> None:
    aborted_in_queue = Timeline(arrival_ns=5, finish_ns=9)
    assert aborted_in_queue.queue_s is None
    assert aborted_in_queue.prefill_s is None
    assert aborted_in_queue.ttft_s is None
    assert aborted_in_queue.e2e_s is None
    assert aborted_in_queue.preempted_s == 0


def test_preempted_to_the_end() -> None:
    """Aborted before it ran again."""
    timeline = Timeline(0, 10, (ChunkTime(10, 20, 5, 0),), (20,), (PreemptionTime(30, 6),), finish_ns=1030)
    assert timeline.preempted_s == 1000 / 1e9


def test_each_preemption_lasts_to_its_own_resumption() -> None:
    chunks = (ChunkTime(0, 10, 5, 0), ChunkTime(50, 60, 5, 1), ChunkTime(90, 99, 5, 2))
    timeline = Timeline(0, 0, chunks, (), (PreemptionTime(20, 5), PreemptionTime(70, 5)), finish_ns=200)
    assert timeline.preempted_s == (30 + 20) / 1e9


def test_output_tokens_are_those_of_all_choices() -> None:
    choices = tuple(ChoiceOutput(i, "", [1] * (i + 2), "length", Timeline(0)) for i in range(2))
    assert RequestOutput("a", [1, 2], choices, cached_tokens=0).output_tokens == 5
