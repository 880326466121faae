"""Sends replies: JSON at once, JSON encoded in slices, or a stream of server-sent events.

A reply of several MB is encoded in slices, so that it does not delay the tokens of other requests.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from time import monotonic
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from twostep.engine.outputs import Delta, Event, RequestOutput
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.json_text import encode, pieces
from twostep.openai_api.responses import DONE, Chunks, error_event

SLICE_S = 0.001
"""How long one reply may occupy the event loop at a time; handling one token takes a tenth of it."""


class JsonReply(JSONResponse):
    """A small reply, encoded by `encode`."""

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


class Slices:
    """For one event loop. Only one reply that takes longer than a slice is encoded at a time, so all of them together
    occupy at most one slice of each iteration of the loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def joined(self, value: object) -> bytes:
        """Encodes `value`, with its `Many`. Raises what creating their members raises."""
        made, parts = bytearray(), pieces(value)
        if not _fill(made, parts):
            async with self._turn:
                while not _fill(made, parts):
                    await asyncio.sleep(0)
        return bytes(made)


def _fill(made: bytearray, parts: Iterator[str]) -> bool:
    """Appends parts until the slice is over; returns whether no part is left."""
    until_s = monotonic() + SLICE_S
    for part in parts:
        made += part.encode()
        if monotonic() > until_s:
            return False
    return True


class SlicedReply:
    """An ASGI reply with status 200, encoded in slices when it is sent."""

    def __init__(self, slices: Slices, value: object) -> None:
        self._slices, self._value = slices, value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._slices.joined(self._value))


async def send_json(send: Send, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Sends a complete reply with status 200."""
    all_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer tokens otherwise
]

ERROR_SEND_S = 1.0
"""Time limit for sending an error in mid-stream: the client may have stopped reading."""

HEADERS_S = 1.0
"""If the first token takes longer than this, a stream's headers are sent before it, but only once the engine has
accepted the request: errors up to then have their own HTTP status."""

PING_S = 10.0
"""A stream without an event for this long gets a comment. Clients and proxies time out after 30 s or more."""

PING = b": ping\n\n"
"""A comment, which readers of server-sent events ignore."""


class Sender(Protocol):
    """Sends the events of one request to the client."""

    def kept_alive(self) -> AbstractAsyncContextManager[None]:
        """While the block runs, a stream without events gets headers and comments."""
        ...

    def accepted(self) -> None:
        """The engine has accepted all prompts."""
        ...

    async def event(self, prompt: int, event: Event) -> None:
        """Sends an event of a prompt, by its index. Raises `ApiError` if a choice did not complete."""
        ...

    async def end(self, outputs: Sequence[RequestOutput]) -> None:
        """Sends the end of the reply; `outputs` are complete."""
        ...

    async def fail(self, error: ApiError) -> bool:
        """Sends the error if the reply has begun; returns whether it has."""
        ...


class EventStream:
    """Sends headers with the first event, or after `HEADERS_S`; an error before that has its own status."""

    def __init__(self, send: Send, id_: str, chunks: Chunks, abort: Callable[[], None]) -> None:
        """`abort` closes the connection at once."""
        self._send, self._id, self._chunks, self._abort = send, id_, chunks, abort
        self._begun = False
        self._accepted = asyncio.Event()
        self._writing = asyncio.Lock()  # a ping must not come between the headers and an event
        self._clock_s = asyncio.get_running_loop().time
        self._wrote_s = self._clock_s()
        """Time of the last write; before that, of creation."""

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        pinging = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            pinging.cancel()  # if it holds `_writing`, the lock is released before another write can take it

    def accepted(self) -> None:
        self._accepted.set()

    async def event(self, prompt: int, event: Event) -> None:
        if isinstance(event, Delta):
            await self._write(self._chunks.delta(prompt, event))
        else:
            await self._write(self._chunks.finished(prompt, event))

    async def end(self, outputs: Sequence[RequestOutput]) -> None:
        await self._write(self._chunks.end(), more=False)

    async def fail(self, error: ApiError) -> bool:
        if self._begun:
            try:
                async with asyncio.timeout(ERROR_SEND_S):
                    await self._write(error_event(error) + DONE, more=False)
            except TimeoutError:
                self._abort()
        return self._begun

    async def _ping(self) -> None:
        """Runs until it is cancelled."""
        await self._accepted.wait()
        while True:
            due_s = self._wrote_s + (PING_S if self._begun else HEADERS_S)
            if (left_s := due_s - self._clock_s()) > 0:
                await asyncio.sleep(left_s)
            else:
                await self._write(PING)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not data:
            return
        async with self._writing:
            if not self._begun:
                headers = [*_HEADERS, (b"x-request-id", self._id.encode())]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self._begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._wrote_s = self._clock_s()


class WholeReply:
    """Sends nothing before the end."""

    def __init__(
        self, send: Send, id_: str, slices: Slices, body: Callable[[Sequence[RequestOutput]], Mapping[str, Any]]
    ) -> None:
        """`body` converts the outputs to the reply, which may contain `Many`."""
        self._send, self._id, self._slices, self._body = send, id_, slices, body

    def kept_alive(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def accepted(self) -> None:
        pass

    async def event(self, prompt: int, event: Event) -> None:
        pass

    async def end(self, outputs: Sequence[RequestOutput]) -> None:
        body = await self._slices.joined(self._body(outputs))
        await send_json(self._send, body, (b"x-request-id", self._id.encode()))

    async def fail(self, error: ApiError) -> bool:
        return False
