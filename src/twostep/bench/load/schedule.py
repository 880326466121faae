"""Which request is to be sent when: by the workload's times, or as clients become free. Knows no clock itself."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from twostep.bench.load.run_record import Mode, Open
from twostep.workload.definition import WorkloadRequest


class Schedule(Protocol):
    """Nanoseconds since the run's begin."""

    def take(self, now_ns: int) -> Iterator[tuple[int, int]]:
        """Requests that are due, each once: its number and since when."""

    def next_ns(self) -> int | None:
        """When the next is due; None if one has to end before."""

    def ahead(self) -> int | None:
        """Number of the request that is probably next, so that it can be made ready."""

    def ended(self, number: int, now_ns: int) -> None:
        """A request that was taken is over, well or not: those that come after it are sent either way."""


def schedule(requests: Sequence[WorkloadRequest], mode: Mode) -> Schedule:
    """For a run of this mode."""
    return OpenLoop(requests) if isinstance(mode, Open) else ClosedLoop(requests, mode.clients)


class OpenLoop:
    """Each at its time, whatever the others do; one with `after` so long after that has ended."""

    def __init__(self, requests: Sequence[WorkloadRequest]) -> None:
        self._requests = requests
        self._followers = _followers(requests)
        self._coming = [(_ns(one.arrival_s), number) for number, one in enumerate(requests) if one.after is None]
        heapify(self._coming)

    def take(self, now_ns: int) -> Iterator[tuple[int, int]]:
        while self._coming and self._coming[0][0] <= now_ns:
            due_ns, number = heappop(self._coming)
            yield number, due_ns

    def next_ns(self) -> int | None:
        return self._coming[0][0] if self._coming else None

    def ahead(self) -> int | None:
        return self._coming[0][1] if self._coming else None

    def ended(self, number: int, now_ns: int) -> None:
        for follower in self._followers[number]:
            heappush(self._coming, (now_ns + _ns(self._requests[follower].arrival_s), follower))


class ClosedLoop:
    """The lowest number that may be sent, whenever a client is free; one with `after` once that has ended."""

    def __init__(self, requests: Sequence[WorkloadRequest], clients: int) -> None:
        self._followers = _followers(requests)
        self._ready = [(number, 0) for number, one in enumerate(requests) if one.after is None]
        """With the time since when."""
        self._free_ns = deque([0] * clients)
        """Since when each free client is."""

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
