"""The two ways in which a reply leaves: as server-sent events while it comes, or whole as JSON."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

from starlette.types import Send

from twostep.engine.outputs import Delta, Event, RequestOutput
from twostep.openai_api.chunks import DONE, Chunks, error_event
from twostep.openai_api.errors import ApiError
from twostep.server.http.slices import Slices, send_json

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect tokens otherwise
]

TELL_S = 1.0
"""How long a client that is told of an error may take to take it. By then it may have stopped reading long ago."""

HEADERS_S = 1.0
"""If the first token takes longer than this, a stream's headers leave without it, but never before the engine has
accepted the request: errors up to then keep their HTTP status."""

PING_S = 10.0
"""A stream without an event for so long gets a comment. Clients and proxies time out after 30 s or more."""

PING = b": ping\n\n"
"""A comment, which every reader of server-sent events skips."""


class Sender(Protocol):
    """Where a request's events go."""

    def kept_alive(self) -> AbstractAsyncContextManager[None]:
        """While the block runs, a client that gets no events gets headers and comments, if the reply is a stream."""
        ...

    def accepted(self) -> None:
        """The engine has accepted all prompts."""
        ...

    async def event(self, prompt: int, event: Event) -> None:
        """Something came of a prompt, by number. Raises `ApiError` if an answer did not come to its end."""
        ...

    async def end(self, outputs: Sequence[RequestOutput]) -> None:
        """All have come."""
        ...

    async def fail(self, error: ApiError) -> bool:
        """Tells the client, if it can only be told here: the reply has begun."""
        ...


class EventStream:
    """Headers leave with the first event, or after `HEADERS_S` in the queue: what fails before has its own status."""

    def __init__(self, send: Send, id_: str, chunks: Chunks, abort: Callable[[], None]) -> None:
        """`abort` ends the connection at once."""
        self._send, self._id, self._chunks, self._abort = send, id_, chunks, abort
        self._begun = False
        self._accepted = asyncio.Event()
        self._writing = asyncio.Lock()  # a ping must not come between an event and the headers before it
        self._clock_s = asyncio.get_running_loop().time
        self._wrote_s = self._clock_s()
        """When something was written; at first when the stream was made."""

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        pinging = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            pinging.cancel()  # if it waits for the client with `_writing`, that is free before anybody can take it

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
                async with asyncio.timeout(TELL_S):
                    await self._write(error_event(error) + DONE, more=False)
            except TimeoutError:
                self._abort()
        return self._begun

    async def _ping(self) -> None:
        """Until it is cancelled."""
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
    """Nothing leaves before the end."""

    def __init__(
        self, send: Send, id_: str, slices: Slices, body: Callable[[Sequence[RequestOutput]], Mapping[str, Any]]
    ) -> None:
        """`body` makes the reply of the outputs; it may have `Many` in it."""
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
