"""What an engine refuses at once, what it never does, and what its memory does not depend on."""

from typing import Any

import numpy as np
import pytest
from support.engines import (
    PLENTY,
    answer,
    assert_no_residue,
    engine,
    mixed_requests,
    prompt,
    run,
    submit,
    tokens_of,
    watching,
)

from twostep.config.values import MemoryBlocks
from twostep.engine.engine import Engine
from twostep.engine.outputs import Delta
from twostep.engine.params import SamplingParams
from twostep.errors import ContextLengthError, InvalidParameterError, MemoryPlanError
from twostep.kernels.native import NativeExecutor
from twostep.kernels.step import StepArrays

OF_THE_LONG_ONE = 7
"""The token that the long prompt consists of, and no other request has."""

# --- tokens come of whole prompts only (CASES 8) ------------------------------------------------------------------


@pytest.mark.parametrize("chunking", ["tokens=16", "tokens=50", "time=0.5", "none"])
def test_no_row_of_an_unfinished_prefill_is_sampled(chunking: str) -> None:
    sampled: list[bool] = []

    def watch(number: int, step: StepArrays) -> None:
        first = 0
        for start, count in zip(step.starts, step.counts, strict=True):
            rows = range(first, first + count)
            if start < 300 and set(step.tokens[rows.start : rows.stop]) == {OF_THE_LONG_ONE}:
                sampled.append(any(row in step.logit_rows for row in rows))
                assert sampled[-1] == (start + count == 300)
                assert rows[-1] in step.logit_rows or not sampled[-1]
            first = rows.stop

    others = SamplingParams(max_tokens=60, logit_bias={OF_THE_LONG_ONE: -100})
    with engine(watching(watch), chunking=chunking) as made:
        for i in range(3):
            made.submit([t for t in prompt(20, seed=i) if t != OF_THE_LONG_ONE], others)
        made.turn()
        made.submit([OF_THE_LONG_ONE] * 300, others, id="long", stream=True)
        events: list[Any] = []
        while made.outstanding:
            events += made.turn()
        assert sampled == [False] * (len(sampled) - 1) + [True]
        assert len(sampled) > 1 or chunking in ("none", "time=0.5")
        mine = [event for event in events if isinstance(event, Delta)]
        assert sum(len(delta.token_ids) for delta in mine) == 60


# --- memory (CASES 9, 19) -----------------------------------------------------------------------------------------


def native(made: Engine) -> NativeExecutor:
    assert isinstance(made.kernels.executor, NativeExecutor)
    return made.kernels.executor


def test_buffers_are_taken_at_the_start_and_never_grow() -> None:
    with engine(max_num_seqs=8, max_num_batched_tokens=512, chunking="none") as made:
        at_first = native(made).buffer_bytes
        for asked in mixed_requests(40, seed=6):
            submit(made, asked)
        run(made)
        answer(made, prompt(500), max_tokens=12)
        assert native(made).buffer_bytes == at_first


def test_buffers_follow_the_steps_budget_not_the_context() -> None:
    def buffer_bytes(**settings: Any) -> int:
        with engine(max_num_seqs=8, **settings) as made:
            return native(made).buffer_bytes

    narrow = buffer_bytes(max_num_batched_tokens=264, max_model_len=512)
    assert narrow == buffer_bytes(max_num_batched_tokens=264, max_model_len=32)
    assert narrow == buffer_bytes(max_num_batched_tokens=264, kv_memory=MemoryBlocks(9 * PLENTY))
    assert 2 * narrow > buffer_bytes(max_num_batched_tokens=512) > narrow


def test_no_step_is_wider_than_the_budget() -> None:
    widths = []
    with engine(watching(lambda number, step: widths.append(len(step.tokens))), max_num_batched_tokens=320) as made:
        for asked in mixed_requests(40, seed=6):
            submit(made, asked)
        run(made)
    assert max(widths) == 320


def test_the_settings_in_effect_are_told_with_the_arithmetic() -> None:
    with engine(kv_memory="100 blocks", max_num_seqs=4, chunking="tokens=64", admission="fcfs") as made:
        told = "\n".join(made.describe())
    assert "100 blocks" in told
    assert "4 sequences at a time, continuous batching, admission fcfs" in told
    assert "prompts cut by tokens=64; context 512" in told


def test_a_pinned_cache_that_holds_no_sequence_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="512"), engine(kv_memory="10 blocks", max_model_len=512):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "max_model_len is 513; it has to be from 2 to the context, 512"),
        ({"max_model_len": 1}, "max_model_len is 1; it has to be an integer from 2"),
        (
            {"chunking": "sometimes"},
            "chunking is 'sometimes'; it has to be none, tokens=N, time=MILLISECONDS or time=auto",
        ),
        ({"chunking": "time=0"}, "chunking is 'time=0'"),
        ({"batching": "static=0"}, "batching is 'static=0'; it has to be continuous, static=SIZE or"),
        ({"admission": "random"}, "admission is 'random'; it has to be priority, fcfs or shortest-prefill"),
        ({"admission": "fcfs", "priority_preempts": True}, "priority_preempts needs an order by priority"),
        (
            {"max_num_batched_tokens": None, "chunking": "often"},
            "chunking is 'often'; it has to be none, tokens=N, time=",
        ),
        (
            {"max_num_batched_tokens": 100, "max_num_seqs": 64},
            "max_num_batched_tokens is 100; it has to be at least 320",
        ),
    ],
)
def test_settings_that_contradict_are_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught, engine(**settings):
        pass
    assert message in str(caught.value)


# --- requests that can never be served (CASES 16, 30) -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "length", "max_tokens", "numbers"),
    [
        ({}, 500, 13, ["max_tokens is 13", "at most 12", "512", "500"]),
        ({}, 512, None, ["prompt has 512 tokens", "512"]),
        ({"max_model_len": 100}, 90, 11, ["max_tokens is 11", "at most 10", "100", "90"]),
        ({"kv_memory": "10 blocks"}, 200, None, ["prompt of 200", "need 13 KV blocks", "the whole cache has 10"]),
        ({"kv_memory": "10 blocks"}, 100, 62, ["max_tokens of 62", "need 11 KV blocks", "the whole cache has 10"]),
        ({"chunking": "none", "max_num_batched_tokens": 256, "max_num_seqs": 4}, 250, 7, ["250", "7", "257", "256"]),
    ],
)
def test_what_never_fits_is_refused_at_once_and_blocks_nobody(
    settings: dict[str, Any], length: int, max_tokens: int | None, numbers: list[str]
) -> None:
    with engine(**settings) as made:
        other = made.submit(prompt(50), SamplingParams(max_tokens=5))
        with pytest.raises(ContextLengthError) as caught:
            made.submit(prompt(length), SamplingParams(max_tokens=max_tokens))
        for number in numbers:
            assert number in str(caught.value)
        assert made.outstanding == 1
        assert run(made)[other].choices[0].finish_reason == "length"
        assert_no_residue(made)


@pytest.mark.parametrize("settings", [{}, {"kv_memory": "10 blocks"}, {"max_model_len": 77}])
def test_what_just_fits_is_served_to_its_last_token(settings: dict[str, Any]) -> None:
    with engine(**settings) as made:
        context = made.sizing.longest
        for length in (1, context // 2, context - 1):
            output = answer(made, prompt(length), max_tokens=None)
            assert len(output.choices[0].token_ids) == context - length
        assert_no_residue(made)


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([3, 512], {}, "the prompt has token 512; the vocabulary is 0 to 511"),
        ([-1, 3], {}, "the prompt has token -1"),
        ([3], {"stop": "x"}, "stop needs text"),
        ([3], {"stop_token_ids": [512]}, "stop_token_ids has token 512; the vocabulary is 0 to 511"),
        ([3], {"logit_bias": {600: 1.0}}, "logit_bias has token 600"),
    ],
)
def test_what_makes_no_sense_is_refused(tokens: list[int], params: dict[str, Any], message: str) -> None:
    with engine() as made:
        with pytest.raises(InvalidParameterError) as caught:
            made.submit(tokens, SamplingParams(**params))
        assert message in str(caught.value)
        assert_no_residue(made)


def test_prompts_may_be_arrays() -> None:
    with engine() as made:
        assert answer(made, np.array(prompt(30), np.int32)).choices[0].token_ids == (
            answer(made, prompt(30)).choices[0].token_ids
        )


# --- preemption (CASES 18) ----------------------------------------------------------------------------------------


def test_the_first_of_equals_is_never_preempted() -> None:
    with engine(kv_memory="20 blocks") as made:
        ids = [made.submit(prompt(60, seed=i), SamplingParams(max_tokens=100, seed=i)) for i in range(4)]
        outputs = run(made)
        times = [len(outputs[id_].choices[0].timeline.preemptions) for id_ in ids]
        assert times[0] == 0
        assert sum(times) == made.scheduler.counters.preemptions > 0


def test_the_urgent_take_the_seats_of_others_who_go_on_afterwards() -> None:
    with engine(max_num_seqs=2, priority_preempts=True) as made:
        params = SamplingParams(max_tokens=12, temperature=0)
        later = [made.submit(prompt(30, seed=i), params, priority=5) for i in range(2)]
        for _ in range(4):
            made.turn()
        urgent = [made.submit(prompt(30, seed=i), params, priority=1) for i in range(2)]
        outputs = run(made)
        assert made.scheduler.counters.preemptions == 2
        assert [tokens_of(outputs[id_]) for id_ in later] == [tokens_of(outputs[id_]) for id_ in urgent]
        ends = [max(outputs[id_].choices[0].timeline.finish_ns or 0 for id_ in ids) for ids in (urgent, later)]
        assert ends == sorted(ends)
        assert_no_residue(made)


def test_a_storm_of_preemptions_ends() -> None:
    """Twenty that together need ten times the cache: less is computed in vain than to some purpose."""
    with engine(kv_memory="40 blocks") as made:
        for i in range(20):
            made.submit(prompt(16, seed=i), SamplingParams(max_tokens=300, seed=i))
        outputs = run(made)
        assert {output.choices[0].finish_reason for output in outputs.values()} == {"length"}
        assert made.scheduler.counters.preempted_tokens < 20 * 316
        assert_no_residue(made)
