"""What the server takes on: keys, lengths, queue, connections, origins; and that nobody waits for a step meanwhile."""

import asyncio
import json
import re
import threading
import time
from dataclasses import replace
from statistics import median
from typing import Any

import httpx
import pytest
from support.http_server import NAME, Host, Served, within
from support.raw_http import connected, posted, rest

from twostep.model.loaded import LoadedModel
from twostep.model.metadata import Metadata
from twostep.model.template import TEMPLATE_KEY
from twostep.model.tokenizer import Tokenizer
from twostep.server.http.request_body import SHORT_BYTES, THREADS, Bodies

SHORT: dict[str, Any] = {"model": NAME, "prompt": "One, two,", "max_tokens": 2}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 4000, "ignore_eos": True}


def complete(front: Served, body: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(f"{front.url}/v1/completions", json=body, timeout=30, **more)


def assert_error(reply: httpx.Response, status: int, code: str) -> None:
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text


# --- who may ask --------------------------------------------------------------------------------------------------


def test_keys(server_host: Host) -> None:
    with server_host.front(api_key=("first", "sécond")) as front:
        for wrong in (
            {},
            {"Authorization": "Bearer second"},
            {"Authorization": "first"},
            {"Authorization": b"Bearer \xff"},
        ):
            reply = complete(front, SHORT, headers=wrong)
            assert_error(reply, 401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "first" not in reply.text
        for key in ("first", "sécond"):
            assert complete(front, SHORT, headers={"Authorization": f"Bearer {key}".encode()}).status_code == 200
        assert httpx.get(f"{front.url}/health").status_code == httpx.get(f"{front.url}/ready").status_code == 200
        assert httpx.get(f"{front.url}/v1/models").status_code == httpx.get(f"{front.url}/metrics").status_code == 401


def test_other_origins_only_if_asked(server_host: Host, server: Served) -> None:
    page = {"Origin": "https://chat.example"}
    assert "access-control-allow-origin" not in complete(server, SHORT, headers=page).headers
    with server_host.front(allowed_origins=("https://chat.example",), api_key=("key",)) as front:
        refused = complete(front, SHORT, headers=page)
        named = "authorization,x-stainless-os"
        asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": named}
        preflight = httpx.options(f"{front.url}/v1/completions", headers=asks)
        other = complete(front, SHORT, headers={"Origin": "https://other.example"})
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert refused.status_code == 401
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (200, named)
    assert "access-control-allow-origin" not in other.headers
    assert other.status_code == 403


# --- how much -----------------------------------------------------------------------------------------------------


def test_long_bodies(server_host: Host) -> None:
    """CASES 33. Announced or not."""
    with server_host.front(max_body_bytes=1000) as front:
        assert complete(front, SHORT).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            announced = httpx.post(f"{front.url}{path}", content=b"x" * 1001)
            assert_error(announced, 413, "body_too_long")
            in_pieces = httpx.post(f"{front.url}{path}", content=iter([b"x" * 100] * 11))
            assert_error(in_pieces, 413, "body_too_long")
        assert front.state.admission_queue.size == 0


def test_long_bodies_share_their_room(server_host: Host) -> None:
    """One that is late keeps out other long ones, not short ones."""
    with server_host.front() as front:
        front.state.bodies = Bodies(max_bytes=200_000, long_bytes=200_000)
        with connected(front.url) as late:
            late.sendall(posted("/tokenize", b"x" * 150_000)[:-1])
            assert within(60, lambda: front.state.bodies.reserved >= 149_000)
            full = httpx.post(f"{front.url}/tokenize", json={"prompt": "x" * 100_000})
            short = complete(front, SHORT)
        assert within(60, lambda: front.state.bodies.reserved == 0)
        again = httpx.post(f"{front.url}/tokenize", json={"prompt": "x" * 100_000}, timeout=30)
    assert_error(full, 429, "queue_full")
    assert short.status_code == again.status_code == 200


def test_short_bodies_do_not_wait_for_long_ones(server_host: Host) -> None:
    """And work for whoever has gone meanwhile is never begun."""
    threads_go_on = threading.Event()
    with server_host.front() as front:
        bodies = front.state.bodies
        for _ in range(THREADS):
            bodies.threads(SHORT_BYTES + 1).submit(threads_go_on.wait, 60)
        try:
            with connected(front.url) as long:
                long.sendall(posted("/tokenize", {"prompt": "x" * 100_000}))
                assert within(60, lambda: bodies.reserved > 100_000 and bool(front.state.in_flight))
                assert complete(front, SHORT).status_code == 200
            assert within(60, lambda: bodies.reserved == 0)
        finally:
            threads_go_on.set()


def test_a_body_that_is_understood_takes_no_room(server: Served) -> None:
    body = {**LONG, "stream": True, "user": "x" * 100_000}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30):
        assert server.state.in_flight
        assert server.state.bodies.reserved == 0


WORDS = "The tortoise and the hare. "


@pytest.mark.parametrize(
    ("path", "body", "param", "numbers"),
    [
        ("/v1/completions", {"prompt": [7] * 8193}, "prompt", {"8193", "8192"}),
        ("/v1/completions", {"prompt": [[7], [7] * 8193]}, "prompt", {"8193", "8192"}),
        ("/v1/completions", {"prompt": WORDS * 30_000}, "prompt", {"810000", "8192", "81", "663552"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": WORDS * 30_000}]},
            "messages",
            {"8192", "81", "663552"},
        ),
        ("/detokenize", {"tokens": [7] * 8193}, "tokens", {"8193", "8192"}),
    ],
)
def test_what_is_far_too_long_is_refused_before_it_is_worked_on(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str, numbers: set[str]
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=30)
    assert_error(reply, 400, "context_length_exceeded")
    message = reply.json()["error"]["message"]
    assert message.startswith(f"{param} has ")
    assert numbers <= set(re.findall("[0-9]+", message))


@pytest.mark.parametrize(
    "body", [{"prompt": WORDS * 40_000}, {"messages": [{"role": "user", "content": WORDS * 40_000}]}]
)
def test_texts_to_tokenise_have_a_limit_of_their_own(server: Served, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{server.url}/tokenize", json=body, timeout=30)
    assert_error(reply, 413, "text_too_long")
    assert "1048576" in reply.json()["error"]["message"]


def test_a_full_queue(server_host: Host) -> None:
    """CASES 33. Eight run and two may wait; who comes then is sent away, and served once there is room."""
    with server_host.front(max_queue=2) as front, httpx.Client(timeout=30) as http:
        body = {**LONG, "stream": True, "prompt": ["One, two,"] * 5, "n": 2}
        with http.stream("POST", f"{front.url}/v1/completions", json=body):
            full = complete(front, SHORT)
        assert_error(full, 429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        assert within(15, lambda: not front.state.admission_queue.size)
        assert complete(front, SHORT).status_code == 200


def test_more_sequences_than_are_ever_taken_on(server_host: Host) -> None:
    with server_host.front(max_queue=2) as front:
        refused = complete(front, {**SHORT, "prompt": ["x"] * 3, "n": 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "12" in refused.json()["error"]["message"]


def test_too_many_connections(server_host: Host) -> None:
    with server_host.front(max_connections=2) as front:
        clients = [httpx.Client() for _ in range(3)]
        try:
            replies = [client.get(f"{front.url}/v1/models") for client in clients]
            watched = clients[2].get(f"{front.url}/health")
        finally:
            for client in clients:
                client.close()
    assert [reply.status_code for reply in replies] == [200, 200, 503]
    assert_error(replies[2], 503, "too_many_connections")
    assert watched.status_code == 200


def test_what_is_no_http_gets_an_error_object(server: Served) -> None:
    with connected(server.url) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01 is how TLS begins\r\n\r\n")
        head, _, body = rest(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert "HTTP/1.1" in json.loads(body)["error"]["message"]


def test_nobody_is_sent_elsewhere(server_host: Host) -> None:
    """Not to an address made of what the client says of ours."""
    with server_host.front(allowed_hosts=("*",)) as front:
        root = httpx.get(f"{front.url}/", headers={"Host": "evil.example"})
        slash = httpx.get(f"{front.url}/docs/", headers={"Host": "evil.example"})
    assert (root.status_code, root.headers["location"]) == (307, "docs")
    assert slash.status_code == 404


def test_nothing_to_tokenise(server: Served) -> None:
    message = httpx.post(f"{server.url}/tokenize", json={}).json()["error"]["message"]
    assert "prompt" in message
    assert "messages" in message


# --- models -------------------------------------------------------------------------------------------------------


def test_a_model_without_template(server_host: Host) -> None:
    """CASES 31: a clear message on chat; completions go on."""
    file = server_host.model.file
    metadata = Metadata(file.path, {key: value for key, value in file.metadata.items() if key != TEMPLATE_KEY})
    bare = LoadedModel(replace(file, metadata=metadata), server_host.model.network)
    with server_host.front(model=bare) as front:
        chat = httpx.post(f"{front.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        raw = complete(front, SHORT)
    assert chat.status_code == 400
    assert chat.json()["error"]["message"].startswith(f"{file.path.name}: key 'tokenizer.chat_template' is missing")
    assert raw.status_code == 200


def test_no_second_beginning_of_sequence(server_host: Host) -> None:
    """CASES 31: what chat sends to the engine is what the template wrote."""
    with server_host.front() as front:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "return_token_ids": True}
        reply = httpx.post(f"{front.url}/v1/chat/completions", json=body, timeout=30).json()
    prompt = reply["choices"][0]["prompt_token_ids"]
    text = server_host.model.tokenizer.decode(prompt, skip_special=False)
    assert text == server_host.model.template.render(body["messages"]).text


def test_while_the_model_is_loaded(server_host: Host) -> None:
    """Alive, not ready; requests are told to come again."""
    with server_host.front(loaded=False) as front:
        assert httpx.get(f"{front.url}/health").json() == {"status": "loading"}
        for path in ("/ready", "/v1/models", "/v1/config"):
            assert_error(httpx.get(f"{front.url}{path}"), 503, "loading")
        reply = complete(front, SHORT)
    assert_error(reply, 503, "loading")
    assert reply.headers["retry-after"] == "1"


# --- nobody waits -------------------------------------------------------------------------------------------------


async def _latencies_s(url: str, busy: "asyncio.Task[Any]") -> list[float]:
    """Of requests one after the other, as long as something else goes on."""
    seconds = []
    async with httpx.AsyncClient(base_url=url) as http:
        while not busy.done():
            began_s = time.perf_counter()
            reply = await http.get("/metrics" if len(seconds) % 2 else "/health")
            seconds.append(time.perf_counter() - began_s)
            assert reply.status_code == 200
            await asyncio.sleep(0.002)
    return seconds


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**SHORT, "max_tokens": 1, "prompt": [5000, 6000] * 350}),
        ("/tokenize", {"prompt": WORDS * 38_000}),
        ("/v1/completions", {**SHORT, "prompt": WORDS * 24_000}),
    ],
    ids=["long prefill", "long text to tokenise", "long text that does not fit"],
)
def test_others_are_answered_meanwhile(server: Served, path: str, body: dict[str, Any]) -> None:
    """CASES 37. The bound is wide, for machines that are busy otherwise; whoever waited would wait for all of it."""

    async def both() -> tuple[list[float], float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            began_s = time.perf_counter()
            busy = asyncio.create_task(http.post(path, json=body))
            return await _latencies_s(server.url, busy), time.perf_counter() - began_s

    seconds, took_s = asyncio.run(both())
    assert len(seconds) > 10  # all of them while the other request ran
    assert median(seconds) < took_s / 3
