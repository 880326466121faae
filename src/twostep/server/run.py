"""The process of a server: binds, loads the model, serves, and ends in order."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import FrameType

import uvicorn

from twostep.background import background_output
from twostep.config.configs import EngineConfig, ServerConfig
from twostep.engine.process.client import EngineClient
from twostep.engine.process.messages import Ready
from twostep.errors import TwostepError
from twostep.model.loaded import open_model
from twostep.openai_api.errors import ApiError
from twostep.server.app import create_app
from twostep.server.http.connections import LOOK_S, Connection
from twostep.server.http.listening import Listeners, listen
from twostep.server.state import ServerState
from twostep.server.supervisor import Supervisor
from twostep.server.systemd import SystemdNotifier
from twostep.turns import take_short_turns

CLOSE_S = 5
"""How long clients may take to read what they were sent, once every request has had its reply."""

KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients keep theirs, so that none is closed as they write to it."""

ONE_SIGNAL_S = 0.5
"""Signals so close are one: whoever signals a whole group of processes, as `timeout` does `make`, reaches us twice."""

SWITCH_S = 0.0005
"""A thread that runs Python, such as one that reads a body, gives way to the event loop after so long. With Python's
default of 5 ms the tokens of small models would be visibly late."""

Announce = Callable[[ServerConfig, Ready, Listeners], None]
"""Called when requests are taken on, with the port and the names that are in use."""


def serve(config: ServerConfig, engine_config: EngineConfig, path: Path, announce: Announce) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests finish for `drain_s`; a second signal ends the process at
    once. Whoever asks while the model is loaded is told so.

    Raises `TwostepError` if the address or the model cannot be used, or the settings not with this model, and
    `EngineDiedError` if the engine keeps dying. While it lasts, writing to standard output and error never waits.
    """
    names = config.served_model_name or (path.name.removesuffix(".gguf"),)
    model = open_model(path)
    with listen(config) as listeners, background_output() as dropped_lines:
        config = replace(config, port=listeners.port, served_model_name=names)
        state = ServerState(config, model, names, loopback=listeners.loopback, dropped_lines=dropped_lines)
        asyncio.run(_serve(state, engine_config, listeners, announce))


async def _serve(state: ServerState, engine_config: EngineConfig, listeners: Listeners, announce: Announce) -> None:
    """Serves what connects to `listeners` until `state.draining` is set and requests have finished.

    Raises `TwostepError` if the model cannot be loaded, or the engine died and is not started again.
    """
    take_short_turns()
    sys.setswitchinterval(SWITCH_S)
    notifier = SystemdNotifier.of(os.environ)
    front = Front(state)
    state.supervisor = supervisor = Supervisor(state, partial(_start_engine, state, engine_config))
    serving = asyncio.create_task(front.serve(sockets=listeners.sockets))
    watching: list[asyncio.Task[None]] = []

    def on_ready(ready: Ready) -> None:
        announce(state.config, ready, listeners)
        watching.append(asyncio.create_task(notifier.watch(state)))

    supervising = asyncio.create_task(supervisor.run(on_ready))
    try:
        await asyncio.wait([serving, supervising], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (supervising, *watching):
            task.cancel()
        front.should_exit = True
        await asyncio.wait([serving, supervising])
        await supervisor.stop()
        state.close()
    serving.result()
    ended_while_loading = state.draining and supervisor.client is None
    if not supervising.cancelled() and not ended_while_loading:
        supervising.result()


async def _start_engine(state: ServerState, config: EngineConfig, restart: int) -> tuple[EngineClient, Ready]:
    """The engine's process, and beside it what the front needs of the model."""
    if restart:
        return await EngineClient.start(state.model.path, _without_recording(state, config, restart))
    starting = EngineClient.start(state.model.path, config)
    started, _ = await asyncio.gather(starting, asyncio.to_thread(_prepare, state))
    gc.collect()
    gc.freeze()  # a full collection would walk through the vocabulary, while tokens wait
    return started


def _without_recording(state: ServerState, config: EngineConfig, restart: int) -> EngineConfig:
    """One file holds the run of one engine."""
    if config.record and restart == 1:
        state.say("recording_ended", f"{config.record}: the recording ends with the engine that died")
    return replace(config, record=None)


def _prepare(state: ServerState) -> None:
    """So that the first request does not wait for it. A model without a template is for completions."""
    _ = state.model.tokenizer.longest_token_bytes
    with suppress(TwostepError):
        _ = state.model.template


class Front(uvicorn.Server):
    """uvicorn, but that it drains before it closes the door: who comes meanwhile is told, not met by silence."""

    def __init__(self, state: ServerState) -> None:
        config = uvicorn.Config(
            create_app(state, lambda: len(self.server_state.connections)),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2 * CLOSE_S,  # never needed: see `shutdown`
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._state = state
        self._drain: asyncio.Task[None] | None = None
        self._signalled_s = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal. Not passed on afterwards: an orderly end has status 0."""
        if not self._state.draining:
            self._state.draining, self._signalled_s = True, monotonic()
        elif monotonic() - self._signalled_s > ONE_SIGNAL_S:
            os._exit(128 + sig)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until its end."""
        looking = asyncio.create_task(self._look_after_connections())
        try:
            await super().serve(sockets)
        finally:
            looking.cancel()

    async def _look_after_connections(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in self._connections():
                connection.look()

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Whoever has not read its reply by then is left: uvicorn would wait for it, and then cancel what we await."""
        leave = asyncio.get_running_loop().call_later(CLOSE_S, self._abort_connections)
        await super().shutdown(sockets)
        leave.cancel()

    def _abort_connections(self) -> None:
        for connection in self._connections():
            connection.abort()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to close."""
        if self._state.draining and self._drain is None:
            self._drain = asyncio.create_task(self._let_finish())
        return await super().on_tick(counter)

    async def _let_finish(self) -> None:
        flights, loop = self._state.flights, asyncio.get_running_loop()
        if flights:
            wait = f"{len(flights)} under way may finish, for {self._state.config.drain_s:g} s at most"
            print(f"twostep: ending; {wait}; once more ends it at once", file=sys.stderr, flush=True)
        deadline_s = loop.time() + self._state.config.drain_s
        while flights and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        flights.cut_all(ApiError("the server is shutting down", status=503, code="shutting_down"))
        self.should_exit = True
