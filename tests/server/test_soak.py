"""A crowd of every kind of client on a tiny cache: afterwards everything is as before, and all counters add up."""

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.http_server import NAME, Host, Served, host

REQUESTS, CLIENTS = 48, 16
SENTENCE = "The tortoise and the hare agreed to race once more. "


def body(rng: random.Random) -> dict[str, Any]:
    """Of a request that can be answered."""
    return {
        "model": NAME,
        "prompt": [SENTENCE * rng.randint(1, 5) for _ in range(rng.choice([1, 1, 1, 3]))],
        "max_tokens": rng.choice([1, 20, 90]),
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.5,
        "seed": rng.randrange(100),
        "priority": rng.randrange(3),
        "stop": rng.choice([None, None, " the"]),
    }


async def ask(http: httpx.AsyncClient, rng: random.Random) -> str:
    """Waits for the whole answer."""
    asked = body(rng)
    reply = await http.post("/v1/completions", json=asked)
    if reply.status_code != 200:
        return str(reply.status_code)
    if asked["stream"]:
        assert reply.text.endswith("data: [DONE]\n\n")
        assert reply.text.count('"finish_reason":"') == asked["n"] * len(asked["prompt"])
    return "answered"


async def ask_badly(http: httpx.AsyncClient, rng: random.Random) -> str:
    content = rng.choice([b"{", b"\xff", b'{"prompt": 3}', b'{"prompt": "x", "n": 0}', b"[" * 5000, b"x" * 60_000])
    return str((await http.post("/v1/completions", content=content)).status_code)


async def ask_and_go(http: httpx.AsyncClient, rng: random.Random) -> str:
    address, content = urlsplit(str(http.base_url)), json.dumps(body(rng)).encode()
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
    writer.write(head + content)
    await asyncio.sleep(rng.random() * 0.5)
    writer.transport.abort()
    return "gone"


async def crowd(url: str) -> Counter[str]:
    """What became of the requests."""
    rng, ends, left = random.Random(7), Counter[str](), iter(range(REQUESTS))

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as http:
            for number in left:
                kind = rng.choices([ask, ask_badly, ask_and_go], [6, 2, 4])[0]
                ends[await kind(http, random.Random(number))] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return ends


def test_a_crowd_leaves_nothing_behind(default_model_path: Path) -> None:
    """CASES 17, 21, 33: whatever they do, and though they preempt each other."""
    tiny = host(default_model_path, kv_memory="20 blocks", max_num_seqs=6, chunking="tokens=64")
    with tiny as made, made.front(max_queue=40, max_body_bytes=50_000) as front:
        ends = asyncio.run(crowd(front.url))
        assert_as_before(made, front)
        assert_counted(made, front, ends)
    assert ends.keys() <= {"answered", "gone", "400", "413", "429"}
    assert ends["answered"] > REQUESTS / 4


def assert_as_before(made: Host, front: Served) -> None:
    snapshot = made.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_blocks_free) == (0, 0, snapshot.kv_blocks)
    assert snapshot.preemptions > 0, "the cache was not tiny"
    assert made.backend.outstanding == len(front.state.in_flight) == front.state.admission_queue.size == 0


def assert_counted(made: Host, front: Served, ends: Counter[str]) -> None:
    replies = [*front.state.finished._replies.values()]
    statuses = Counter(reply.status for reply in replies)
    early = statuses[200] - ends["answered"]  # answered in full before their client left
    assert early >= 0
    assert early + statuses[499] <= ends["gone"]
    assert all(not reply.awaited for reply in replies), "an output never came"
    choices = [choice for reply in replies for output in reply.outputs for choice in output.choices]
    told = Counter(choice.finish_reason for choice in choices)
    assert sum(told.values()) == sum(made.snapshot().finished.values())
    assert told.keys() <= {"stop", "length", "abort"}


@pytest.fixture
def quiet_gc() -> Iterator[None]:
    """As the server does: what is there already is not walked through by the collector, nor here by tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


LARGE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Go on."}], "logprobs": True, "top_logprobs": 20},
    "/v1/completions": {"prompt": "Go on.", "logprobs": 20, "return_token_ids": True},
}


@pytest.mark.usefixtures("quiet_gc")
@pytest.mark.parametrize("path", LARGE)
def test_large_replies_keep_nobody_waiting(server_host: Host, path: str) -> None:
    """Some MB of log-probabilities: no turn of the event loop is long, and a stream goes on beside them."""
    asked = {**LARGE[path], "max_tokens": 120, "n": 7, "ignore_eos": True}
    with server_host.front() as front, server_host.turns() as turns:
        whole, streamed = asyncio.run(both(front.url, path, asked))
    assert len(whole.content) > 400_000
    assert {choice["finish_reason"] for choice in whole.json()["choices"]} == {"length"}
    assert streamed.endswith("data: [DONE]\n\n")
    assert turns.longest_s < LONGEST_TURN_S


LONGEST_TURN_S = 0.03
"""Six times what was measured; the JSON of the chat in one piece takes a tenth of a second."""


async def both(url: str, path: str, asked: dict[str, Any]) -> tuple[httpx.Response, str]:
    """The reply to a large request, and a small stream that ends after it."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        body = {"prompt": "One,", "max_tokens": 200, "ignore_eos": True, "stream": True}
        stream = asyncio.create_task(http.post("/v1/completions", json=body))
        whole = await http.post(path, json=asked)
        return whole, (await stream).text
