"""Requests in flight: their number is bounded, and each can be cancelled.

Reasons to cancel one: its client left, its time limit passed, or the server shuts down.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive

from twostep.openai_api.api_error import ApiError


class Admission:
    """The sequences of one request in the queue."""

    def __init__(self, queue: "AdmissionQueue") -> None:
        self._queue = queue
        self.sequences = 1

    def resize(self, sequences: int) -> None:
        """Sets the request's number of sequences. Raises `ApiError` if the queue has no room for them."""
        self._queue.check(sequences, current=self.sequences)
        self._queue.size += sequences - self.sequences
        self.sequences = sequences


class AdmissionQueue:
    """Holds at most `limit` sequences: a request has its number of prompts times `n`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0

    @contextmanager
    def admit(self) -> Iterator[Admission]:
        """Counts one sequence while the block runs. Raises `ApiError` with status 429 if the queue is full."""
        self.check(1, current=0)
        admission = Admission(self)
        self.size += 1
        try:
            yield admission
        finally:
            self.size -= admission.sequences

    def check(self, sequences: int, current: int) -> None:
        """Raises `ApiError` if a request that has `current` sequences cannot have `sequences`."""
        if sequences > self.limit:
            raise ApiError(f"prompts times n is {sequences}; at most {self.limit} are accepted at a time", param="n")
        if self.size - current + sequences > self.limit:
            problem = f"the queue is full ({self.size - current} of {self.limit} sequences); try again later"
            raise ApiError(problem, status=429, code="queue_full")


class ClientGoneError(Exception):
    """The client left; nothing reads the reply."""


class InFlightRequest:
    """One request in flight."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float | None) -> None:
        self.cancel_reason: Exception | None = None
        self.limit_s = limit_s
        """Time limit, from its beginning; None: unlimited."""
        self._timeout, self._began_s = timeout, asyncio.get_running_loop().time()

    def limit(self, limit_s: float | None) -> None:
        """Lowers the time limit."""
        if limit_s is not None and limit_s < (self.limit_s or math.inf) and self.cancel_reason is None:
            self.limit_s = limit_s
            self._timeout.reschedule(self._began_s + limit_s)

    def cancel(self, reason: Exception) -> None:
        """Cancels the request, which then raises `reason`. No effect if it has ended or was cancelled."""
        if self.cancel_reason is None and not self._timeout.expired():
            self.cancel_reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def watch_client(self, receive: Receive) -> None:
        """Cancels the request when the client leaves. The body has been read, so nothing else is received."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel(ClientGoneError())


class InFlightRequests:
    """All requests in flight."""

    def __init__(self) -> None:
        self._requests: set[InFlightRequest] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def cancel_all(self, reason: Exception) -> None:
        for request in self._requests:
            request.cancel(reason)

    @asynccontextmanager
    async def track(self, receive: Receive, timeout_s: float | None) -> AsyncIterator[InFlightRequest]:
        """Tracks the block as a request in flight. If it is cancelled, the block is cancelled and this raises the
        reason: `ClientGoneError` or `ApiError`."""
        timeout = asyncio.timeout(timeout_s)
        request = InFlightRequest(timeout, timeout_s)
        try:
            async with timeout, self._watched(request, receive):
                yield request
        except TimeoutError:
            if not timeout.expired():
                raise
            raise request.cancel_reason or _timed_out(request.limit_s) from None

    @asynccontextmanager
    async def _watched(self, request: InFlightRequest, receive: Receive) -> AsyncIterator[None]:
        self._requests.add(request)
        watch = asyncio.create_task(request.watch_client(receive))
        try:
            yield
        finally:
            watch.cancel()
            self._requests.discard(request)


def _timed_out(limit_s: float | None) -> ApiError:
    return ApiError(f"the request took longer than {limit_s:g} s", status=504, code="timeout")
