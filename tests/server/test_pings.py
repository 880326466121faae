"""What a client of a stream sees before its first token: headers and comments, or an error with a status of its own."""

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from support.http_server import NAME, Host, Served, within

from twostep.bench.client.reply import StreamReply
from twostep.cli.chat import Said
from twostep.cli.remote import RemotePartner
from twostep.openai_api.api_error import ApiError
from twostep.server.http import replies

SHORT: dict[str, Any] = {"model": NAME, "prompt": "One, two,", "max_tokens": 3, "ignore_eos": True, "stream": True}
HOG: dict[str, Any] = {**SHORT, "max_tokens": 2000, "n": 8}


@pytest.fixture
def front(server_host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(replies, "HEADERS_S", 0.2)
    monkeypatch.setattr(replies, "PING_S", 0.1)
    with server_host.front() as made:
        yield made


@contextmanager
def full(front: Served, host: Host) -> Iterator[None]:
    """All seats are taken while the block runs."""
    with httpx.stream("POST", f"{front.url}/v1/completions", json=HOG, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert within(30, lambda: host.snapshot().running == 8)
        yield


def waiting(front: Served, **more: Any) -> contextlib.AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{front.url}/v1/completions", json={**SHORT, **more}, timeout=60)


def test_headers_and_comments_come_while_a_stream_waits(front: Served, server_host: Host) -> None:
    with contextlib.ExitStack() as hogged:
        hogged.enter_context(full(front, server_host))
        with waiting(front) as reply:
            assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            lines = reply.iter_lines()
            assert [next(lines) for _ in range(6)] == [": ping", ""] * 3
            hogged.close()
            data = [line for line in lines if line and line != ": ping"]
    assert data[-1] == "data: [DONE]"
    assert json.loads(data[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_stream_whose_tokens_come_in_time_has_no_comment(front: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "HEADERS_S", 60)
    monkeypatch.setattr(replies, "PING_S", 60)
    with waiting(front) as reply:
        assert not [line for line in reply.iter_lines() if line.startswith(":")]


def test_an_error_before_the_headers_has_its_status(
    front: Served, server_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "HEADERS_S", 30)
    with full(front, server_host), waiting(front, timeout_s=0.1) as reply:
        assert reply.status_code == 504
        assert json.loads(reply.read())["error"]["code"] == "timeout"


def test_an_error_after_them_is_an_event(front: Served, server_host: Host) -> None:
    ending = ApiError("the server is shutting down", status=503, code="shutting_down")
    with full(front, server_host), waiting(front) as reply:
        assert reply.status_code == 200
        server_host.loop.call_soon_threadsafe(front.state.in_flight.cancel_all, ending)
        *_, error, end = [line for line in reply.iter_lines() if line.startswith("data: ")]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert end == "data: [DONE]"


def test_what_is_refused_at_once_has_its_status(front: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "HEADERS_S", 0)
    with waiting(front, max_tokens=10**6) as reply:
        assert reply.status_code == 400


def test_gaps_between_tokens_have_comments_too(front: Served, server_host: Host) -> None:
    """A stream that was preempted, say: here the engine's events are held back."""
    events = server_host.backend.submit

    async def slow(requests: Any, on_late_output: Any) -> AsyncIterator[Any]:
        async for event in events(requests, on_late_output):
            yield event
            await asyncio.sleep(0.5)

    server_host.backend.submit = slow  # type: ignore[method-assign]
    try:
        with waiting(front) as reply:
            lines = [line for line in reply.iter_lines() if line]
    finally:
        del server_host.backend.submit  # type: ignore[method-assign]
    first, last = lines.index(next(line for line in lines if line.startswith("data"))), len(lines) - 1
    assert ": ping" in lines[first:last]


# --- clients ------------------------------------------------------------------------------------------------------


def test_the_official_client_copes(front: Served, server_host: Host) -> None:
    asked = {key: value for key, value in SHORT.items() if key != "ignore_eos"}
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with full(front, server_host):
            stream = client.completions.create(**asked, temperature=0)  # returns with the headers
        with stream:
            waited = "".join(chunk.choices[0].text for chunk in stream)
        at_once = client.completions.create(**{**asked, "stream": False}, temperature=0).choices[0].text
    assert waited == at_once != ""


def test_twostep_chat_copes(front: Served, server_host: Host) -> None:
    options = argparse.Namespace(
        url=front.url, api_key=None, temperature=0, max_tokens=3, seed=None, model=None, insecure=False, cacert=None
    )
    partner = RemotePartner(options)
    told: list[str] = []

    def ask() -> None:
        told.extend(partner.answer([{"role": "user", "content": "Hello"}], Said()))

    asking = threading.Thread(target=ask)
    with full(front, server_host):
        asking.start()
        assert within(30, lambda: server_host.snapshot().waiting == 1)
        time.sleep(3 * replies.HEADERS_S)  # so that comments come, on an idle machine at least
        assert not told
    asking.join(30)
    assert "".join(told)


def test_twostep_bench_counts_no_comment() -> None:
    """Neither as the first token nor as a stall's end."""
    chunk = {"id": "a", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    reply = StreamReply(1, must_be_full=False)
    reply.begin(200, {"content-type": "text/event-stream"})
    assert not reply.body(replies.PING * 3, 1)
    assert not reply.body(f"data: {json.dumps(chunk)}\n\n".encode(), 2)
    assert not reply.body(replies.PING, 3)
    assert reply.body(b"data: [DONE]\n\n", 4)
    assert reply.tokens()[0] == (2,)
