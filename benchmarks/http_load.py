"""What clients do to a server. These functions run in the clients' own process and count the time it takes of a CPU."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time

from benchmarks.errors import EngineError
from benchmarks.http_client import Reply, fetch
from twostep.turns import take_short_turns

EVENT = b"data: {"
"""Begins a server-sent event with JSON."""


@dataclass(frozen=True)
class Load:
    replies: list[Reply]
    """In the order of asking."""
    wall_s: float
    cpu_s: float
    """Of the clients' process."""


@dataclass(frozen=True)
class Ask:
    path: str
    body: bytes


def closed_loop(port: int, asks: Sequence[Ask], outstanding: int = 1, pause_s: float = 0) -> Load:
    """So many clients; each asks the next when its reply is whole and `pause_s` has passed."""
    return _measured(_closed_loop(port, asks, outstanding, pause_s))


def interrupted(port: int, streams: Sequence[Ask], newcomer: Ask, after: int) -> Load:
    """When each stream has `after` events, the newcomer is asked, too; its reply comes last. Until all are whole."""
    return _measured(_interrupted(port, streams, newcomer, after))


def health_during(port: int, ask: Ask, pause_s: float) -> Load:
    """Asks for `/health` again and again until the reply to `ask` is whole; that comes first in the load."""
    return _measured(_health_during(port, ask, pause_s))


def _measured(work: "Coroutine[object, object, list[Reply]]") -> Load:
    take_short_turns()
    wall_s, cpu_s = perf_counter(), process_time()
    replies = asyncio.run(work)
    return Load(replies, perf_counter() - wall_s, process_time() - cpu_s)


async def _closed_loop(port: int, asks: Sequence[Ask], outstanding: int, pause_s: float) -> list[Reply]:
    left, replies = iter(enumerate(asks)), dict[int, Reply]()

    async def client() -> None:
        for number, ask in left:
            replies[number] = await fetch(port, ask.path, ask.body)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(client() for _ in range(outstanding)))
    return [replies[number] for number in range(len(asks))]


async def _interrupted(port: int, streams: Sequence[Ask], newcomer: Ask, after: int) -> list[Reply]:
    progress = _Progress(len(streams), after)
    asked = [
        asyncio.create_task(fetch(port, ask.path, ask.body, partial(progress.note, number)))
        for number, ask in enumerate(streams)
    ]
    under_way = asyncio.create_task(progress.reached.wait())
    try:
        await asyncio.wait([*asked, under_way], return_when=asyncio.FIRST_COMPLETED)
        if not progress.reached.is_set():
            await asyncio.gather(*asked)  # raises what ended one of them, if that is why
            raise EngineError(f"a stream ended before all had {after} events")
        last = await fetch(port, newcomer.path, newcomer.body)
        return [*await asyncio.gather(*asked), last]
    finally:
        under_way.cancel()


class _Progress:
    """How many events each stream has. One whose first bytes come in two pieces is missed: the newcomer comes later."""

    def __init__(self, streams: int, after: int) -> None:
        self._counts, self._after = [0] * streams, after
        self.reached = asyncio.Event()

    def note(self, stream: int, data: bytes) -> None:
        self._counts[stream] += data.count(EVENT)
        if min(self._counts) >= self._after:
            self.reached.set()


async def _health_during(port: int, ask: Ask, pause_s: float) -> list[Reply]:
    asked, probes = asyncio.create_task(fetch(port, ask.path, ask.body)), list[Reply]()
    while not asked.done():
        probes.append(await fetch(port, "/health"))
        await asyncio.sleep(pause_s)
    return [await asked, *probes]
