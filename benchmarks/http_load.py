"""What clients do to a server. These functions run in the clients' own process and count the time it takes of a CPU."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from benchmarks.http_client import Reply, fetch


@dataclass(frozen=True)
class Load:
    replies: list[Reply]
    """In the order in which they ended."""
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


def health_during(port: int, ask: Ask, pause_s: float) -> Load:
    """Asks for `/health` again and again until the reply to `ask` is whole; that comes first in the load."""
    return _measured(_health_during(port, ask, pause_s))


def _measured(work: "Coroutine[object, object, list[Reply]]") -> Load:
    wall_s, cpu_s = perf_counter(), process_time()
    replies = asyncio.run(work)
    return Load(replies, perf_counter() - wall_s, process_time() - cpu_s)


async def _closed_loop(port: int, asks: Sequence[Ask], outstanding: int, pause_s: float) -> list[Reply]:
    left, replies = iter(asks), list[Reply]()

    async def client() -> None:
        for ask in left:
            replies.append(await fetch(port, ask.path, ask.body))
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(client() for _ in range(outstanding)))
    return replies


async def _health_during(port: int, ask: Ask, pause_s: float) -> list[Reply]:
    asked, probes = asyncio.create_task(fetch(port, ask.path, ask.body)), list[Reply]()
    while not asked.done():
        probes.append(await fetch(port, "/health"))
        await asyncio.sleep(pause_s)
    return [await asked, *probes]
