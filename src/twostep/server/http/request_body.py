"""Request bodies: read completely, within limits of size and time, and parsed in threads.

A request of 100 bytes can cause seconds of work and many MB of memory. So long bodies share a memory limit, from their
first byte until no thread uses them, and a few threads. Short bodies have their own threads and never wait for long
ones.
"""

import asyncio
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from twostep.openai_api.api_error import ApiError
from twostep.server.http import long_json
from twostep.server.http.in_flight import ClientGoneError

READ_S = 60.0
"""Time limit for receiving a body."""

SHORT_BYTES = 64 << 10
"""Longest short body. Short bodies do not count towards `LONG_BYTES`: uvicorn buffers as much of every request anyway,
and the number of connections is limited."""

LONG_BYTES = 64 << 20
"""Memory limit of all long bodies together."""

THREADS = 2
"""For short bodies, and as many again for long ones."""

T = TypeVar("T")


class Bodies:
    """All bodies being received or parsed. `reserved` counts the bytes of long ones."""

    def __init__(self, max_bytes: int, long_bytes: int = LONG_BYTES) -> None:
        """`max_bytes` limits one body, `long_bytes` all long bodies together."""
        self._max_bytes, self._long_bytes = max_bytes, max(long_bytes, max_bytes)
        self._short = ThreadPoolExecutor(THREADS, "short body")
        self._long = ThreadPoolExecutor(THREADS, "long body")
        self.reserved = 0
        self._lock = Lock()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator["Body"]:
        """Yields the body, which is freed at the end of the block or once parsed. Raises `ApiError`,
        `ClientGoneError`."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal():
            self._check_length(int(announced))
        _check_type(request.headers.get("content-type", ""))
        body = Body(self)
        try:
            await body.fill(request)
            yield body
        finally:
            body.release()

    def reserve(self, body: "Body", length: int) -> None:
        """Reserves memory for a body that has reached this length. Raises `ApiError`."""
        self._check_length(length)
        if length <= SHORT_BYTES:
            return
        with self._lock:
            reserved = self.reserved + length - body.reserved
            if reserved > self._long_bytes:
                problem = f"the limit of {self._long_bytes} bytes for all bodies over {SHORT_BYTES} bytes is reached"
                raise ApiError(f"{problem}; try again later", status=429, code="queue_full")
            self.reserved, body.reserved = reserved, length

    def free(self, body: "Body") -> None:
        """Frees the body's reservation. May be called from any thread, and repeatedly."""
        with self._lock:
            self.reserved -= body.reserved
            body.reserved = 0

    def threads(self, length: int) -> ThreadPoolExecutor:
        """The threads for bodies of this length."""
        return self._short if length <= SHORT_BYTES else self._long

    def close(self) -> None:
        """Drops work that has not begun."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, length: int) -> None:
        if length > self._max_bytes:
            problem = f"the body is too long; at most {self._max_bytes} bytes are read, counted uncompressed"
            raise ApiError(problem, status=413, code="body_too_long")


class Body:
    """One request body."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._content = bytearray()
        self._work: Future[Any] | None = None
        self.reserved = 0
        """Bytes reserved of the limit for long bodies."""

    async def fill(self, request: Request) -> None:
        """Receives the body. Raises `ApiError`, `ClientGoneError`."""
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
            raise ApiError(f"the body did not arrive within {READ_S:.0f} s", status=408) from None
        except ClientDisconnect:
            raise ClientGoneError from None

    def _add(self, piece: bytes) -> None:
        """Raises `ApiError`."""
        self._bodies.reserve(self, len(self._content) + len(piece))
        self._content += piece

    async def parsed(self, parser: Callable[[bytearray], T]) -> T:
        """Returns `parser(content)`, run in a thread; the content is dropped. A cancelled caller does not wait for the
        thread; work that has not begun is dropped."""
        content, self._content = self._content, bytearray()
        work = self._bodies.threads(len(content)).submit(parser, content)
        self._work = work
        try:
            return await asyncio.wrap_future(work)
        finally:
            self.release()

    def release(self) -> None:
        """Frees the reservation once no thread uses the content."""
        if self._work is None:
            self._bodies.free(self)
        else:
            self._work.add_done_callback(lambda _: self._bodies.free(self))  # called at once if it is done


def _check_type(content_type: str) -> None:
    """Refuses types other than JSON: a browser lets any page send forms and plain text without asking the server. A
    body without a type counts as JSON, as simple clients send none. Raises `ApiError`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind not in ("application/json", "text/json") and not re.fullmatch(r"application/.+\+json", kind):
        problem = f"the body's content type is {kind[:60]!r}; send JSON, with Content-Type: application/json"
        raise ApiError(problem, status=415, code="unsupported_media_type")


def parse(body: bytes | bytearray) -> Any:
    """Decodes JSON. Raises `ApiError`."""
    try:
        return json.loads(body) if len(body) <= SHORT_BYTES else long_json.loads(body)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # invalid JSON, invalid UTF-8, or a number of thousands of digits
        raise ApiError(f"the body is not JSON: {error}") from None


PART_BYTES = 64 << 10
"""Size of one decompressed part. The event loop waits meanwhile; a few hundred bytes may expand to this size."""

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The `wbits` argument of `zlib` by encoding."""


class Inflater:
    """Decompresses one body."""

    def __init__(self, encoding: str) -> None:
        """`encoding` is one of `WINDOW_BITS`."""
        self._encoding = encoding
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])

    async def parts(self, piece: bytes) -> AsyncIterator[bytes]:
        """Decompresses the next bytes of the body, in parts of at most `PART_BYTES`. Raises `ApiError`."""
        part = b""
        while piece or (len(part) == PART_BYTES and not self._stream.eof):
            if self._stream.eof:
                raise self._damaged("bytes follow its end")
            try:
                part = self._stream.decompress(piece, PART_BYTES)
            except zlib.error as error:
                raise self._damaged(str(error)) from None
            piece = self._stream.unconsumed_tail or self._stream.unused_data
            yield part
            await asyncio.sleep(0)

    def end(self) -> None:
        """Checks that the body is complete. Raises `ApiError`."""
        if not self._stream.eof:
            raise self._damaged("it is truncated")

    def _damaged(self, why: str) -> ApiError:
        return ApiError(f"the body cannot be decompressed as {self._encoding}, its Content-Encoding: {why}")


def inflater(encoding: str) -> Inflater | None:
    """The decompressor for this `Content-Encoding`; None: uncompressed. Raises `ApiError` with status 415."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in WINDOW_BITS:
        problem = f"Content-Encoding {encoding[:60]!r} is not supported; send the body as gzip, deflate or uncompressed"
        raise ApiError(problem, status=415, code="unsupported_encoding")
    return Inflater(encoding)
