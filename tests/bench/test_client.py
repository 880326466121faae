"""The load generator's client: what a server may send, well or badly, and what is said of it."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import DONE, Answer, Peer, asked, delta, event, listing, serving, stream, text, usage

from twostep.bench.client.address import base_url
from twostep.bench.client.client import Ask, connect
from twostep.bench.client.event_stream import ERROR, Event, SseParser
from twostep.bench.client.outcome import MAX_DETAIL, Counting, FailureError, FailureKind, Outcome
from twostep.bench.client.reply import ChunkArrival, StreamReply, spread, token_times
from twostep.bench.client.target import Target
from twostep.bench.load.run_record import Server
from twostep.errors import InvalidParameterError, TargetError

THREE = [text(" a"), text(" b"), text(" c", "length")]


# --- server-sent events -------------------------------------------------------------------------------------------

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
FIELDS = st.sampled_from([": keep-alive", "event: message", "id: 7", "retry: 10", "unknown"])
DATA = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.tuples(st.lists(DATA, min_size=1, max_size=3), st.lists(FIELDS, max_size=2))), ENDS, st.data())
def test_events_are_the_same_however_they_are_cut(
    events: list[tuple[list[str], list[str]]], end: str, data: st.DataObject
) -> None:
    lines = [[*(f"data: {line}" for line in datas), *fields, ""] for datas, fields in events]
    sent = "".join(line + end for event in lines for line in event).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)))))
    parser, found = SseParser(), list[Event]()
    for begin, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        found += parser.feed(sent[begin:stop])
    assert [event.data.decode() for event in found] == ["\n".join(datas) for datas, _ in events]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r\n"])
def test_an_event_is_there_with_its_last_byte(end: bytes) -> None:
    parser = SseParser()
    needed = len(end) - end.endswith(b"\r\n")  # the line's end is the CR already
    counts = [len(parser.feed(bytes([byte]))) for byte in b"data:x" + end]
    assert counts == [*[0] * (5 + needed), 1, *[0] * (len(end) - needed)]


@pytest.mark.parametrize("sent", [b"data: " + b"x" * 20, b"data: 12345\n" * 3, b": " + b"x" * 20])
def test_an_event_without_end_is_not_kept(sent: bytes) -> None:
    parser = SseParser(max_event_bytes=16)
    for byte in sent[:15]:
        parser.feed(bytes([byte]))
    with pytest.raises(FailureError, match="more than 16 bytes"):
        parser.feed(sent[15:])


def test_an_unfinished_event_is_none() -> None:
    assert SseParser().feed(b"data: 1\n\ndata: 2\n") == [Event(b"1")]


def test_events_have_a_kind_of_their_own() -> None:
    sent = b"event: error\ndata: 1\n\ndata: 2\n\nevent:a\n\ndata: 3\n\nerror: 4\n\n"
    found = SseParser().feed(sent)
    assert found == [Event(b"1", ERROR), Event(b"2"), Event(b"3"), Event(b"4", ERROR)]


# --- counting -----------------------------------------------------------------------------------------------------


def arrivals(*characters: int, mute: tuple[int, ...] = (), stated: list[int] | None = None) -> list[ChunkArrival]:
    """At 0, 10, 20 ... ns."""
    said: list[int | None] = [*stated] if stated else [None] * len(characters)
    return [ChunkArrival(10 * i, n, i in mute, said[i]) for i, n in enumerate(characters)]


@pytest.mark.parametrize(
    ("chunks", "total", "times", "counted"),
    [
        (arrivals(3, 4, 5), 3, (0, 10, 20), Counting.STATED),
        (arrivals(3, 4, 5), None, (0, 10, 20), Counting.ASSUMED),
        (arrivals(3, 0, 5, mute=(1,)), 3, (0, 10, 20), Counting.STATED),
        (arrivals(3, 0, 5, mute=(1,)), 2, (0, 20), Counting.STATED),
        (arrivals(3, 0, 5, mute=(1,)), None, (0, 20), Counting.ASSUMED),
        (arrivals(2, 4), 8, (0, 0, 0, 10, 10, 10, 10, 10), Counting.SPREAD),
        (arrivals(5, 5, 5), 2, (0, 10), Counting.SPREAD),
        (arrivals(9, 9, stated=[1, 4]), 5, (0, 10, 10, 10, 10), Counting.STATED),
        (arrivals(9, 9, stated=[1, 4]), None, (0, 10, 10, 10, 10), Counting.STATED),
        (arrivals(9, 0, 9, stated=[1, 1, 1]), 3, (0, 10, 20), Counting.STATED),
        (arrivals(9, 9, stated=[1, 4]), 2, (0, 10), Counting.STATED),
        (arrivals(9, 9, stated=[1, 4]), 3, (0, 0, 10), Counting.SPREAD),
        (arrivals(), 0, (), Counting.ASSUMED),
        (arrivals(), 5, (), Counting.SPREAD),
        (arrivals(4), 0, (0,), Counting.ASSUMED),
    ],
)
def test_token_times(chunks: list[ChunkArrival], total: int | None, times: tuple[int, ...], counted: Counting) -> None:
    assert token_times(chunks, total) == (times, counted)


@given(st.integers(0, 1000), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_spreading_loses_nothing(total: int, weights: list[int]) -> None:
    parts = spread(total, weights)
    assert sum(parts) == total
    assert len(parts) == len(weights)
    assert min(parts) >= (total >= len(weights))
    exact = [1 + (total - len(weights)) * weight / sum(weights) for weight in weights]
    assert total < len(weights) or all(abs(part - share) < 1 for part, share in zip(parts, exact, strict=True))


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_whole_answer() -> None:
    outcome = asked(stream(*THREE, usage(7, 3, cached_tokens=4), DONE))
    assert (outcome.failure, len(outcome.token_ns), outcome.counted) == (None, 3, Counting.STATED)
    assert (outcome.input_tokens, outcome.cached_tokens, outcome.request_id) == (7, 4, "cmpl-1")
    assert outcome.sent_ns < outcome.token_ns[0] <= outcome.token_ns[-1] <= outcome.ended_ns


def test_a_chat_begins_with_a_role_and_may_think_and_call() -> None:
    function = {"index": 0, "function": {"name": "f", "arguments": ""}}
    parts = [delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a")]
    calls = [delta(tool_calls=[function]), delta(tool_calls=[{"function": {"arguments": "{}"}}]), delta("tool_calls")]
    outcome = asked(stream(*parts, *calls, usage(1, 4), DONE), tokens=4, endpoint="chat")
    assert (outcome.failure, len(outcome.token_ns), outcome.counted) == (None, 4, Counting.STATED)


def test_several_tokens_in_a_chunk_that_says_so() -> None:
    ids = [{"choices": [{"text": "abc", "token_ids": ids, "finish_reason": None}]} for ids in ([5], [6, 7])]
    running = [text("a", usage={"completion_tokens": 1}), text("bcd", usage={"completion_tokens": 3})]
    timed = [text("a", timings={"predicted_n": 2}), text("b", timings={"predicted_n": 3})]
    for chunks in ([event(one) for one in ids], running, timed):
        outcome = asked(stream(*chunks, text("", "length"), usage(2, 3), DONE))
        assert (outcome.failure, outcome.counted, len(outcome.token_ns)) == (None, Counting.STATED, 3)
        assert len(set(outcome.token_ns)) <= 2


def test_counts_that_go_back_state_nothing() -> None:
    """1, 4, 2 tokens so far, 4 in the end: what was added adds up, and is not to be believed."""
    counts = [text("ab", usage={"completion_tokens": so_far}) for so_far in (1, 4, 2)]
    outcome = asked(stream(*counts, text("", "length"), usage(2, 4), DONE), tokens=4)
    assert (outcome.failure, outcome.counted, len(outcome.token_ns)) == (None, Counting.SPREAD, 4)


@pytest.mark.parametrize("total", [None, usage(2, 0), event({"choices": [], "usage": None})])
def test_a_server_that_gives_no_total_has_chunks_taken_for_tokens(total: bytes | None) -> None:
    outcome = asked(stream(*THREE, *filter(None, [total]), DONE))
    assert (outcome.failure, outcome.counted, len(outcome.token_ns)) == (None, Counting.ASSUMED, 3)


def test_usage_with_the_end_of_the_answer_is_no_token() -> None:
    """As llama.cpp has it."""
    last = text("", "length", usage={"prompt_tokens": 2, "completion_tokens": 4})
    outcome = asked(stream(text("ab"), text("abcdef"), last, DONE), tokens=4)
    assert (outcome.failure, outcome.counted, len(outcome.token_ns)) == (None, Counting.SPREAD, 4)


def test_a_stream_of_single_bytes() -> None:
    async def answer(peer: Peer) -> None:
        await peer.begin()
        for byte in b": hello\r\n\r\n" + b"".join([*THREE, usage(2, 3), DONE]):
            await peer.part(bytes([byte]))
        await peer.end()

    outcome = asked(answer)
    assert (outcome.failure, len(outcome.token_ns)) == (None, 3)


def test_the_content_type_is_told_in_any_form() -> None:
    async def answer(peer: Peer) -> None:
        await peer.begin(content_type="Text/Event-Stream ; Charset=UTF-8", content_encoding="Identity")
        for part in (*THREE, DONE):
            await peer.part(part)
        await peer.end()

    assert asked(answer).failure is None


def test_all_in_one_read() -> None:
    outcome = asked(stream(b"".join([*THREE, usage(2, 3), DONE])))
    assert (outcome.failure, len(set(outcome.token_ns)), len(outcome.token_ns)) == (None, 1, 3)


def test_done_may_be_missing_after_a_finish_reason() -> None:
    assert asked(stream(*THREE)).failure is None


def test_an_answer_is_whole_with_done_though_the_connection_stays_open() -> None:
    async def answer(peer: Peer) -> None:
        await peer.begin()
        await peer.part(b"".join([*THREE, DONE]))
        await peer.gone()

    assert asked(answer).failure is None


def test_a_body_that_ends_with_the_connection() -> None:
    async def answer(peer: Peer) -> None:
        await peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n")
        await peer.send(b"".join(THREE))

    assert asked(answer).failure is None


# --- failures -----------------------------------------------------------------------------------------------------


def then(*parts: bytes, hang: bool = False, status: str = "200 OK", **headers: str) -> Answer:
    """These parts, and then the connection is closed without the end of the message, or nothing."""

    async def answer(peer: Peer) -> None:
        await peer.begin(status, **headers)
        for part in parts:
            await peer.part(part)
        if hang:
            await peer.gone()

    return answer


def raw(data: bytes, hang: bool = False) -> Answer:
    async def answer(peer: Peer) -> None:
        await peer.send(data)
        if hang:
            await peer.gone()

    return answer


async def endless(peer: Peer) -> None:
    """As fast as the client takes it."""
    await peer.begin()
    while True:
        await peer.part(text("a") * 100)


async def endless_comments(peer: Peer) -> None:
    await peer.begin()
    while True:
        await peer.part(b": still here\n\n")
        await asyncio.sleep(0.01)


async def endless_refusal(peer: Peer) -> None:
    await peer.begin("500 Internal Server Error")
    while True:
        await peer.part(b"x" * 1000)


CHOICE = {"index": 0, "text": "a", "finish_reason": None}
OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TOO_MANY = b'{"error": {"message": "the queue\\nis full", "type": "queue_full"}}'


@pytest.mark.parametrize(
    ("answer", "kind", "detail", "tokens"),
    [
        (then(*THREE[:2]), FailureKind.DROPPED, "closed before the reply was complete", 2),
        (then(*THREE), FailureKind.DROPPED, "closed before the reply was complete", 3),
        (stream(*THREE[:2]), FailureKind.DROPPED, "without finish_reason", 2),
        (raw(b""), FailureKind.DROPPED, "closed before the reply was complete", 0),
        (raw(b"HTTP/1.1 200"), FailureKind.DROPPED, "closed before the reply was complete", 0),
        (raw(OK_HEAD + b"Content-Length: 500\r\n\r\ndata: "), FailureKind.DROPPED, "closed", 0),
        (raw(b"SSH-2.0-OpenSSH\r\n", hang=True), FailureKind.GARBAGE, "not HTTP: b'SSH-2.0", 0),
        (raw(b"\0" * 100000), FailureKind.GARBAGE, "not HTTP", 0),
        (raw(b"HTTP/1.1 two hundred\r\n\r\n"), FailureKind.GARBAGE, "not HTTP", 0),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000), FailureKind.GARBAGE, "not HTTP", 0),
        (raw(OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"), FailureKind.GARBAGE, "not HTTP", 0),
        (then(b"{}", content_type="application/json"), FailureKind.GARBAGE, "content type application/json", 0),
        (then(THREE[0], b"data: {broken\n\n"), FailureKind.GARBAGE, "not JSON", 1),
        (then(b"data: \xff\xfe\n\n"), FailureKind.GARBAGE, "not JSON", 0),
        (then(b"data: " + b"[" * 100_000 + b"\n\n"), FailureKind.GARBAGE, "not JSON", 0),
        (then(b"data: [1]\n\n"), FailureKind.GARBAGE, "not a JSON object", 0),
        (then(event({"hello": 1})), FailureKind.GARBAGE, "malformed chunk", 0),
        (then(event({"choices": [{"text": 5}]})), FailureKind.GARBAGE, "malformed chunk", 0),
        (then(event({"choices": 5})), FailureKind.GARBAGE, "malformed chunk", 0),
        (then(event({"choices": [None]})), FailureKind.GARBAGE, "malformed chunk", 0),
        (then(event({"choices": [], "usage": {"completion_tokens": -1}})), FailureKind.GARBAGE, "malformed chunk", 0),
        (then(b"data: " + b"x" * (1 << 20)), FailureKind.GARBAGE, "an event of more than", 0),
        (then(THREE[0], event({"error": {"message": "out of memory"}})), FailureKind.ERROR, "out of memory", 1),
        (then(event({"error": "plain"})), FailureKind.ERROR, "plain", 0),
        (then(b"event: error\n" + event({"message": "too hot"})), FailureKind.ERROR, "too hot", 0),
        (then(b"event: error\ndata: plain\n\n"), FailureKind.ERROR, "plain", 0),
        (then(THREE[0], b'error: {"code": 500, "message": "old"}\n\n'), FailureKind.ERROR, "old", 1),
        (then(event({"choices": [CHOICE, CHOICE]})), FailureKind.GARBAGE, "choices 0, 0 in a chunk", 0),
        (then(THREE[0], event({"choices": [{**CHOICE, "index": 1}]})), FailureKind.GARBAGE, "choices 1 in", 1),
        (stream(THREE[0], usage(10**15, 3)), FailureKind.GARBAGE, "1000000000000000 is not a token count", 1),
        (stream(THREE[0], usage(1, 1, cached_tokens=1 << 31)), FailureKind.GARBAGE, "is not a token count", 1),
        (then(THREE[0], content_encoding="gzip"), FailureKind.GARBAGE, "content encoding gzip, although identity", 0),
        (then(b"\x1f", status="500 No", content_encoding="GZIP"), FailureKind.STATUS, "500: (encoded as gzip)", 0),
        (then(THREE[0], content_type="text/event-streamX"), FailureKind.GARBAGE, "text/event-streamX instead", 0),
        (then(TOO_MANY, status="429 Too Many", retry_after="7"), FailureKind.OVERLOADED, "429, Retry-After 7: the", 0),
        (then(b"<html>", status="503 No"), FailureKind.OVERLOADED, "503: <html>", 0),
        (then(b"", status="302 Found", location="/v2"), FailureKind.STATUS, "302, Location /v2", 0),
        (endless_refusal, FailureKind.STATUS, "500: xxx", 0),
        (stream(THREE[0], text("b", "stop"), usage(2, 2), DONE), FailureKind.SHORT, "2 tokens of 3, finish", 2),
        (stream(THREE[0], text("b", "stop"), DONE), FailureKind.SHORT, "2 tokens of 3", 2),
        (stream(text("", "stop"), DONE), FailureKind.EMPTY, "stop", 0),
        (stream(DONE), FailureKind.EMPTY, "None", 0),
        (endless, FailureKind.TOO_LONG, "more than 1036 tokens", 1036),
        (stream(text("a"), usage(2, 10**9), DONE), FailureKind.TOO_LONG, "more than 1036", None),
    ],
)  # fmt: skip
def test_failures_by_kind(answer: Answer, kind: FailureKind, detail: str, tokens: int | None) -> None:
    outcome = asked(answer)
    assert outcome.failure is not None
    assert (outcome.failure.kind, detail in outcome.failure.detail) == (kind, True), outcome.failure
    assert len(outcome.failure.detail) <= MAX_DETAIL
    assert tokens in (None, len(outcome.token_ns))
    assert outcome.times().failure == kind


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (then(THREE[0], hang=True), FailureKind.STALLED),
        (raw(b"", hang=True), FailureKind.STALLED),
        (raw(b"HTT", hang=True), FailureKind.STALLED),
        (endless_comments, FailureKind.TOO_LONG),
    ],
)
def test_a_server_that_does_not_come_to_an_end(answer: Answer, kind: FailureKind) -> None:
    outcome = asked(answer, stall_s=0.2, request_s=0.6)
    assert outcome.failure is not None
    assert outcome.failure.kind == kind


def test_a_short_answer_is_whole_where_the_server_was_not_told_to_go_on() -> None:
    answer = stream(text("a"), text("b", "stop"), usage(2, 2), DONE)
    assert asked(answer, ignore_eos=False).failure is None
    assert asked(answer, extra={"ignore_eos": False}).failure is None


def test_uncounted_chunks_that_end_by_length_are_not_called_short() -> None:
    outcome = asked(stream(text("a b"), text("c d", "length"), DONE), tokens=4)
    assert (outcome.failure, outcome.counted, len(outcome.token_ns)) == (None, Counting.ASSUMED, 2)


def test_a_server_that_has_gone() -> None:
    async def ask() -> Outcome:
        async with serving(stream(*THREE)) as url:
            client = await connect(Target(url))
        return await client.ask(Ask(0, "a", 1, 3, 0), 0)

    failure = asyncio.run(ask()).failure
    assert failure is not None
    assert failure.kind == FailureKind.REFUSED


def test_a_request_that_is_cancelled_tells_what_it_has_seen() -> None:
    async def ask() -> Outcome:
        async with serving(then(THREE[0], hang=True)) as url:
            client = await connect(Target(url))
            asking = asyncio.create_task(client.ask(Ask(0, "a", 1, 3, 0), 0))
            while not client.pieces:
                await asyncio.sleep(0.001)
            asking.cancel()
            outcome = await asking
            assert client.pieces == 0
            return outcome

    outcome = asyncio.run(ask())
    assert outcome.failure is not None
    assert (outcome.failure.kind, len(outcome.token_ns)) == (FailureKind.CANCELLED, 1)


def test_text_is_not_kept() -> None:
    reply = StreamReply(asked_tokens=3, must_be_full=False)
    reply.begin(200, {"content-type": "text/event-stream"})
    for _ in range(100):
        assert not reply.body(text("x" * 100_000), at_ns=1)
    assert reply.pieces == 100
    assert "x" * 100 not in repr(vars(reply))


# --- what is sent -------------------------------------------------------------------------------------------------


def body_of(owner: str = "", **target: Any) -> dict[str, Any]:
    made = Target("http://host", **target)
    request = made.request(Server("http://host/v1", made.endpoint, "small", owner), "Once upon", 5)
    assert request.path == ("/completions" if made.endpoint == "completions" else "/chat/completions")
    body: dict[str, Any] = json.loads(request.body)
    return body


def test_the_body_of_a_completion_and_of_a_chat() -> None:
    common = {
        "model": "small", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "seed": 0, "ignore_eos": True,
    }  # fmt: skip
    assert body_of() == {**common, "prompt": "Once upon"}
    assert body_of(endpoint="chat") == {**common, "messages": [{"role": "user", "content": "Once upon"}]}


def test_fields_of_the_user_and_of_known_servers() -> None:
    body = body_of(extra={"temperature": 0.7, "top_k": 3}, ignore_eos=False, length_field="max_completion_tokens")
    assert (body["temperature"], body["top_k"], body["max_completion_tokens"]) == (0.7, 3, 5)
    assert not body.keys() & {"ignore_eos", "max_tokens"}
    assert body_of("vllm")["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body_of("llamacpp")["timings_per_token"] is True


def test_what_the_client_has_to_set_itself_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="n, stream, which the client sets itself"):
        Target("http://host", extra={"n": 2, "stream": False})
    with pytest.raises(InvalidParameterError, match="header"):
        Target("http://host", headers={"X": "a\nb"})
    with pytest.raises(InvalidParameterError, match="headers contain host"):
        Target("http://host", headers={"Host": "other"})
    with pytest.raises(InvalidParameterError, match="token ids need --endpoint completions"):
        Target("http://host", endpoint="chat").request(Server("", "chat", "small"), [1, 2], 1)


def test_headers_and_key_are_sent_and_not_shown() -> None:
    seen: list[dict[str, str]] = []

    async def answer(peer: Peer) -> None:
        seen.append(peer.headers)
        await stream(*THREE, DONE)(peer)

    assert asked(answer, api_key="secret", headers={"X-Team": "blue"}).failure is None
    assert (seen[0]["authorization"], seen[0]["x-team"]) == ("Bearer secret", "blue")
    assert seen[0]["accept-encoding"] == "identity"
    assert "secret" not in repr(Target("http://host", api_key="secret"))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host", "http://host/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/v3", "https://host/v3"),
        ("http://host/path", "http://host/path/v1"),
        ("http://[::1]:80/vine", "http://[::1]:80/vine/v1"),
    ],
)
def test_where_the_api_is(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://[::1", "http://h:x", "http://h/v1?a=1", ""]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InvalidParameterError, match="it must be like"):
        base_url(url)


@pytest.mark.parametrize("url", ["http://user:secret@host", "user:secret@host", "http://user:secret@host:x"])
def test_a_password_in_the_url_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidParameterError, match="credentials by --api-key") as caught:
        base_url(url)
    assert "secret" not in str(caught.value)


# --- which model --------------------------------------------------------------------------------------------------


def connected(listed: Any, status: str = "200 OK", model: str | None = None) -> Server:
    """To a server that lists these."""

    async def connecting() -> Server:
        async with serving(stream(), listing(listed, status)) as url:
            return (await connect(Target(url, model=model))).server

    return asyncio.run(connecting())


ONE = {"data": [{"id": "a", "owned_by": "vllm"}]}
TWO = {"data": [{"id": "a", "owned_by": "vllm"}, {"id": "b"}]}


def test_the_only_model_is_asked() -> None:
    found = connected(ONE)
    assert (found.model, found.owner) == ("a", "vllm")


def test_a_named_model_is_asked_whatever_is_listed() -> None:
    assert connected(TWO, model="b").model == "b"
    assert connected(TWO, model="a").owner == "vllm"
    assert connected({}, "404 Not Found", model="a").owner == ""


@pytest.mark.parametrize(
    ("listed", "status", "problem"),
    [
        (TWO, "200 OK", r"lists 2 models \(a, b\); choose one \(--model\)"),
        ({"data": []}, "200 OK", "lists 0 models"),
        ({"data": [{"id": "a\x1b[2J"}, {"id": "b" * 9999}]}, "200 OK", r"2 models \(a\ufffd\[2J, b{200,300}…\)"),
        ({}, "404 Not Found", r"/models: status 404: {}; name the model \(--model\)"),
        ([], "200 OK", r"not a list of models.*; name the model \(--model\)"),
        ({}, "503 Service Unavailable", r"/models: status 503: {}$"),
        ({}, "302 Found", "302, Location /elsewhere"),
        ({"data": [5]}, "200 OK", "not a list of models"),
        ("x" * (5 << 20), "200 OK", "more than 4194304 bytes"),
    ],
)
def test_a_server_that_does_not_say_its_model(listed: Any, status: str, problem: str) -> None:
    with pytest.raises(TargetError, match=problem):
        connected(listed, status)


def test_no_server_at_all() -> None:
    async def unused() -> str:
        async with serving(stream()) as url:
            return url

    with pytest.raises(TargetError, match="/v1: Connection refused; no server is running there"):
        asyncio.run(connect(Target(asyncio.run(unused()))))


def test_a_server_without_tls() -> None:
    """It takes the first bytes of TLS for a bad request and says so in plain text, as most do."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def connecting() -> None:
        listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with listening:
            await connect(Target(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))

    with pytest.raises(TargetError, match=r"/models: no TLS connection: .*; does the server use https\?"):
        asyncio.run(connecting())
