"""An HTTP client that measures a server on the same cores with as little CPU time as it can.

It uses asyncio transports and one connection per request. Replies are parsed after they are complete."""

import asyncio
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from socket import socket
from time import perf_counter
from typing import Any, cast

from benchmarks.measurement import EngineError

HOST = "127.0.0.1"
HEAD_END = b"\r\n\r\n"
ANSWER_LIMIT_S = 300


@dataclass(frozen=True)
class Reply:
    """A reply with times in seconds of one clock. `asked_s` is when connecting started."""

    asked_s: float
    first_s: float
    """First byte of the body."""
    last_s: float
    received: bytes
    """Raw bytes, including the head."""
    connected_s: float | None = None
    """When the connection was established; None if not measured."""
    arrivals: Sequence[tuple[int, float]] = ()
    """Total bytes and time after each received piece."""

    def body(self) -> bytes:
        """Raises `EngineError` unless the status is 200 and the reply is complete."""
        try:
            response = HTTPResponse(cast(socket, _Received(self.received)))
            response.begin()
            body = response.read()
        except (HTTPException, OSError) as error:
            raise EngineError(f"incomplete reply: {type(error).__name__} {error}") from error
        if response.status != 200:
            raise EngineError(f"HTTP {response.status}: {body[:200].decode(errors='replace')}")
        return body

    def timings(self) -> dict[str, Any]:
        """The `timings` of a streamed reply, from its last event before `[DONE]`. Raises `EngineError` if missing."""
        events = [event for event in self.body().split(b"\n\n") if event.startswith(b"data: {")]
        last = events[-1] if events else b"data: {}"
        found = json.loads(last.removeprefix(b"data: "))
        if "timings" not in found:
            raise EngineError(f"the stream ended without timings: {last[:200].decode(errors='replace')}")
        return cast(dict[str, Any], found["timings"])


class _Received:
    """A fake socket that returns the received bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._data)


Note = Callable[[bytes], None]


async def fetch(port: int, path: str, body: bytes | None = None, note: Note | None = None) -> Reply:
    """POST with a body, otherwise GET. Calls `note` with each piece. Raises `EngineError` if no body arrived."""
    loop, asked_s = asyncio.get_running_loop(), perf_counter()
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            transport, exchange = await loop.create_connection(lambda: _Exchange(note), HOST, port)
            connected_s = perf_counter()
            transport.write(_request(path, body))
            await exchange.ended
    except OSError as error:
        raise EngineError(f"{path}: {error or type(error).__name__}") from error
    if exchange.first_s is None:
        raise EngineError(f"{path}: connection closed without an answer")
    received = b"".join(exchange.pieces)
    return Reply(asked_s, exchange.first_s, perf_counter(), received, connected_s, exchange.arrivals)


def _request(path: str, body: bytes | None) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


class _Exchange(asyncio.Protocol):
    """A connection, until the server closes it."""

    def __init__(self, note: Note | None) -> None:
        self._note = note
        self.pieces: list[bytes] = []
        self.arrivals: list[tuple[int, float]] = []
        self.first_s: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.arrivals.append(((self.arrivals[-1][0] if self.arrivals else 0) + len(data), perf_counter()))
        if self._note:
            self._note(data)
        if self.first_s is None and b"".join(self.pieces).partition(HEAD_END)[2]:
            self.first_s = perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


EVENT_END = b"\n\n"
DATA, DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True)
class Event:
    """A server-sent event. `at_s`: arrival of its last byte."""

    at_s: float
    data: bytes


def events(reply: Reply) -> list[Event]:
    """Events with data, except `[DONE]`. Raises `EngineError` unless the status is 200 and the reply is complete."""
    reply.body()
    body, places = _unpacked(reply.received)
    found, start = list[Event](), 0
    while (end := body.find(EVENT_END, start)) >= 0:
        event, start = body[start:end], end + len(EVENT_END)
        if event.startswith(DATA) and event != DATA + DONE:
            found.append(Event(_when(reply, _received(places, start - 1)), event.removeprefix(DATA)))
    return found


Places = list[tuple[int, int]]
"""Offsets of the pieces of the body: in the body, and in the received bytes."""


def _unpacked(received: bytes) -> tuple[bytes, Places]:
    head, _, rest = received.partition(HEAD_END)
    at = len(received) - len(rest)
    if b"\r\ntransfer-encoding: chunked" not in head.lower():
        return rest, [(0, at)]
    return _unchunked(received, at)


def _unchunked(received: bytes, at: int) -> tuple[bytes, Places]:
    """Decodes chunked transfer coding (RFC 9112, 7.1) from offset `at`."""
    body, places = bytearray(), Places()
    while True:
        line_end = received.index(b"\r\n", at)
        size, start = int(received[at:line_end].partition(b";")[0], 16), line_end + 2
        if size == 0:
            return bytes(body), places
        places.append((len(body), start))
        body += received[start : start + size]
        at = start + size + 2


def _received(places: Places, offset: int) -> int:
    """Converts an offset in the body to one in the received bytes."""
    in_body, in_received = places[bisect_right(places, offset, key=lambda place: place[0]) - 1]
    return in_received + offset - in_body


def _when(reply: Reply, offset: int) -> float:
    return reply.arrivals[bisect_left(reply.arrivals, offset + 1, key=lambda arrival: arrival[0])][1]
