"""Decides which request is sent when: by arrival times, or as clients become free. Has no clock of its own."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from twostep.workload.definition import WorkloadRequest


@dataclass(frozen=True)
class Open:
    """Open loop: each request is sent at its arrival time, whatever the state of others. A request with `after` is due
    that long after the other one has ended."""


@dataclass(frozen=True)
class Closed:
    """Closed loop: each client sends the next request when its answer is complete. Arrival times are ignored."""

    clients: int


Mode = Open | Closed


class Schedule(Protocol):
    """All times are nanoseconds since the start of the run."""

    def take(self, now_ns: int) -> Iterator[tuple[int, int]]:
        """Yields each due request once: its number, and the time since when it is due."""

    def next_ns(self) -> int | None:
        """When the next request is due; None if that depends on the end of a running one."""

    def ahead(self) -> int | None:
        """Number of the request that is probably next, so that its prompt can be prepared."""

    def ended(self, number: int, now_ns: int) -> None:
        """Reports the end of a request, successful or not. Requests that wait for it are sent either way."""


def schedule(requests: Sequence[WorkloadRequest], mode: Mode) -> Schedule:
    """The schedule for a run of this mode."""
    return OpenLoop(requests) if isinstance(mode, Open) else ClosedLoop(requests, mode.clients)


class OpenLoop:
    """Sends each request at its arrival time; one with `after`, that long after the other one has ended."""

    def __init__(self, requests: Sequence[WorkloadRequest]) -> None:
        self._requests = requests
        self._followers = _followers(requests)
        self._pending = [(_ns(one.arrival_s), number) for number, one in enumerate(requests) if one.after is None]
        heapify(self._pending)

    def take(self, now_ns: int) -> Iterator[tuple[int, int]]:
        while self._pending and self._pending[0][0] <= now_ns:
            due_ns, number = heappop(self._pending)
            yield number, due_ns

    def next_ns(self) -> int | None:
        return self._pending[0][0] if self._pending else None

    def ahead(self) -> int | None:
        return self._pending[0][1] if self._pending else None

    def ended(self, number: int, now_ns: int) -> None:
        for follower in self._followers[number]:
            heappush(self._pending, (now_ns + _ns(self._requests[follower].arrival_s), follower))


class ClosedLoop:
    """Sends the lowest pending number whenever a client is free; one with `after`, once the other one has ended."""

    def __init__(self, requests: Sequence[WorkloadRequest], clients: int) -> None:
        self._followers = _followers(requests)
        self._ready = [(number, 0) for number, one in enumerate(requests) if one.after is None]
        """Number and the time since when it can be sent."""
        self._free_ns = deque([0] * clients)
        """Time at which each free client became free."""

    def take(self, now_ns: int) -> Iterator[tuple[int, int]]:
        while self._ready and self._free_ns:
            number, ready_ns = heappop(self._ready)
            yield number, max(ready_ns, self._free_ns.popleft())

    def next_ns(self) -> int | None:
        return None

    def ahead(self) -> int | None:
        return self._ready[0][0] if self._ready else None

    def ended(self, number: int, now_ns: int) -> None:
        self._free_ns.append(now_ns)
        for follower in self._followers[number]:
            heappush(self._ready, (follower, now_ns))


def _followers(requests: Sequence[WorkloadRequest]) -> dict[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for number, one in enumerate(requests):
        if one.after is not None:
            found[one.after].append(number)
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
