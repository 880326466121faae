"""A crowd of every kind of client on a tiny cache: afterwards everything is as before, and all counters add up."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
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
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    await asyncio.sleep(rng.random() * 0.5)
    writer.transport.abort()
    return "gone"


async def crowd(url: str) -> Counter[str]:
    """What became of the requests."""
    rng, ends, left = random.Random(7), Counter[str](), iter(range(REQUESTS))

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            for number in left:
                kind = rng.choices([ask, ask_badly, ask_and_go], [6, 2, 4])[0]
                ends[await kind(http, random.Random(number))] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return ends


def test_a_crowd_leaves_nothing_behind(default_model_path: Path) -> None:
    """CASES 17, 21, 33: whatever they do, and though they preempt each other."""
    tiny = host(default_model_path, kv_blocks=20, max_num_seqs=6, chunking="tokens=64")
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
    assert made.client.outstanding == len(front.state.flights) == front.state.places.taken == 0


def assert_counted(made: Host, front: Served, ends: Counter[str]) -> None:
    replies = [*front.state.ledger._replies.values()]
    statuses = Counter(reply.status for reply in replies)
    early = statuses[200] - ends["answered"]  # answered in full before their client left
    assert early >= 0
    assert early + statuses[499] <= ends["gone"]
    assert all(not reply.awaited for reply in replies), "an output never came"
    choices = [choice for reply in replies for output in reply.outputs for choice in output.choices]
    told = Counter(choice.finish_reason for choice in choices)
    assert sum(told.values()) == sum(made.snapshot().finished.values())
    assert told.keys() <= {"stop", "length", "abort"}
