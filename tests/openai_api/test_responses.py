"""Finished requests to bodies: OpenAI's shapes, worked out by hand."""

import json
import math
from typing import Any

import pytest
from support.gguf_writer import write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.engine.outputs import ChoiceOutput, ChunkTime, Delta, PreemptionTime, RequestOutput, Timeline
from twostep.engine.params import SamplingParams
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.engine.text.text_stream import TextStream
from twostep.model.gguf import read_gguf
from twostep.model.tokenizer import Tokenizer, load_tokenizer
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.api_request import ApiRequest
from twostep.openai_api.json_text import plain
from twostep.openai_api.logprobs_format import (
    PlacedToken,
    ShownTokens,
    chat_logprobs,
    completion_logprobs,
    text_offsets,
)
from twostep.openai_api.responses import Chunks, response_body, timings

MS = 1_000_000
TIMELINE = Timeline(
    arrival_ns=0,
    first_scheduled_ns=5 * MS,
    chunks=(ChunkTime(5 * MS, 15 * MS, 2, step=0), ChunkTime(15 * MS, 25 * MS, 2, step=1)),
    token_ns=(25 * MS, 35 * MS, 65 * MS),
    preemptions=(PreemptionTime(40 * MS, 5),),
    finish_ns=66 * MS,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("model") / "small.gguf", small_tokenizer_metadata())
    return load_tokenizer(read_gguf(path).metadata)


def asked(kind: Any, **fields: Any) -> ApiRequest:
    plain = {"prompts": ((1,),), "params": SamplingParams(), "priority": 0, "stream": False, "echo": False}
    return ApiRequest(**{"kind": kind, "model": "small", "return_token_ids": False, "unknown": (), **plain, **fields})


def output(tokenizer: Tokenizer, prompt: str, *texts: str, timeline: Timeline = TIMELINE) -> RequestOutput:
    choices = tuple(
        ChoiceOutput(index, text, tokenizer.encode(text, special=False), "stop", timeline)
        for index, text in enumerate(texts)
    )
    return RequestOutput("r", tokenizer.encode(prompt, special=False), choices, cached_tokens=0)


def body(request: ApiRequest, *outputs: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    made = response_body(request, outputs, tokenizer, unique="abc", created_s=1700000000)
    json.dumps(made, allow_nan=False)
    return made


def test_chat(tokenizer: Tokenizer) -> None:
    made = body(asked("chat"), output(tokenizer, "abcd", "xyz"), tokenizer=tokenizer)
    assert made.pop("timings")["cache_n"] == 0
    assert made == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "small",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "xyz", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_completion(tokenizer: Tokenizer) -> None:
    made = body(asked("completion"), output(tokenizer, "abcd", "xyz"), tokenizer=tokenizer)
    assert (made["id"], made["object"]) == ("cmpl-abc", "text_completion")
    assert made["choices"] == [
        {"index": 0, "text": "xyz", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_choices_of_several_prompts_are_counted_through(tokenizer: Tokenizer) -> None:
    outputs = [output(tokenizer, "ab", "p", "q"), output(tokenizer, "abc", "r", "s")]
    made = body(asked("completion", params=SamplingParams(n=2)), *outputs, tokenizer=tokenizer)
    assert [(choice["index"], choice["text"]) for choice in made["choices"]] == [(0, "p"), (1, "q"), (2, "r"), (3, "s")]
    assert (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"]) == (5, 4)


def test_echo_and_token_ids(tokenizer: Tokenizer) -> None:
    request = asked("completion", echo=True, return_token_ids=True)
    [choice] = body(request, output(tokenizer, "ab", "hello"), tokenizer=tokenizer)["choices"]
    assert choice["text"] == "abhello"
    assert choice["prompt_token_ids"] == tokenizer.encode("ab", special=False)
    assert choice["token_ids"] == tokenizer.encode("hello", special=False)


@pytest.mark.parametrize(("reason", "message"), [("error", "NaN in logits"), ("abort", "the request was aborted")])
def test_an_answer_without_an_end_is_the_server_s_error(tokenizer: Tokenizer, reason: Any, message: str) -> None:
    error = "NaN in logits" if reason == "error" else None
    failed = ChoiceOutput(0, "x", [1], reason, TIMELINE, error=error)
    with pytest.raises(ApiError, match=message) as raised:
        body(asked("chat"), RequestOutput("r", [1], (failed,), 0), tokenizer=tokenizer)
    assert (raised.value.status, raised.value.body()["error"]["type"]) == (500, "server_error")


def entries(tokenizer: Tokenizer) -> list[TokenLogprobs]:
    """`hello`, then 漢 in three tokens; the first has an alternative, the last was impossible."""
    hello, *_ = tokenizer.encode("hello", special=False)
    first, second, third = tokenizer.encode("漢", special=False)
    return [
        TokenLogprobs(hello, -0.5, 1, ((hello, -0.5), (first, -1.5))),
        TokenLogprobs(first, -2.0, 3, ((hello, -0.25),)),
        TokenLogprobs(second, -0.125, 1, ()),
        TokenLogprobs(third, -math.inf, 9, ()),
    ]


def test_logprobs_of_chat(tokenizer: Tokenizer) -> None:
    made = plain(chat_logprobs(entries(tokenizer), tokenizer))
    hello, first, _, last = made["content"]
    word = {"token": "hello", "logprob": -0.5, "bytes": [104, 101, 108, 108, 111]}
    half = {"token": "\ufffd", "bytes": [0xE6]}
    assert hello == {**word, "top_logprobs": [word, {**half, "logprob": -1.5}]}
    assert first == {**half, "logprob": -2.0, "top_logprobs": [{**word, "logprob": -0.25}]}
    assert (last["logprob"], last["bytes"], last["top_logprobs"]) == (-9999.0, [0xA2], [])


def test_logprobs_of_completions(tokenizer: Tokenizer) -> None:
    offsets = text_offsets(entries(tokenizer), tokenizer, True)
    made = plain(completion_logprobs(entries(tokenizer), offsets, tokenizer))
    assert made == {
        "tokens": ["hello", r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2"],
        "token_logprobs": [-0.5, -2.0, -0.125, -9999.0],
        "top_logprobs": [
            {"hello": -0.5, r"bytes:\xe6": -1.5},
            {"hello": -0.25, r"bytes:\xe6": -2.0},
            {r"bytes:\xbc": -0.125},
            {r"bytes:\xa2": -9999.0},
        ],
        "text_offset": [0, 5, 5, 5],
    }


ANSWERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "whole tokens": ("ab END tail", {"stop": "END"}, ["a", "b", " "]),
    "a part of a token": ("hello x", {"stop": "lo x"}, ["hello"]),
    "at once": ("END", {"stop": "END"}, []),
    "shown": ("a END tail", {"stop": "END", "include_stop_str_in_output": True}, ["a", " ", "E", "N", "D"]),
    "never complete": ("ab EN", {"stop": "END"}, ["a", "b", " ", "E", "N"]),
    "end token": ("ab<|im_end|>", {}, ["a", "b", "<|im_end|>"]),
    "end token in sight": ("ab<|im_end|>", {"skip_special_tokens": False}, ["a", "b", "<|im_end|>"]),
    "a character in three tokens": ("a漢END", {"stop": "END"}, ["a", r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2"]),
    "a character cut off": ("a漢"[:2], {"stop": "漢"}, ["a"]),
    "half a character": ("a\N{SNOWMAN}", {"stop": "END", "max_tokens": 3}, ["a", r"bytes:\xe2", r"bytes:\x98"]),
    "special tokens within": ("a<|im_start|>b END", {"stop": " END"}, ["a", "<|im_start|>", "b"]),
}
"""What the model wrote, the request's parameters, and the tokens that are to be shown."""


def streamed_and_whole(tokenizer: Tokenizer, kind: Any, written: str, params: SamplingParams) -> list[dict[str, Any]]:
    """Text and log-probabilities of one answer, first as a stream of single tokens, then whole."""
    stream, request, collected = TextStream(tokenizer, params), asked(kind, params=params), list[TokenLogprobs]()
    chunks, sent, text, stop = Chunks(request, tokenizer, unique="abc", created_s=0), b"", "", None
    for id_ in tokenizer.encode(written, special=True)[: params.max_tokens]:
        delta = stream.push([id_])
        collected.append(TokenLogprobs(id_, -0.5, 1, ((id_, -0.5),)))
        sent += chunks.delta(0, Delta("r", 0, delta.text, (id_,), PackedLogprobs([collected[-1]]).to_bytes()))
        text, stop = text + delta.text, delta.stop
        if stop is not None:
            break
    if rest := stream.flush():
        sent += chunks.delta(0, Delta("r", 0, rest, ()))
    ids = [entry.token_id for entry in collected]
    choice = ChoiceOutput(0, text + rest, ids, "stop", TIMELINE, stop, tuple(collected))
    finished = RequestOutput("r", [1], (choice,), 0)
    sent += chunks.finished(0, finished)
    pieces = [json.loads(line[6:])["choices"][0] for line in sent.decode().splitlines() if line]
    [whole] = body(request, finished, tokenizer=tokenizer)["choices"]
    return [_joined(pieces), _joined([whole])]


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    text = "".join(piece["text"] if "text" in piece else _content(piece) for piece in pieces)
    joined: dict[str, Any] = {"text": text}
    for logprobs in (piece["logprobs"] for piece in pieces if piece["logprobs"]):
        for name, entries_ in logprobs.items():
            joined[name] = joined.get(name, []) + (entries_ or [])
    return joined


def _content(piece: dict[str, Any]) -> str:
    return str((piece.get("delta") or piece.get("message") or {}).get("content", ""))


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
def test_logprobs_are_of_the_tokens_that_the_text_has_streamed_or_not(
    tokenizer: Tokenizer, case: tuple[str, dict[str, Any], list[str]]
) -> None:
    written, fields, shown = case
    params = SamplingParams(logprobs=1, **fields)
    streamed, whole = streamed_and_whole(tokenizer, "completion", written, params)
    lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert [streamed["text"], *(streamed.get(name, []) for name in lists)] == [whole["text"], *map(whole.get, lists)]
    assert whole["tokens"] == shown
    assert [len(whole[name]) for name in lists] == [len(shown)] * 4
    for name, offset in zip(shown, whole["text_offset"], strict=True):
        spelt = "" if name.startswith(("<|", "bytes:")) else whole["text"][offset : offset + len(name)]
        assert name.startswith(spelt)
    chat, whole_chat = streamed_and_whole(tokenizer, "chat", written, params)
    assert (chat["text"], chat.get("content", [])) == (whole_chat["text"], whole_chat["content"])
    assert len(whole_chat["content"]) == len(shown)


def test_no_log_probability_of_a_stream_is_ahead_of_its_text(tokenizer: Tokenizer) -> None:
    """Else a stop string that completes later could not cut it off."""
    tokens = ShownTokens(tokenizer)
    [e, n, d] = (TokenLogprobs(id_, -0.5, 1, ()) for id_ in tokenizer.encode("END", special=False))
    assert tokens.push([e], "") == tokens.push([n], "") == []
    assert tokens.push([d], "EN") == [PlacedToken(e, 0), PlacedToken(n, 1)]
    assert (tokens.end("D"), tokens.end(None), tokens.end(7)) == ([], [PlacedToken(d, 2)], [PlacedToken(d, 2)])


def test_times_of_one_answer(tokenizer: Tokenizer) -> None:
    cached = RequestOutput("r", [1, 2, 3, 4, 5], output(tokenizer, "x", "abc").choices, cached_tokens=1)
    assert timings([cached]) == {
        "cache_n": 1,
        "cached_n": 1,
        "prompt_n": 4,
        "prompt_ms": 20,
        "prompt_per_token_ms": 5,
        "prompt_per_second": 200,
        "queue_ms": 5,
        "ttft_ms": 25,
        "predicted_n": 3,
        "predicted_ms": 40,
        "predicted_per_token_ms": 20,
        "predicted_per_second": 50,
        "prefill_chunks": 2,
        "preemptions": 1,
    }


def test_times_of_several_answers_are_one_interval(tokenizer: Tokenizer) -> None:
    later = Timeline(2 * MS, 25 * MS, (ChunkTime(25 * MS, 45 * MS, 1, step=2),), (45 * MS, 85 * MS), (), 86 * MS)
    made = timings([output(tokenizer, "abcd", "xyz"), output(tokenizer, "a", "pq", timeline=later)])
    assert (made["queue_ms"], made["ttft_ms"], made["prompt_n"]) == (5, 25, 5)
    assert (made["predicted_n"], made["predicted_ms"], made["predicted_per_token_ms"]) == (5, 60, 15)
    assert (made["prefill_chunks"], made["preemptions"]) == (3, 1)


def test_times_that_are_undefined(tokenizer: Tokenizer) -> None:
    one = Timeline(0, 5 * MS, (), (25 * MS,), (), 26 * MS)
    made = timings([output(tokenizer, "abcd", "x", timeline=one)])
    assert (made["predicted_n"], made["predicted_ms"], made["predicted_per_token_ms"]) == (1, 0, None)
    assert made["predicted_per_second"] is None
