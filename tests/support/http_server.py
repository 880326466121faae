"""Servers on loopback for tests: an engine, and fronts with settings of their own over it, in one thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from twostep.config.configs import EngineConfig, ServerConfig
from twostep.engine.process.client import EngineClient
from twostep.engine.process.messages import Ready, Snapshot
from twostep.model.loaded import LoadedModel, open_model
from twostep.server.http.listening import listen
from twostep.server.run import Front
from twostep.server.state import ServerState

NAME = "small"
T = TypeVar("T")


@dataclass
class Served:
    """One front."""

    state: ServerState
    url: str
    front: Front


@dataclass
class Host:
    """An engine's process and the event loop that its fronts run in."""

    model: LoadedModel
    client: EngineClient
    ready: Ready
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 20) -> T:
        """In the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def snapshot(self) -> Snapshot:
        """How the engine is now."""
        return self.run(self._snapshot())

    @contextmanager
    def turns(self) -> Iterator["Turns"]:
        """Watches the event loop while the block runs."""
        turns = Turns()
        watch = asyncio.run_coroutine_threadsafe(turns.watch(), self.loop)
        try:
            yield turns
        finally:
            watch.cancel()

    async def _snapshot(self) -> Snapshot:
        heard_s = self.client.heard_s
        self.client.ping()
        while self.client.heard_s == heard_s or self.client.snapshot is None:
            await asyncio.sleep(0.005)
        return self.client.snapshot

    @contextmanager
    def front(
        self,
        *,
        model: LoadedModel | None = None,
        loaded: bool = True,
        small_sends: bool = False,
        loopback: bool = True,
        **settings: Any,
    ) -> Iterator[Served]:
        """A front with these of `ServerConfig`; not `loaded`: as while the model is being loaded. With `small_sends`
        the system takes little of what clients do not read; not `loopback`: as if others reached it."""
        config = ServerConfig(**{"port": 0, "drain_s": 0, "log": "off", **settings})
        state = ServerState(config, model or self.model, (NAME, "alias/of-it"), loopback=loopback)
        with listen(config) as listeners:
            front = Front(state)
            if small_sends:
                for listener in listeners.sockets:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            if loaded:
                state.loaded(self.client, self.ready)
            serving = asyncio.run_coroutine_threadsafe(front.serve(sockets=listeners.sockets), self.loop)
            pulse = asyncio.run_coroutine_threadsafe(state.pulse.run(self.client), self.loop)
            try:
                yield Served(state, listeners.urls[0], front)
            finally:
                pulse.cancel()
                state.draining = True
                serving.result(20)
                state.close()


class Turns:
    """How long the event loop was kept from other tasks, in CPU time of its thread: others do not stretch it."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0.0005)
            now_s = time.thread_time()
            self.longest_s, before_s = max(self.longest_s, now_s - before_s), now_s


@contextmanager
def host(path: Path, **settings: Any) -> Iterator[Host]:
    """An engine with these of `EngineConfig`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    model = open_model(path)
    try:
        starting = asyncio.run_coroutine_threadsafe(EngineClient.start(path, EngineConfig(**settings)), loop)
        client, ready = starting.result(60)
        try:
            yield Host(model, client, ready, loop)
        finally:
            asyncio.run_coroutine_threadsafe(client.stop(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(_wind_up(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _wind_up() -> None:
    """What `asyncio.run` does at its end."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def within(seconds: float, what: Callable[[], bool]) -> bool:
    """Whether it comes true by then."""
    deadline_s = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
