"""A client that measures an HTTP server on the same cores: asyncio's bare transports, one connection a request, and
bytes are looked at when all have come, so that it takes as little of the machine as it can."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from socket import socket
from time import perf_counter
from typing import Any, cast

from benchmarks.errors import EngineError

HOST = "127.0.0.1"
HEAD_END = b"\r\n\r\n"
ANSWER_LIMIT_S = 300


@dataclass(frozen=True)
class Reply:
    """Seconds of one clock. Asking begins with connecting."""

    asked_s: float
    first_s: float
    """First byte of the body."""
    last_s: float
    received: bytes
    """As it came, with its head."""
    connected_s: float | None = None
    """When there was a connection; None where that was not looked at."""
    arrivals: Sequence[tuple[int, float]] = ()
    """How many bytes were there at which time, after each piece."""

    def body(self) -> bytes:
        """Raises `EngineError` unless the status is 200 and the reply whole."""
        try:
            response = HTTPResponse(cast(socket, _Received(self.received)))
            response.begin()
            body = response.read()
        except (HTTPException, OSError) as error:
            raise EngineError(f"no whole reply: {type(error).__name__} {error}") from error
        if response.status != 200:
            raise EngineError(f"HTTP {response.status}: {body[:200].decode(errors='replace')}")
        return body

    def timings(self) -> dict[str, Any]:
        """Of a streamed reply: they are in its last event before `[DONE]`. Raises `EngineError` if it has none."""
        events = [event for event in self.body().split(b"\n\n") if event.startswith(b"data: {")]
        last = events[-1] if events else b"data: {}"
        found = json.loads(last.removeprefix(b"data: "))
        if "timings" not in found:
            raise EngineError(f"ended a stream with {last[:200].decode(errors='replace')}")
        return cast(dict[str, Any], found["timings"])


class _Received:
    """Stands for a socket from which all has been read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._data)


Note = Callable[[bytes], None]


async def fetch(port: int, path: str, body: bytes | None = None, note: Note | None = None) -> Reply:
    """POST with a body, else GET. `note` is told of each piece. Raises `EngineError` if nothing of a body came."""
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
        raise EngineError(f"closed the connection of {path} without an answer")
    received = b"".join(exchange.pieces)
    return Reply(asked_s, exchange.first_s, perf_counter(), received, connected_s, exchange.arrivals)


def _request(path: str, body: bytes | None) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


class _Exchange(asyncio.Protocol):
    """One connection, until the server closes it."""

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
