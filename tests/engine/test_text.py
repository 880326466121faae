"""Text of a real model through the engine: stop strings, streams, characters of several tokens, ends of answers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.engines import ScriptedSampler, assert_no_residue, engine, run, streamed

from twostep.engine.engine import Engine
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.model.loaded import LoadedModel, open_model

STORY = "Once upon a time there was a little village by the sea, and in that village"
TOKENS = 40


@pytest.fixture(scope="module")
def model(default_model_path: Path) -> LoadedModel:
    return open_model(default_model_path)


@pytest.fixture(scope="module")
def made(model: LoadedModel) -> Iterator[Engine]:
    with engine(model=model, kv_memory="200 blocks", max_num_seqs=24, max_num_batched_tokens=512) as made:
        yield made
        assert_no_residue(made)


def ask(made: Engine, text: str, *, stream: bool = True, **params: Any) -> str:
    prompt = made.model.tokenizer.encode(text, special=True)
    usual = {"temperature": 0, "max_tokens": TOKENS}
    return made.submit(prompt, SamplingParams(**{**usual, **params}), stream=stream)


def served(made: Engine) -> tuple[list[Event], dict[str, RequestOutput]]:
    events: list[Event] = []
    while made.outstanding:
        events += made.turn()
    return events, {event.id: event for event in events if isinstance(event, RequestOutput)}


def decoded(model: LoadedModel, tokens: Sequence[int]) -> str:
    return model.tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def story(made: Engine) -> RequestOutput:
    id_ = ask(made, STORY)
    return served(made)[1][id_]


def stops_in(model: LoadedModel, output: RequestOutput) -> list[str]:
    """Pieces of the text that begin and end inside of tokens, from one to several tokens long."""
    text = output.choices[0].text
    starts = range(3, len(text) - 20, 13)
    stops = [text[start : start + 2 + i % 9] for i, start in enumerate(starts)]
    pieces = [decoded(model, [token]) for token in output.choices[0].token_ids]
    assert sum(not any(stop in piece for piece in pieces) for stop in stops) > 3, "over several tokens"
    return stops


# --- stop strings (CASES 25) --------------------------------------------------------------------------------------


def test_a_stop_string_ends_text_and_tokens_wherever_it_lies(made: Engine, story: RequestOutput) -> None:
    [free] = story.choices
    stops = stops_in(made.model, story)
    asked = {ask(made, STORY, stop=stop, stream=stream): stop for stop in stops for stream in (True, False)}
    events, outputs = served(made)
    for id_, stop in asked.items():
        [choice] = outputs[id_].choices
        end = free.text.index(stop)
        assert choice.text == free.text[:end]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        count = len(choice.token_ids)
        assert choice.token_ids == free.token_ids[:count]
        assert len(choice.timeline.token_ns) == count
        assert stop in decoded(made.model, free.token_ids[:count])
        assert stop not in decoded(made.model, free.token_ids[: count - 1]), "the token that completes it is the last"
        if deltas := streamed(events, id_, 0):
            assert "".join(delta.text for delta in deltas) == choice.text, "no head of the stop, nothing after it"
            assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
    assert_no_residue(made)


def test_a_stream_holds_back_no_more_than_a_head_of_the_stop(made: Engine, story: RequestOutput) -> None:
    """With a stop that never comes all text is sent, soon after its tokens."""
    [free] = story.choices
    id_ = ask(made, STORY, stop="village of the dragons that never were")
    events, outputs = served(made)
    sent = tokens = 0
    for delta in streamed(events, id_, 0):
        sent, tokens = sent + len(delta.text), tokens + len(delta.token_ids)
        held = decoded(made.model, free.token_ids[:tokens])[sent:]
        assert "village of the dragons that never were".startswith(held)
    assert outputs[id_].choices[0].text == free.text


def test_the_stop_may_be_shown_and_none_counts_before_min_tokens(made: Engine, story: RequestOutput) -> None:
    [free] = story.choices
    stop = stops_in(made.model, story)[2]
    shown = ask(made, STORY, stop=stop, include_stop_str_in_output=True)
    late = ask(made, STORY, stop=" ", min_tokens=30)
    events, outputs = served(made)
    assert outputs[shown].choices[0].text == free.text[: free.text.index(stop) + len(stop)]
    assert len(outputs[late].choices[0].token_ids) in range(31, 35)
    for id_ in (shown, late):
        assert "".join(delta.text for delta in streamed(events, id_, 0)) == outputs[id_].choices[0].text


def test_each_choice_ends_at_its_own_stop(made: Engine) -> None:
    sampled: dict[str, Any] = {"n": 4, "seed": 3, "temperature": 1.0}
    free_id = ask(made, STORY, **sampled)
    stopped_id, mute_id = (ask(made, STORY, stop=[".", " the"], stream=stream, **sampled) for stream in (True, False))
    events, outputs = served(made)
    assert [choice.text for choice in outputs[mute_id].choices] == [c.text for c in outputs[stopped_id].choices]
    for free, stopped in zip(outputs[free_id].choices, outputs[stopped_id].choices, strict=True):
        assert "".join(delta.text for delta in streamed(events, stopped_id, stopped.index)) == stopped.text
        ends = [free.text.index(stop) for stop in (".", " the") if stop in free.text]
        assert stopped.text == free.text[: min(ends, default=None)]
        assert stopped.finish_reason == ("stop" if ends else free.finish_reason)
    assert {choice.stop_reason for choice in outputs[stopped_id].choices} >= {".", " the"}
    assert_no_residue(made)


def test_a_small_cache_streams_the_same(model: LoadedModel, made: Engine, story: RequestOutput) -> None:
    """Stop strings and preemptions at once."""
    asked = [{"seed": i, "temperature": 1.0, "n": 2, "stop": stop} for i, stop in enumerate(("by", ", ", "never", "x"))]
    with engine(model=model, kv_memory="8 blocks", max_num_seqs=8, max_num_batched_tokens=512) as small:
        ids = [ask(small, STORY, **params) for params in asked]
        events, outputs = served(small)
        assert small.scheduler.counters.preemptions > 0
        assert_no_residue(small)
    in_plenty = [ask(made, STORY, stream=False, **params) for params in asked]
    expected = served(made)[1]
    for id_, other in zip(ids, in_plenty, strict=True):
        for mine, theirs in zip(outputs[id_].choices, expected[other].choices, strict=True):
            assert "".join(delta.text for delta in streamed(events, id_, mine.index)) == mine.text == theirs.text
            assert mine.token_ids == theirs.token_ids


# --- characters (CASES 24) ----------------------------------------------------------------------------------------


WRITTEN = ["🎉👩‍👩‍👧🇩🇪", "漢字と仮名", "naïve “quoted” … ünïcödé", "é🏳️‍🌈 नमस्ते"]  # fmt: skip
"""Joined emoji, flags, CJK, combining marks: characters of several tokens each."""


@pytest.fixture(scope="module")
def writer(model: LoadedModel) -> Iterator[Engine]:
    """A model that writes these texts again and again, the one at the seed's place."""
    scripts = {i: model.tokenizer.encode(text, special=False, add_bos=False) for i, text in enumerate(WRITTEN)}
    prompt_tokens = len(model.tokenizer.encode(STORY, special=True))

    def scripted(kernels: Any, sampler: Any) -> tuple[Any, Any]:
        return kernels, ScriptedSampler(sampler, scripts, prompt_tokens)

    with engine(scripted, model=model, kv_memory="200 blocks", max_num_seqs=24, max_num_batched_tokens=512) as writer:
        yield writer


def test_characters_arrive_whole(writer: Engine) -> None:
    """Answers are cut anywhere, also inside of a character: only there, at the end, U+FFFD stands for the piece."""
    ids = [ask(writer, STORY, seed=seed, max_tokens=length) for seed in range(len(WRITTEN)) for length in range(1, 25)]
    events, outputs = served(writer)
    assert any("\ufffd" in outputs[id_].choices[0].text for id_ in ids)
    for id_ in ids:
        [choice] = outputs[id_].choices
        deltas = streamed(events, id_, 0)
        assert not any("\ufffd" in delta.text for delta in deltas[:-1])
        assert "".join(delta.text for delta in deltas) == choice.text == decoded(writer.model, choice.token_ids)
        whole = choice.text.rstrip("\ufffd")
        assert (WRITTEN[int(ids.index(id_) // 24)] * 24).startswith(whole)
        assert len(choice.text) - len(whole) <= 1


@pytest.mark.parametrize(("seed", "stop"), [(0, "👩‍👧"), (0, "\u200d"), (1, "と仮"), (2, "” …"), (3, "🌈")])
def test_stop_strings_of_such_characters_end_a_stream(writer: Engine, seed: int, stop: str) -> None:
    id_ = ask(writer, STORY, seed=seed, stop=["never", stop])
    events, outputs = served(writer)
    [choice] = outputs[id_].choices
    assert choice.stop_reason == stop
    assert choice.text == WRITTEN[seed][: WRITTEN[seed].index(stop)]
    assert "".join(delta.text for delta in streamed(events, id_, 0)) == choice.text
    assert stop in decoded(writer.model, choice.token_ids)


def test_an_aborted_stream_has_told_all_that_its_output_has(made: Engine) -> None:
    for turns in (1, 2, 7, 8, 9):
        id_ = ask(made, " ".join(["🎉"] * 12), stop="never")
        events = [event for _ in range(turns) for event in made.turn()]
        made.abort(id_)
        later, outputs = served(made)
        [choice] = outputs[id_].choices
        assert choice.finish_reason == "abort"
        deltas = streamed([*events, *later], id_, 0)
        assert "".join(delta.text for delta in deltas) == choice.text
        assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
    assert_no_residue(made)


# --- ends ---------------------------------------------------------------------------------------------------------


def test_the_end_of_sequence_token_ends_an_answer_and_leaves_no_text(made: Engine) -> None:
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    variants: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"min_tokens": 60}]
    ended, ignoring, longer = (ask(made, chat, max_tokens=60, **variant) for variant in variants)
    outputs = served(made)[1]
    [choice] = outputs[ended].choices
    eos = made.model.tokenizer.eos_ids
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.token_ids[-1] in eos
    assert choice.text == decoded(made.model, choice.token_ids[:-1])
    [other] = outputs[ignoring].choices
    assert other.finish_reason == "length"
    assert other.token_ids[: len(choice.token_ids)] == choice.token_ids
    [late] = outputs[longer].choices
    assert len(late.token_ids) == 60
    assert not eos.intersection(late.token_ids[:-1])


def test_a_stop_token_is_the_reason(made: Engine, story: RequestOutput) -> None:
    [free] = story.choices
    stop = free.token_ids[9]
    id_ = ask(made, STORY, stop_token_ids=[stop])
    [choice] = run(made)[id_].choices
    end = free.token_ids.index(stop) + 1
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == free.token_ids[:end]
    assert choice.text == decoded(made.model, free.token_ids[: end - 1])


def test_log_probabilities_in_a_stream_are_those_of_the_output(made: Engine) -> None:
    id_ = ask(made, STORY, logprobs=2, stop="the")
    events, outputs = served(made)
    [choice] = outputs[id_].choices
    assert choice.logprobs is not None
    assert [one for delta in streamed(events, id_, 0) for one in delta.logprobs] == list(choice.logprobs)
    assert [one.token_id for one in choice.logprobs] == choice.token_ids
