"""Requests go on when their engine dies: what a client gets, byte for byte, is that of an undisturbed run."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.breakdowns import assert_exact, reply
from support.engines import WatchedSampler, assert_no_residue, engine
from support.mortal_engine import Mortals
from support.tiny_chat import write_tiny_chat

from twostep.engine.backend import Accepted, Backend, ChoiceSoFar, RequestSoFar, Submit
from twostep.engine.outputs import ChoiceEnd, ChoiceOutput, RequestOutput, Timeline
from twostep.engine.params import SamplingParams
from twostep.engine.process import local_backend
from twostep.engine.process.local_backend import MOST_DEATHS_OF_REQUEST
from twostep.errors import EngineDiedError, InvalidParameterError
from twostep.model.loaded import LoadedModel, open_model
from twostep.openai_api.api_request import ApiRequest, read_request
from twostep.openai_api.responses import Chunks, response_body

pytest.importorskip("llguidance")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: Any = [{"role": "user", "content": "hello"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Zoë", "李"]}, "adult": {"type": "boolean"}},
    "required": ["name", "adult"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
LETTERS = {str(id_): 8 for id_ in range(64, 90)}
"""Makes letters of the tiny model's random bytes."""

Body = dict[str, Any]
BODIES: dict[str, tuple[str, Body]] = {
    "chat, drawn": (CHAT, {"messages": ASKED, "max_tokens": 24, "seed": 3}),
    "chat, greedy, usage": (
        CHAT,
        {"messages": ASKED, "max_tokens": 24, "temperature": 0, "stream_options": {"include_usage": True}},
    ),
    "half characters": (TEXT, {"prompt": "hello", "max_tokens": 30, "seed": 5, "return_token_ids": True}),
    "JSON schema": (CHAT, {"messages": ASKED, "max_tokens": 60, "seed": 1, "response_format": FORM}),
    "three choices": (TEXT, {"prompt": "hello", "n": 3, "max_tokens": 12, "seed": 2, "logprobs": 2}),
    "choices that end apart": (TEXT, {"prompt": "hello", "n": 3, "max_tokens": 30, "seed": 4, "stop": ["e", "o", "t"],
                                      "logit_bias": LETTERS, "min_tokens": 4}),
    "five choices, four slots": (TEXT, {"prompt": "hello", "n": 5, "max_tokens": 6, "seed": 9}),
    "tool call": (CHAT, {"messages": ASKED, "max_tokens": 120, "seed": 6, "tools": [TOOL], "tool_choice": "required"}),
    "stop string, held back": (
        TEXT,
        {"prompt": "hello", "max_tokens": 40, "seed": 7, "stop": ["abcdefgh", "qu", "x"], "logit_bias": LETTERS},
    ),
    "stop token": (TEXT, {"prompt": "hello", "max_tokens": 40, "seed": 8, "stop_token_ids": list(range(60, 75)),
                          "include_stop_str_in_output": True, "min_tokens": 6, "logit_bias": LETTERS}),
    "penalties, log-probabilities": (
        CHAT,
        {"messages": ASKED, "max_tokens": 20, "seed": 9, "logprobs": True, "top_logprobs": 3,
         "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    ),
    "two prompts": (TEXT, {"prompt": ["hello", "hell"], "max_tokens": 9, "seed": 11, "logprobs": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    made = open_model(write_tiny_chat(tmp_path_factory.mktemp("model") / "tiny.gguf"))
    yield made
    made.close()


def read(model: LoadedModel, name: str, **more: Any) -> ApiRequest:
    path, body = BODIES[name]
    return read_request(path, {**body, "stream": True, **more}, model, ["small"])


@dataclass
class Answer:
    """What came for one request: the pieces of its reply, and the outputs of its prompts."""

    pieces: list[bytes] = field(default_factory=list)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    events: int = 0

    def chunks(self) -> dict[int, list[bytes]]:
        """By choice, as the order among choices is that of steps; what belongs to none is under -1."""
        found: dict[int, list[bytes]] = {}
        for chunk in b"".join(self.pieces).split(b"\n\n"):
            match = re.search(rb'"choices":\[\{"index":(\d+)', chunk)
            found.setdefault(int(match[1]) if match else -1, []).append(chunk)
        return found

    def said(self) -> list[Any]:
        """All but times."""
        return [
            (
                output.id,
                output.prompt_token_ids,
                output.cached_tokens,
                *(_untimed_choice(one) for one in output.choices),
            )
            for output in sorted(self.outputs.values(), key=lambda output: output.id)
        ]


def submits(request: ApiRequest, name: str) -> list[Submit]:
    return [
        Submit(f"{name}-{number}", prompt, request.params, stream=request.stream)
        for number, prompt in enumerate(request.prompts)
    ]


async def answer(backend: Backend, model: LoadedModel, request: ApiRequest, name: str = "a") -> Answer:
    """As `server/api/completions.py` does it."""
    got, ids = Answer(), [submit.id for submit in submits(request, name)]
    chunks = Chunks(request, model.tokenizer, unique=name, created_s=1)
    async for event in backend.submit(submits(request, name)):
        got.events += 1
        if isinstance(event, Accepted):
            continue
        if isinstance(event, RequestOutput):
            got.outputs[event.id] = event
        if request.stream:
            prompt = ids.index(event.id)
            made = chunks.finished(prompt, event) if isinstance(event, RequestOutput) else chunks.delta(prompt, event)
            got.pieces.append(_untimed(made))
    if request.stream:
        got.pieces.append(_untimed(chunks.end()))
    else:
        body = response_body(request, [got.outputs[id_] for id_ in ids], model.tokenizer, unique=name, created_s=1)
        got.pieces.append(repr(body | {"timings": None}).encode())
    return got


def _untimed_choice(choice: ChoiceOutput) -> ChoiceOutput:
    return replace(choice, timeline=Timeline(0))


def _untimed(chunk: bytes) -> bytes:
    return re.sub(rb',"timings":\{[^}]*\}', b"", chunk)


def run(model: LoadedModel, asked: list[ApiRequest], lives: list[int], wrap: Any = None) -> tuple[list[Answer], int]:
    """The answers of engines of which each lives for so many events, and how many were started again."""

    async def asked_together() -> tuple[list[Answer], int]:
        async with Mortals(model, lives, wrap).backend() as backend:
            answers = await asyncio.gather(
                *(answer(backend, model, one, f"request{number}") for number, one in enumerate(asked))
            )
            assert backend.outstanding == 0
            assert list(backend._requests) == []
            return answers, backend.restarts

    return asyncio.run(asyncio.wait_for(asked_together(), 120))


@pytest.mark.parametrize("name", BODIES)
def test_an_engine_may_die_after_any_event(model: LoadedModel, name: str) -> None:
    """Each event is a message of its own here, so that a choice's last text and its end come apart, too."""
    request = read(model, name)
    [whole], _ = run(model, [request], [])
    assert whole.chunks()[0]
    for killed_at in range(whole.events):
        [resumed], restarts = run(model, [request], [killed_at])
        assert restarts == 1
        assert resumed.chunks() == whole.chunks()
        assert resumed.said() == whole.said()
        for output in resumed.outputs.values():
            assert_time_is_accounted_for(output, engines_lost=1)


def assert_time_is_accounted_for(output: RequestOutput, engines_lost: int) -> None:
    """The breakdown is exact, and says of each choice how long it was on engines that died."""
    for breakdown in assert_exact(reply(output)):
        lost = {line.start_ns for line in breakdown.lines if line.what == "on an engine that died"}
        ended_before = not any(choice.timeline.lost for choice in output.choices)
        assert ended_before or 1 <= len(lost) <= 3 * engines_lost, "cut at the first and the last token"


@pytest.mark.parametrize("name", BODIES)
def test_no_engine_gives_more_than_a_token(model: LoadedModel, name: str) -> None:
    """Twenty deaths in a row. The logits that two engines compute for the same token are bitwise the same."""
    request = read(model, name)
    seen: dict[Any, bytes] = {}

    def watched(kernels: Any, sampler: Any) -> Any:
        made = WatchedSampler(sampler)
        made.seen = seen
        return kernels, made

    wrap = watched if len(request.prompts) == 1 else None  # it tells rows apart by their seeds
    [whole], _ = run(model, [request], [], wrap)
    [resumed], restarts = run(model, [request], [2 * len(request.prompts)] * 20, wrap)
    assert restarts >= min(20, whole.events // 4)
    assert resumed.chunks() == whole.chunks()
    assert resumed.said() == whole.said()


def test_a_seed_that_was_drawn_is_kept(model: LoadedModel) -> None:
    """Every engine computes the same logits for the tokens before it, and draws from them with the same seed."""
    seeds: set[int | None] = set()

    class Noting:
        def __init__(self, sampler: Any) -> None:
            self._sampler = sampler

        def sample(self, logits: Any, rows: Any) -> Any:
            seeds.update(row.params.seed for row in rows)
            return self._sampler.sample(logits, rows)

    request = read_request(CHAT, {"messages": ASKED, "max_tokens": 24, "stream": True}, model, ["small"])
    assert request.params.seed is None
    run(model, [request], [4, 4, 4], lambda kernels, sampler: (kernels, Noting(sampler)))
    assert len(seeds) == 1
    assert None not in seeds


@pytest.mark.parametrize("name", BODIES)
def test_a_reply_that_is_not_streamed_is_computed_again(model: LoadedModel, name: str) -> None:
    request = read(model, name, stream=False, stream_options=None)
    [whole], _ = run(model, [request], [])

    async def killed() -> tuple[Answer, int]:
        async with Mortals(model, []).backend() as backend:
            asking = asyncio.create_task(answer(backend, model, request, "request0"))
            client: Any = backend.client
            while not client._engine.outstanding or client._engine.scheduler.counters.steps < 3:
                await asyncio.sleep(0)
            client.kill()
            return await asking, backend.restarts

    resumed, restarts = asyncio.run(killed())
    assert restarts == 1
    assert resumed.chunks() == whole.chunks()
    assert resumed.said() == whole.said()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_many_requests_survive_many_deaths(model: LoadedModel, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(BODIES)), min_size=1, max_size=4))
    asked = [read(model, name) for name in names]
    whole, _ = run(model, asked, [])
    events = sum(one.events for one in whole)
    lives = data.draw(st.lists(st.integers(events // 6 + 2 * len(asked), events), max_size=5))
    with patch.object(local_backend, "MOST_DEATHS_OF_REQUEST", 1000):  # those that only wait are suspected, too
        resumed, _ = run(model, asked, lives)
    for before, after in zip(whole, resumed, strict=True):
        assert after.chunks() == before.chunks()
        assert [one[3:] for one in after.said()] == [one[3:] for one in before.said()], "not what the cache held"
        for output in after.outputs.values():
            assert_exact(reply(output))


# --- requests that do not go on -----------------------------------------------------------------------------------


def test_a_request_with_which_engines_keep_dying_is_ended(model: LoadedModel) -> None:
    """Those that came later are not suspected, nor is one that was given a token in between."""

    async def asked() -> None:
        mortals = Mortals(model, [3, 0])
        async with mortals.backend() as backend:
            poison = asyncio.create_task(answer(backend, model, read(model, "chat, drawn", stream=False), "poison"))
            stream = asyncio.create_task(answer(backend, model, read(model, "half characters"), "stream"))
            while backend.restarts < MOST_DEATHS_OF_REQUEST or backend.phase != "ready":
                await asyncio.sleep(0)
            with pytest.raises(EngineDiedError, match=r"killed by SIGKILL, as did the one before, each with this"):
                await poison
            with pytest.raises(EngineDiedError):
                await stream
            again = await answer(backend, model, read(model, "half characters"), "later")
            assert again.outputs
            assert backend.phase == "ready"

    asyncio.run(asked())


def test_a_client_that_leaves_while_the_engine_starts_again_is_let_go_at_once(model: LoadedModel) -> None:
    """Its output, for the metrics, comes from the new engine, with what had been generated."""

    async def left() -> None:
        mortals, late = Mortals(model, [5]), asyncio.Queue[RequestOutput]()
        async with mortals.backend() as backend:
            mortals.may_start.clear()
            events = backend.submit(submits(read(model, "half characters"), "a"), late.put_nowait)
            got = [await anext(events) for _ in range(5)]
            while backend.phase == "ready":
                await asyncio.sleep(0)
            await events.aclose()
            assert (backend.phase, backend.outstanding) == ("restarting", 0)
            mortals.may_start.set()
            [choice] = (await late.get()).choices
            assert (len(choice.token_ids), choice.finish_reason) == (len(got) - 1, "abort")
            assert list(backend._requests) == []

    asyncio.run(asyncio.wait_for(left(), 60))


def test_requests_that_come_while_the_engine_starts_again_wait_for_it(model: LoadedModel) -> None:
    async def asked() -> None:
        mortals = Mortals(model, [0])
        async with mortals.backend() as backend:
            mortals.may_start.clear()
            first = asyncio.create_task(answer(backend, model, read(model, "chat, drawn"), "first"))
            while backend.phase == "ready":
                await asyncio.sleep(0)
            second = asyncio.create_task(answer(backend, model, read(model, "chat, drawn"), "second"))
            await asyncio.sleep(0)
            mortals.may_start.set()
            assert [one.events for one in await asyncio.gather(first, second)] == [26, 26]
            assert backend.workers()[0].resumed == 1

    asyncio.run(asyncio.wait_for(asked(), 60))


def test_a_backend_that_drains_starts_an_engine_for_what_is_to_be_finished(model: LoadedModel) -> None:
    async def drained() -> None:
        async with Mortals(model, [5]).backend() as backend:
            stream = asyncio.create_task(answer(backend, model, read(model, "half characters"), "a"))
            backend.drain()
            assert (await stream).outputs
            assert backend.restarts == 1

    asyncio.run(asyncio.wait_for(drained(), 60))


def test_a_backend_that_is_stopped_while_it_starts_again_tells_its_callers(model: LoadedModel) -> None:
    async def stopped() -> None:
        mortals = Mortals(model, [5])
        async with mortals.backend() as backend:
            mortals.may_start.clear()
            stream = asyncio.create_task(answer(backend, model, read(model, "half characters"), "a"))
            while backend.phase == "ready":
                await asyncio.sleep(0)
        with pytest.raises(EngineDiedError):
            await stream

    asyncio.run(asyncio.wait_for(stopped(), 60))


# --- what no engine can have given --------------------------------------------------------------------------------

FOUR = {"token_ids": (1, 2, 3, 4), "token_ns": (5, 6, 7, 8), "characters": 4}


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ([FOUR, FOUR], "has 2 choices; the request has 1"),
        ([FOUR | {"token_ns": (5,)}], "has 4 tokens of choice 0 and 1 times"),
        ([{"token_ids": (1,) * 9, "token_ns": (5,) * 9}], "for at most 8"),
        ([FOUR | {"token_ids": (1, 2, 3, 9999)}], "has token 9999; the vocabulary is 0 to 262"),
        ([FOUR | {"token_ids": (-1, 2, 3, 4)}], "has token -1; the vocabulary is 0 to 262"),
        ([FOUR | {"token_ids": (1, 7, 3, 4)}], "has tokens of choice 0 after one that ended it"),
        ([FOUR | {"characters": 3}], "has 3 characters of choice 0; its tokens give 4"),
        ([FOUR | {"packed_logprobs": (b"none",)}], "has log-probabilities that cannot be read"),
        ([FOUR | {"ended": ChoiceEnd("stop", 4)}], "has the end of every choice"),
    ],
)
def test_what_does_not_belong_to_the_request_is_refused(model: LoadedModel, choices: Any, problem: str) -> None:
    so_far = RequestSoFar(((1, 9),), tuple(ChoiceSoFar(**choice) for choice in choices))
    params = SamplingParams(max_tokens=8, stop_token_ids=[7], seed=1)
    with engine(model=model) as made:
        with pytest.raises(InvalidParameterError, match=problem):
            made.submit([1, 2], params, stream=True, so_far=so_far)
        with pytest.raises(InvalidParameterError, match="that are not in order"):
            made.submit([1, 2], params, stream=True, so_far=RequestSoFar(((9, 1),)))
        assert_no_residue(made)
