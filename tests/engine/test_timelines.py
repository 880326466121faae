"""When things happened: times of every choice are in order, and say what the steps really did."""

from itertools import pairwise
from typing import Any

import pytest
from support.engines import Asked, answer, engine, failing, mixed_requests, prompt, run, submit

from twostep.engine.outputs import ChoiceOutput, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.kernels.step import StepCancelledError

CROWD = mixed_requests(60, seed=5)


def assert_in_order(choice: ChoiceOutput) -> None:
    line = choice.timeline
    assert line.first_scheduled_ns is not None
    assert line.finish_ns is not None
    assert line.arrival_ns <= line.first_scheduled_ns == line.chunks[0].start_ns
    for chunk, later in pairwise(line.chunks):
        assert chunk.start_ns < chunk.end_ns <= later.start_ns
        assert chunk.step < later.step
    assert all(before < after for before, after in pairwise(line.token_ns)), "a token a step: ITL is positive"
    assert line.token_ns[-1] == line.finish_ns
    assert len(line.token_ns) == len(choice.token_ids)
    assert line.preemptions == tuple(sorted(line.preemptions, key=lambda preemption: preemption.at_ns))
    assert line.token_ns[0] in {chunk.end_ns for chunk in line.chunks}, "the first token comes with the last chunk"


def assert_derived_times(choice: ChoiceOutput) -> None:
    line = choice.timeline
    assert line.queue_s is not None
    assert line.prefill_s is not None
    assert line.ttft_s == pytest.approx(line.queue_s + line.prefill_s)
    assert line.e2e_s == pytest.approx(line.ttft_s + sum(line.itl_s))
    assert line.preempted_s >= 0


def served(asked: list[Asked], wrap: Any = None, **settings: Any) -> dict[str, RequestOutput]:
    with engine(wrap, **settings) as made:
        for request in asked:
            submit(made, request)
        outputs = run(made)
        lost = sum(choice.timeline.tokens_lost for output in outputs.values() for choice in output.choices)
        times = sum(len(choice.timeline.preemptions) for output in outputs.values() for choice in output.choices)
        counters = made.scheduler.counters
        if wrap is None:
            assert (times, lost) == (counters.preemptions, counters.preempted_tokens), "CASES 18: all are reported"
        return outputs


@pytest.mark.parametrize(
    "settings",
    [{}, {"chunking": "tokens=32"}, {"overlap": False}, {"batching": "static=8"}, {"max_num_seqs": 3}],
    ids=["usual", "chunked", "no overlap", "static", "few seats"],
)
def test_times_are_in_order_and_chunks_add_up_to_the_prompt(settings: dict[str, Any]) -> None:
    for output in served(CROWD, **settings).values():
        for choice in output.choices:
            assert_in_order(choice)
            assert_derived_times(choice)
            assert choice.timeline.preemptions == ()
            computed = sum(chunk.tokens for chunk in choice.timeline.chunks)
            if choice.index == 0:
                assert computed + output.cached_tokens == len(output.prompt_token_ids)
            else:
                assert 0 < computed <= len(output.prompt_token_ids)


@pytest.mark.parametrize("caching", [True, False])
def test_with_preemptions_chunks_add_up_to_the_prompt_and_what_was_lost(caching: bool) -> None:
    """Exactly, where nothing can be found again."""
    preempted = 0
    for output in served(CROWD, kv_memory="36 blocks", enable_prefix_caching=caching).values():
        for choice in output.choices:
            assert_in_order(choice)
            assert_derived_times(choice)
            preempted += len(choice.timeline.preemptions)
            computed = sum(chunk.tokens for chunk in choice.timeline.chunks)
            without_cache = len(output.prompt_token_ids) + choice.timeline.tokens_lost + _sampled_in_chunks(choice) - 1
            assert computed <= without_cache
            assert caching or computed == without_cache
    assert preempted > 5


def _sampled_in_chunks(choice: ChoiceOutput) -> int:
    """The first token, and one more each time that a preempted sequence has caught up; all others are decoded."""
    return len({chunk.end_ns for chunk in choice.timeline.chunks}.intersection(choice.timeline.token_ns))


def test_forks_share_the_times_of_the_prefill() -> None:
    with engine(chunking="tokens=64") as made:
        output = answer(made, prompt(200), n=3, temperature=1)
        first, *others = (choice.timeline for choice in output.choices)
        assert [chunk.tokens for chunk in first.chunks] == [64, 64, 64, 8]
        for other in others:
            assert other.chunks == first.chunks
            assert other.first_scheduled_ns == first.first_scheduled_ns
            assert other.token_ns[0] == first.token_ns[0]


def test_a_choice_without_a_seat_has_times_of_its_own() -> None:
    with engine(max_num_seqs=1) as made:
        first, second = (choice.timeline for choice in answer(made, prompt(100), n=2).choices)
        assert second.first_scheduled_ns is not None
        assert first.finish_ns is not None
        assert first.finish_ns <= second.first_scheduled_ns
        assert sum(chunk.tokens for chunk in second.chunks) == 4, "96 tokens are found"


def test_one_token_has_no_gap() -> None:
    with engine() as made:
        [choice] = answer(made, prompt(10), max_tokens=1).choices
        assert_in_order(choice)
        assert (choice.timeline.itl_s, choice.timeline.tpot_s) == ((), None)
        assert choice.timeline.e2e_s == choice.timeline.ttft_s


def test_failed_steps_show_as_preemptions_and_leave_times_in_order() -> None:
    cancelled = {step: StepCancelledError() for step in (2, 7)}
    outputs = served(CROWD[:20], failing(cancelled))
    choices = [choice for output in outputs.values() for choice in output.choices]
    for choice in choices:
        assert_in_order(choice)
    assert sum(len(choice.timeline.preemptions) for choice in choices) > 10


def test_a_stream_tells_of_the_tokens_in_the_order_of_their_times() -> None:
    with engine() as made:
        ids = [made.submit(prompt(50, seed=i), SamplingParams(max_tokens=6), stream=True) for i in range(4)]
        events = []
        while made.outstanding:
            events += made.turn()
        for id_ in ids:
            mine = [event for event in events if event.id == id_]
            assert isinstance(mine[-1], RequestOutput)
            assert not any(isinstance(event, RequestOutput) for event in mine[:-1])
            assert [t for delta in mine[:-1] for t in delta.token_ids] == mine[-1].choices[0].token_ids
