"""Servers on loopback for tests: a backend, and front ends with settings of their own over it, in one thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from twostep.config.configs import EngineConfig, ServerConfig
from twostep.engine.backend import Backend, Snapshot
from twostep.engine.process.local_backend import LocalBackend
from twostep.model.loaded import LoadedModel, open_model
from twostep.server.front import Front
from twostep.server.http.listening import listen
from twostep.server.state import ServedModel, ServerState

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
    """A backend and the event loop that its front ends run in."""

    model: LoadedModel
    backend: Backend
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 20) -> T:
        """In the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def snapshot(self) -> Snapshot:
        """The state of the only worker now."""
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
        assert isinstance(self.backend, LocalBackend)
        client = self.backend.client
        assert client is not None
        before_s = client.last_message_s
        client.ping()
        while client.last_message_s == before_s or client.snapshot is None:
            await asyncio.sleep(0.005)
        return client.snapshot

    @contextmanager
    def front(
        self,
        *,
        model: LoadedModel | None = None,
        loaded: bool = True,
        small_sends: bool = False,
        loopback: bool = True,
        others: Sequence[ServedModel] = (),
        **settings: Any,
    ) -> Iterator[Served]:
        """A front with these of `ServerConfig`; not `loaded`: as while the model is being loaded. With `small_sends`
        the system takes little of what clients do not read; not `loopback`: as if others reached it. `others` are
        served beside this host's model."""
        config = ServerConfig(**{"port": 0, "drain_s": 0, "log": "off", **settings})
        served = [ServedModel((NAME, "alias/of-it"), model or self.model, self.backend), *others]
        state = ServerState(config, served, loopback=loopback)
        with listen(config) as listeners:
            front = Front(state)
            if small_sends:
                for listener in listeners.sockets:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            if loaded:
                for one in served:
                    state.loaded(one)
            serving = asyncio.run_coroutine_threadsafe(front.serve(sockets=listeners.sockets), self.loop)
            try:
                yield Served(state, listeners.urls[0], front)
            finally:
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
def hosted(model: LoadedModel, backend: Backend) -> Iterator[Host]:
    """Runs a backend in an event loop of its own; stops it afterwards."""
    with _loop() as loop:
        ready = threading.Event()
        running = asyncio.run_coroutine_threadsafe(backend.run(ready.set), loop)
        running.add_done_callback(lambda _: ready.set())
        try:
            assert ready.wait(60)
            if running.done():
                running.result()
            yield Host(model, backend, loop)
        finally:
            running.cancel()
            asyncio.run_coroutine_threadsafe(backend.stop(), loop).result(20)


@contextmanager
def host(path: Path, **settings: Any) -> Iterator[Host]:
    """An engine with these of `EngineConfig`."""
    backend = LocalBackend.of(path, EngineConfig(**settings), lambda event, line: None)
    with hosted(open_model(path), backend) as made:
        yield made


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    """In a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    try:
        yield loop
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
