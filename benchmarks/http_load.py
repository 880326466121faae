"""Load on a server: requests in a closed loop, a long prompt that interrupts streams, probes of `/health`."""

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Any

from benchmarks.http_client import Reply, events, fetch
from benchmarks.jobs import Job, Stall
from benchmarks.measurement import EngineError
from benchmarks.traces import Served, Trace
from twostep.turns import take_short_turns

NEWCOMER_S = 45
"""How long a newcomer is waited for."""
EVENT = b"data: {"
"""Start of a server-sent event with JSON."""


@dataclass(frozen=True)
class Load:
    replies: list[Reply]
    """In the order of the requests."""
    wall_s: float
    cpu_s: float
    """CPU time of the client process."""


@dataclass(frozen=True)
class Ask:
    path: str
    body: bytes


def closed_loop(port: int, asks: Sequence[Ask], outstanding: int = 1, pause_s: float = 0) -> Load:
    """A closed loop: each client sends the next request `pause_s` after its reply is complete."""
    return _measured(_closed_loop(port, asks, outstanding, pause_s))


def interrupted(port: int, streams: Sequence[Ask], newcomer: Ask, after: int) -> Load:
    """Sends the newcomer when each stream has `after` events. Its reply is the last in the load."""
    return _measured(_interrupted(port, streams, newcomer, after))


def health_during(port: int, ask: Ask, pause_s: float) -> Load:
    """Requests `/health` repeatedly until the reply to `ask` is complete; that reply is the first in the load."""
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
            await asyncio.gather(*asked)  # raises the error of a failed stream
            raise EngineError(f"a stream ended before all streams had {after} events")
        last = await fetch(port, newcomer.path, newcomer.body)
        return [*await asyncio.gather(*asked), last]
    finally:
        under_way.cancel()


class _Progress:
    """Counts the events of each stream. Misses an event whose start is split, which only delays the newcomer."""

    def __init__(self, streams: int, after: int) -> None:
        self._counts, self._after = [0] * streams, after
        self.reached = asyncio.Event()

    def note(self, stream: int, data: bytes) -> None:
        self._counts[stream] += data.count(EVENT)
        if min(self._counts) >= self._after:
            self.reached.set()


def overtaken(port: int, streams: Sequence[Ask], newcomers: Sequence[Ask], after: int) -> "Overtaken":
    """Each client asks for its stream again and again. When each has had `after` events, the newcomers are sent, one
    after the other; then the streams are ended."""
    take_short_turns()
    return asyncio.run(_overtaken(port, streams, newcomers, after))


@dataclass(frozen=True)
class Overtaken:
    """Times of the events of each reply."""

    streams: list[Trace]
    newcomers: list[Trace]


async def _overtaken(port: int, streams: Sequence[Ask], newcomers: Sequence[Ask], after: int) -> Overtaken:
    progress, traces = _Progress(len(streams), after), list[Trace]()
    tasks = [asyncio.create_task(_again(port, ask, number, progress, traces)) for number, ask in enumerate(streams)]
    under_way = asyncio.create_task(progress.reached.wait())
    try:
        await asyncio.wait([*tasks, under_way], return_when=asyncio.FIRST_COMPLETED)
        late = list[Trace]()
        for ask in newcomers:
            try:
                late.append(await asyncio.wait_for(_answered(port, ask), NEWCOMER_S))
            except TimeoutError:
                raise EngineError(f"a newcomer was not answered within {NEWCOMER_S} s") from None
        if any(task.done() for task in tasks):
            await asyncio.gather(*tasks)  # raises the error of a failed stream
    finally:
        for task in (*tasks, under_way):
            task.cancel()
        await asyncio.gather(*tasks, under_way, return_exceptions=True)
    return Overtaken(traces, late)


async def _again(port: int, ask: Ask, number: int, progress: "_Progress", traces: list[Trace]) -> None:
    """Until it is cancelled; the last reply counts as far as it came."""
    while True:
        watched = _Watched()

        def note(data: bytes, watched: _Watched = watched) -> None:
            watched.note(data)
            progress.note(number, data)

        try:
            reply = await fetch(port, ask.path, ask.body, note)
            reply.body()  # raises for an error
        finally:
            if watched.any:
                traces.append(watched.trace())


async def _answered(port: int, ask: Ask) -> Trace:
    watched = _Watched()
    reply = await fetch(port, ask.path, ask.body, watched.note)
    reply.body()  # raises for an error
    return watched.trace()


class _Watched:
    """Times of the events of a reply while it arrives."""

    def __init__(self) -> None:
        self._asked_s = perf_counter()
        self._at_s: list[float] = []

    def note(self, data: bytes) -> None:
        self._at_s += [perf_counter()] * data.count(EVENT)

    @property
    def any(self) -> bool:
        """Whether there was an event."""
        return bool(self._at_s)

    def trace(self) -> Trace:
        """Raises `EngineError` if there was none."""
        if not self._at_s:
            raise EngineError("a reply had no events")
        return Trace(self._asked_s, len(self._at_s), self._at_s)


async def _health_during(port: int, ask: Ask, pause_s: float) -> list[Reply]:
    asked, probes = asyncio.create_task(fetch(port, ask.path, ask.body)), list[Reply]()
    while not asked.done():
        probes.append(await fetch(port, "/health"))
        await asyncio.sleep(pause_s)
    return [await asked, *probes]


COUNTED = {"stream_options": {"include_usage": True}}
"""Makes a server report the number of generated tokens."""


def asks(jobs: Sequence[Job], further: Mapping[str, Any] | None = None) -> list[Ask]:
    """Streamed greedy requests of fixed length, with `further` fields for a server."""
    return [Ask("/v1/completions", json.dumps(_body(job) | dict(further or {})).encode()) for job in jobs]


def _body(job: Job) -> dict[str, Any]:
    asked = {"prompt": list(job.prompt), "max_tokens": job.tokens}
    return {**asked, "temperature": 0, "ignore_eos": True, "stream": True}


class Completions:
    """A client of one server on this machine, in this process."""

    def __init__(self, name: str, port: int, further: Mapping[str, Any] | None = None) -> None:
        self._name, self._port = name, port
        self._further = {**COUNTED, **(further or {})}

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        with self._named():
            load = closed_loop(self._port, self._asks(jobs), outstanding)
            return self._served(jobs, load.replies)

    def interrupt(self, stall: Stall) -> Served:
        with self._named():
            [newcomer] = self._asks([stall.newcomer])
            load = interrupted(self._port, self._asks(stall.streams), newcomer, stall.after)
            return self._served([*stall.streams, stall.newcomer], load.replies)

    def overtaken(self, streams: Sequence[Job], newcomers: Sequence[Job], after: int) -> Overtaken:
        """See `overtaken`. The last events of a reply have no token, but come with or right after the last one."""
        with self._named():
            return overtaken(self._port, self._asks(streams), self._asks(newcomers), after)

    def _asks(self, jobs: Sequence[Job]) -> list[Ask]:
        return asks(jobs, self._further)

    def _served(self, jobs: Sequence[Job], replies: Sequence[Reply]) -> Served:
        return Served([trace(job, reply) for job, reply in zip(jobs, replies, strict=True)])

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            raise EngineError(f"{self._name}: {error}") from error


def trace(job: Job, reply: Reply) -> Trace:
    """A time for each event with output. A token that ends within a character arrives with the next one.

    Raises `EngineError` if the server did not generate the requested number of tokens.
    """
    times, tokens = list[float](), None
    for event in events(reply):
        chunk = json.loads(event.data)
        if _has_output(chunk.get("choices") or []):
            times.append(event.at_s)
        if usage := chunk.get("usage"):
            tokens = usage["completion_tokens"]
    if tokens != job.tokens or not times:
        raise EngineError(f"generated {tokens} tokens instead of {job.tokens}")
    return Trace(reply.asked_s, tokens, times)


def _has_output(choices: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an event has output; the last one has only the finish reason, and one without choices the usage."""
    return any(choice["text"] or choice.get("finish_reason") is None for choice in choices)
