"""Replies as JSON, made in slices: a reply of several MB must not delay the tokens of other requests."""

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from twostep.openai_api.json_text import encode, pieces

SLICE_S = 0.001
"""How long one reply may occupy the event loop at a time. Handling one token takes a tenth of that."""


class JsonReply(JSONResponse):
    """A reply that is small, as `encode` writes it."""

    def render(self, content: Any) -> bytes:
        return encode(content).encode()


class Slices:
    """For one event loop. Only one reply that takes longer than a slice is made at a time, so that however many there
    are, they occupy at most one slice of each iteration of the loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def joined(self, value: object) -> bytes:
        """`value`, with its `Many`, as JSON. Raises what making their members does."""
        made, parts = bytearray(), pieces(value)
        if not _fill(made, parts):
            async with self._turn:
                while not _fill(made, parts):
                    await asyncio.sleep(0)
        return bytes(made)


def _fill(made: bytearray, parts: Iterator[str]) -> bool:
    """Adds parts until a slice is over; whether that was all."""
    until_s = monotonic() + SLICE_S
    for part in parts:
        made += part.encode()
        if monotonic() > until_s:
            return False
    return True


class SlicedReply:
    """An ASGI reply with status 200, made in slices when it is sent."""

    def __init__(self, slices: Slices, value: object) -> None:
        self._slices, self._value = slices, value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._slices.joined(self._value))


async def send_json(send: Send, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """A whole reply with status 200."""
    all_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
