"""Runs a server: binds its addresses, starts the backends, serves and shuts down in order."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType

import uvicorn

from twostep.background import background_output
from twostep.config.configs import EngineConfig, ServerConfig
from twostep.engine.backend import Capabilities
from twostep.engine.process.engine_process import EngineProcess
from twostep.engine.process.local_backend import LocalBackend
from twostep.errors import TwostepError
from twostep.model.loaded import LoadedModel, open_model
from twostep.openai_api.api_error import ApiError
from twostep.server.app import create_app
from twostep.server.http.connections import CHECK_S, Connection
from twostep.server.http.listening import Listeners, listen
from twostep.server.state import ServedModel, ServerState
from twostep.server.systemd import SystemdNotifier
from twostep.turns import take_short_turns

CLOSE_S = 5
"""How long clients may take to read their replies after the last request has ended."""

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs, so that none is closed while one writes."""

ONE_SIGNAL_S = 0.5
"""Signals closer together count as one: a signal to a process group, as from `timeout make`, arrives twice."""

SWITCH_S = 0.0005
"""How long a thread that runs Python, such as one that parses a body, may delay the event loop. Python's default of 5
ms makes the tokens of small models visibly late."""

Announce = Callable[[ServerConfig, Capabilities, Listeners], None]
"""Called when requests are accepted, with the port and the names in use and what the first model's backend can
serve."""


def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    path: Path,
    announce: Announce,
    engine: EngineProcess | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests finish for `drain_s`; a second signal ends the process at
    once. Requests that arrive while the model is loaded are refused with the reason.

    Raises `TwostepError` if the address, the model or a setting cannot be used, and `EngineDiedError` if the engine
    keeps dying. Meanwhile, writing to standard output and error never waits. `engine`: the process of the first engine,
    if it runs already.
    """
    names = config.served_model_name or (path.name.removesuffix(".gguf"),)
    model = open_model(path)
    with listen(config) as listeners, background_output() as dropped_lines:
        config = replace(config, port=listeners.port, served_model_name=names)
        backend = LocalBackend.of(path, engine_config, lambda event, line: state.log_event(event, line), engine)
        served = [ServedModel(names, model, backend)]
        state = ServerState(config, served, loopback=listeners.loopback, dropped_lines=dropped_lines)
        asyncio.run(_serve(state, listeners, announce))


async def _serve(state: ServerState, listeners: Listeners, announce: Announce) -> None:
    """Serves what connects to `listeners` until `state.draining` is set and requests have finished.

    Raises `TwostepError` if a model cannot be loaded, or a backend has failed for good.
    """
    take_short_turns()
    sys.setswitchinterval(SWITCH_S)
    notifier = SystemdNotifier.of(os.environ)  # before children are started, which must not inherit its variables
    front = Front(state)
    started = [asyncio.Event() for _ in state.models]
    serving = asyncio.create_task(front.serve(sockets=listeners.sockets))
    running = [
        asyncio.create_task(served.backend.run(on_ready.set))
        for served, on_ready in zip(state.models, started, strict=True)
    ]
    announcing = asyncio.create_task(_announce(state, started, listeners, announce, notifier))
    try:
        await asyncio.wait([serving, announcing, *running], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (announcing, *running):
            task.cancel()
        front.should_exit = True
        await asyncio.wait([serving, announcing, *running])
        for served in state.models:
            await served.backend.stop()
        state.close()
    ended_while_loading = state.draining and any(served.backend.phase == "loading" for served in state.models)
    for task in (serving, *(() if ended_while_loading else (*running, announcing))):
        if task is serving or not task.cancelled():
            task.result()


async def _announce(
    state: ServerState,
    started: Sequence[asyncio.Event],
    listeners: Listeners,
    announce: Announce,
    notifier: SystemdNotifier,
) -> None:
    """Accepts requests for each model as soon as it is loaded, announces that all are, and keeps systemd informed."""
    await asyncio.gather(*(_load(state, *one) for one in zip(state.models, started, strict=True)))
    capabilities = state.models[0].backend.capabilities
    assert capabilities is not None
    announce(state.config, capabilities, listeners)
    await notifier.watch(state)


async def _load(state: ServerState, served: ServedModel, started: asyncio.Event) -> None:
    """Loads what the front end needs of a model while its backend starts."""
    await asyncio.to_thread(_prepare, served.model)
    await started.wait()
    gc.collect()
    gc.freeze()  # a full collection would walk through the vocabulary while tokens wait
    state.loaded(served)


def _prepare(model: LoadedModel) -> None:
    """Loads what the first request would wait for. A model without a template serves completions only."""
    _ = model.tokenizer.longest_token_bytes
    with suppress(TwostepError):
        _ = model.template


class Front(uvicorn.Server):
    """uvicorn, except that it drains before it closes its sockets: requests that arrive meanwhile are refused with a
    reason."""

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
        """Handles a signal. It is not raised again afterwards: an orderly shutdown has exit status 0."""
        if not self._state.draining:
            self._signalled_s = monotonic()
            self._state.drain()
        elif monotonic() - self._signalled_s > ONE_SIGNAL_S:
            os._exit(128 + sig)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until the server has shut down."""
        looking = asyncio.create_task(self._look_after_connections())
        try:
            await super().serve(sockets)
        finally:
            looking.cancel()

    async def _look_after_connections(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for connection in self._connections():
                connection.check()

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Aborts connections that have not read their replies after `CLOSE_S`: uvicorn would wait for them, and then
        cancel the tasks that this one awaits."""
        leave = asyncio.get_running_loop().call_later(CLOSE_S, self._abort_connections)
        await super().shutdown(sockets)
        leave.cancel()

    def _abort_connections(self) -> None:
        for connection in self._connections():
            connection.abort()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to shut down."""
        if self._state.draining and self._drain is None:
            self._drain = asyncio.create_task(self._let_finish())
        return await super().on_tick(counter)

    async def _let_finish(self) -> None:
        in_flight, loop = self._state.in_flight, asyncio.get_running_loop()
        if in_flight:
            wait = f"{len(in_flight)} in progress, up to {self._state.config.drain_s:g} s to finish"
            print(f"twostep: shutting down; {wait}; signal again to exit now", file=sys.stderr, flush=True)
        deadline_s = loop.time() + self._state.config.drain_s
        while in_flight and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        in_flight.cancel_all(ApiError("the server is shutting down", status=503, code="shutting_down"))
        self.should_exit = True
