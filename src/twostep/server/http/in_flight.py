"""Requests under way, each of which can be cut: its client has gone, its time is up, or the server ends."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from twostep.openai_api.errors import ApiError


class ClientGoneError(Exception):
    """Nobody waits for the reply any more."""


class Flight:
    """One request under way."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float | None) -> None:
        self.why: Exception | None = None
        self.limit_s = limit_s
        """How long it may take, since it began; None: for ever."""
        self._timeout, self._began_s = timeout, asyncio.get_running_loop().time()

    def limit(self, limit_s: float | None) -> None:
        """It wants to take no longer than this."""
        if limit_s is not None and limit_s < (self.limit_s or math.inf) and self.why is None:
            self.limit_s = limit_s
            self._timeout.reschedule(self._began_s + limit_s)

    def cut(self, why: Exception) -> None:
        """Ends it with this error, soon. What has ended, or is about to, goes on to its own end."""
        if self.why is None and not self._timeout.expired():
            self.why = why
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def watch(self, receive: Receive) -> None:
        """Cuts it when the client goes. The body has been read before: only its going can be received."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cut(ClientGoneError())


class Flights:
    """All of them."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._flights)

    def cut_all(self, why: Exception) -> None:
        for flight in self._flights:
            flight.cut(why)

    @asynccontextmanager
    async def one(self, receive: Receive, timeout_s: float | None) -> AsyncIterator[Flight]:
        """What runs inside is cancelled when the flight is cut, and this raises why: `ClientGoneError`, `ApiError`."""
        timeout = asyncio.timeout(timeout_s)
        flight = Flight(timeout, timeout_s)
        try:
            async with timeout, self._watched(flight, receive):
                yield flight
        except TimeoutError:
            if not timeout.expired():
                raise
            raise flight.why or _late(flight.limit_s) from None

    @asynccontextmanager
    async def _watched(self, flight: Flight, receive: Receive) -> AsyncIterator[None]:
        self._flights.add(flight)
        watch = asyncio.create_task(flight.watch(receive))
        try:
            yield
        finally:
            watch.cancel()
            self._flights.discard(flight)


def _late(limit_s: float | None) -> ApiError:
    return ApiError(f"the request took longer than {limit_s:g} s", status=504, code="timeout")
