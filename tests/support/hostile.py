"""Servers that answer as a test says, well or badly, byte by byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from twostep.bench.client.client import Ask, connect
from twostep.bench.client.http import Patience
from twostep.bench.client.outcome import Outcome
from twostep.bench.client.target import Target

MODELS = {"object": "list", "data": [{"id": "small", "owned_by": "nobody"}]}
DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(piece: str, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of a completion."""
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": piece, "finish_reason": finish}], **more})


def delta(finish: str | None = None, more: dict[str, Any] | None = None, **piece: Any) -> bytes:
    """A chunk of a chat."""
    return event({"id": "chat-1", "choices": [{"index": 0, "delta": piece, "finish_reason": finish}], **(more or {})})


def usage(prompt: int, completion: int, **details: int) -> bytes:
    """The chunk that has nothing else."""
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details or None}
    return event({"id": "cmpl-1", "choices": [], "usage": counted})


@dataclass
class Peer:
    """One connection to such a server, whose request has been read."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """As it is."""
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self, status: str = "200 OK", **headers: str) -> None:
        """A head; the body is in chunks of HTTP, each from one call of `part`."""
        headers = {"content_type": "text/event-stream", "transfer_encoding": "chunked", **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())

    async def part(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def gone(self) -> None:
        """The client has closed the connection."""
        with suppress(ConnectionError):
            await self.reader.read()


Answer = Callable[[Peer], Awaitable[None]]


def stream(*parts: bytes) -> Answer:
    """A whole answer of these."""

    async def answer(peer: Peer) -> None:
        await peer.begin()
        for part in parts:
            await peer.part(part)
        await peer.end()

    return answer


@asynccontextmanager
async def serving(answer: Answer, models: Answer | None = None) -> AsyncIterator[str]:
    """The server's URL. `models` answers for the list of models, `answer` everything else."""

    serving = set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(_serve(reader, writer, answer, models or listing(MODELS))))

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    for task in serving:
        task.cancel()
    ends = await asyncio.gather(*serving, return_exceptions=True)
    assert not [end for end in ends if isinstance(end, Exception)]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer, models: Answer) -> None:
    try:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            peer = await _read(reader, writer)
            await (models if peer.path.endswith("/models") else answer)(peer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def listing(models: Any, status: str = "200 OK") -> Answer:
    """For a list of models, this JSON; a redirect goes elsewhere."""

    async def answer(peer: Peer) -> None:
        elsewhere = {"location": "/elsewhere"} if status.startswith("3") else {}
        await peer.begin(status, content_type="application/json", **elsewhere)
        await peer.part(json.dumps(models).encode())
        await peer.end()

    return answer


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer:
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Peer(line.split()[1], headers, json.loads(body or b"{}"), reader, writer)


def asked(answer: Answer, tokens: int = 3, stall_s: float = 5, request_s: float = 10, **target: Any) -> Outcome:
    """What the client says of one request to such a server."""

    async def ask() -> Outcome:
        async with serving(answer) as url:
            client = await connect(Target(url, patience=Patience(stall_s, request_s), **target))
            return await client.ask(Ask(0, "Once upon", input_tokens=2, output_tokens=tokens, due_ns=0), origin_ns=0)

    return asyncio.run(ask())
