"""The two ways in which a reply leaves: as server-sent events while it comes, or whole as JSON."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Send

from twostep.engine.collector import Delta, Event
from twostep.engine.outputs import RequestOutput
from twostep.openai_api.chunks import DONE, Chunks, error_event
from twostep.openai_api.errors import ApiError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect tokens otherwise
]

TELL_S = 1.0
"""How long a client that is told of an error may take to take it. By then it may have stopped reading long ago."""


class Sender(Protocol):
    """Where a request's events go."""

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
    """Headers leave with the first event: what is refused before has a status of its own."""

    def __init__(self, send: Send, id_: str, chunks: Chunks, abort: Callable[[], None]) -> None:
        """`abort` ends the connection at once."""
        self._send, self._id, self._chunks, self._abort = send, id_, chunks, abort
        self._begun = False

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

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not data:
            return
        if not self._begun:
            self._begun = True
            headers = [*_HEADERS, (b"x-request-id", self._id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class WholeReply:
    """Nothing leaves before the end."""

    def __init__(self, send: Send, id_: str, body: Callable[[Sequence[RequestOutput]], Mapping[str, Any]]) -> None:
        """`body` makes the reply of the outputs."""
        self._send, self._id, self._body = send, id_, body

    async def event(self, prompt: int, event: Event) -> None:
        pass

    async def end(self, outputs: Sequence[RequestOutput]) -> None:
        body = json.dumps(self._body(outputs), allow_nan=False).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> bool:
        return False
