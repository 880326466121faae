"""One event queue on one virtual clock, which hosts any number of engine loops."""

from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

from twostep.core.loop import EngineLoop
from twostep.sim.modelled import Arrival, ModelledExecutor, SimulatedClient, VirtualClock

Action = Callable[[], None]


class EventQueue:
    """Runs actions in the order of their times, equal times in the order in which they were scheduled: the same
    schedule leads to the same run."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[int, int, Action]] = []
        self._numbers = count()

    def at(self, time_ns: int, action: Action) -> None:
        """Schedules `action`. A time that has passed counts as now."""
        heappush(self._heap, (max(time_ns, self.clock.now_ns), next(self._numbers), action))

    def run(self, until_ns: int | None = None) -> None:
        """Runs until no event is left, or the next is later than `until_ns`, which it then is; moves the clock from
        event to event."""
        heap, clock, end_ns = self._heap, self.clock, inf if until_ns is None else until_ns
        while heap and heap[0][0] <= end_ns:
            clock.now_ns, _, action = heappop(heap)
            action()
        if heap and until_ns is not None:
            clock.now_ns = until_ns


class LoopHost:
    """Hosts one loop on an event queue: starts steps, ends each at the time given by the executor, and calls the loop
    again when a command arrives or the loop requests it."""

    def __init__(
        self, queue: EventQueue, loop: EngineLoop, executor: ModelledExecutor, client: SimulatedClient
    ) -> None:
        self._queue, self._loop, self._executor, self._client = queue, loop, executor, client
        self._stepping = False
        self._wake_ns: int | None = None

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        """Schedules the arrivals."""
        for arrival in arrivals:
            self._queue.at(arrival.at_ns, partial(self.arrive, arrival))

    def arrive(self, arrival: Arrival) -> None:
        """Delivers the arrival now."""
        self._client.submit(arrival)
        self._wake_soon()

    def _wake_soon(self) -> None:
        """Wakes the loop after all events already scheduled for this time, so that the next step includes them."""
        self._queue.at(self._queue.clock.now_ns, self._wake)

    def _wake(self) -> None:
        if self._stepping:
            return
        if self._loop.begin():
            self._stepping = True
            self._queue.at(self._executor.ends_ns, self._end_step)
        elif (wake_ns := self._loop.next_wake_ns) is not None and wake_ns != self._wake_ns:
            self._wake_ns = wake_ns
            self._queue.at(wake_ns, self._wake)

    def _end_step(self) -> None:
        ended = self._loop.poll()
        assert ended, "the executor named a time at which its step does not end"
        self._stepping = False
        self._wake_soon()
