"""Bodies of requests: read whole, within limits of length and time, and understood in threads.

Some 100 bytes of attack can ask for seconds of work and many MB. So bodies share bounded room, from their first byte
until nobody works on them, and few threads. Short ones have threads of their own: they never wait for long ones.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from twostep.openai_api.errors import ApiError
from twostep.server.http import long_json
from twostep.server.http.in_flight import ClientGoneError
from twostep.server.http.inflating import inflater

READ_S = 60.0
"""How long a client may take to send a body."""

SHORT_BYTES = 64 << 10
"""Bodies up to this length are always read: uvicorn reads as much of each before anybody asks for it, and connections
are limited."""

LONG_BYTES = 64 << 20
"""All longer bodies together."""

THREADS = 2
"""For short bodies, and as many for long ones."""

T = TypeVar("T")


class Bodies:
    """All that are being read or understood. `held` counts what they hold of the room for long ones."""

    def __init__(self, max_bytes: int, long_bytes: int = LONG_BYTES) -> None:
        """`max_bytes` is the longest of one, `long_bytes` that of all which are not short."""
        self._max_bytes, self._long_bytes = max_bytes, max(long_bytes, max_bytes)
        self._short = ThreadPoolExecutor(THREADS, "short body")
        self._long = ThreadPoolExecutor(THREADS, "long body")
        self.held = 0
        self._lock = Lock()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator["Body"]:
        """For the block's time, or until it is understood. Raises `ApiError`, `ClientGoneError`."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal():
            self._check_length(int(announced))
        _check_type(request.headers.get("content-type", ""))
        body = Body(self)
        try:
            await body.fill(request)
            yield body
        finally:
            body.leave()

    def hold(self, body: "Body", length: int) -> None:
        """The body has come so far. Raises `ApiError`."""
        self._check_length(length)
        if length <= SHORT_BYTES:
            return
        with self._lock:
            held = self.held + length - body.held
            if held > self._long_bytes:
                problem = f"bodies longer than {SHORT_BYTES} bytes have {self._long_bytes} in all, which are taken"
                raise ApiError(f"{problem}; try again later", status=429, code="queue_full")
            self.held, body.held = held, length

    def give_back(self, body: "Body") -> None:
        """From any thread; once more is nothing more."""
        with self._lock:
            self.held -= body.held
            body.held = 0

    def threads(self, length: int) -> ThreadPoolExecutor:
        """Those that work on bodies of such a length."""
        return self._short if length <= SHORT_BYTES else self._long

    def close(self) -> None:
        """Work that has not begun never will."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, length: int) -> None:
        if length > self._max_bytes:
            problem = f"the body is too long; at most {self._max_bytes} bytes are read, counted uncompressed"
            raise ApiError(problem, status=413, code="body_too_long")


class Body:
    """One of them."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._content = bytearray()
        self._work: Future[Any] | None = None
        self.held = 0
        """Bytes that it holds of the room for long ones."""

    async def fill(self, request: Request) -> None:
        """Reads it. Raises `ApiError`, `ClientGoneError`."""
        try:
            async with asyncio.timeout(READ_S):
                compressed = inflater(request.headers.get("content-encoding", ""))
                async for piece in request.stream():
                    if compressed is None:
                        self._add(piece)
                        continue
                    async for part in compressed.parts(piece):
                        self._add(part)
                if compressed is not None:
                    compressed.end()
        except TimeoutError:
            raise ApiError(f"the body did not come within {READ_S:.0f} s", status=408) from None
        except ClientDisconnect:
            raise ClientGoneError from None

    def _add(self, piece: bytes) -> None:
        """Raises `ApiError`."""
        self._bodies.hold(self, len(self._content) + len(piece))
        self._content += piece

    async def understood(self, understand: Callable[[bytearray], T]) -> T:
        """What `understand` makes of it, in a thread; the body itself is gone then. Whoever is cancelled meanwhile does
        not wait for the thread; work that has not begun then never will."""
        content, self._content = self._content, bytearray()
        work = self._bodies.threads(len(content)).submit(understand, content)
        self._work = work
        try:
            return await asyncio.wrap_future(work)
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody needs it any more. Its room is free once no thread works on it."""
        if self._work is None:
            self._bodies.give_back(self)
        else:
            self._work.add_done_callback(lambda _: self._bodies.give_back(self))  # at once if it has ended


def _check_type(content_type: str) -> None:
    """A browser lets any page send forms and plain text, without asking the server first. What has no type is taken
    for JSON: simple clients send none. Raises `ApiError`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind not in ("application/json", "text/json") and not re.fullmatch(r"application/.+\+json", kind):
        problem = f"the body's content type is {kind[:60]!r}; send JSON, with Content-Type: application/json"
        raise ApiError(problem, status=415, code="unsupported_media_type")


def parse(body: bytes | bytearray) -> Any:
    """JSON as Python's objects. Raises `ApiError`."""
    try:
        return json.loads(body) if len(body) <= SHORT_BYTES else long_json.loads(body)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise ApiError(f"the body is not JSON: {error}") from None
