"""The owner's side of the engine's process, for asyncio: submit, follow, cancel, and know how it is."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from time import monotonic
from typing import Self

from twostep.config.configs import EngineConfig
from twostep.engine.collector import Event
from twostep.engine.outputs import RequestOutput
from twostep.engine.process.messages import (
    Accepted,
    Cancel,
    Failed,
    FromEngine,
    Load,
    Ping,
    Ready,
    Refused,
    Snapshot,
    Submit,
    ToEngine,
    Turned,
)
from twostep.engine.process.wire import Frames, framed
from twostep.errors import EngineDiedError
from twostep.processes import Owner, environment, twostep_module

GRACE_S = 5.0
"""How long an engine whose socket is closed may take to end: it looks between two steps."""


LAST_WORDS_S = 1.0
"""How long a dead process's output is waited for."""
LONGEST_LINE = 1 << 16
"""Bytes of a line of the engine's output; a longer one is broken."""

TURN_S = 0.001
"""How long a caller may take events without a pause: the others' tokens wait meanwhile."""


class _Inbox:
    """What has come for the requests of one caller."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | Accepted | Exception] = asyncio.Queue()
        self._waited_s = monotonic()

    async def next(self) -> Event | Accepted | Exception:
        """The next event. After `TURN_S` without a wait the other tasks of the event loop have a turn first: a step of
        a request with 128 choices gives 128 events."""
        if self.events.empty():
            event = await self.events.get()
            self._waited_s = monotonic()
            return event
        if monotonic() - self._waited_s > TURN_S:
            await asyncio.sleep(0)
            self._waited_s = monotonic()
        return self.events.get_nowait()


class EngineClient(asyncio.Protocol):
    """Owns the process. All methods are for the event loop that `start` ran in; what asyncio calls is at the end."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.snapshot: Snapshot | None = None
        """As of the last message."""
        self.heard_s = monotonic()
        """When that came."""
        self.died: EngineDiedError | None = None
        """How the process ended, once it has and everybody was told."""
        self.unawaited: Callable[[RequestOutput], None] | None = None
        """Hears the outputs of requests that somebody left early."""
        self._process = process
        self._owner = Owner("this engine's client")
        self._transport: asyncio.WriteTransport
        self._frames = Frames()
        self._open: dict[str, asyncio.Queue[Event | Accepted | Exception]] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None
        """What the engine itself said of its end."""
        self._burial: asyncio.Task[None] | None = None
        self._buried = asyncio.Event()
        self._output = _PassOn()

    @classmethod
    async def start(cls, path: Path, config: EngineConfig) -> tuple[Self, Ready]:
        """Starts the process and waits until the model is loaded. Raises what stopped it."""
        ours, theirs = socketpair()
        command = twostep_module("twostep.engine.process.host", str(theirs.fileno()))
        # What the engine prints comes through us: a step never waits for whoever reads our log.
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        theirs.close()
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(process), sock=ours)
        try:
            await loop.connect_read_pipe(lambda: client._output, process.stdout)
            client._say(Load(path, config))
            return client, await client._ready
        except BaseException:
            await client.stop(grace_s=0)
            raise

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    async def follow_all(self, submits: Sequence[Submit]) -> AsyncGenerator[Event | Accepted]:
        """Submits requests and yields what comes of them, until each has its output. Whoever leaves early cancels them.

        Raises `TwostepError` if one is refused, `EngineDiedError` if the engine dies meanwhile.
        """
        self._owner.check()
        if self.died:
            raise self.died
        inbox = _Inbox()
        left = {submit.id for submit in submits}
        self._open.update(dict.fromkeys(left, inbox.events))
        try:
            for submit in submits:
                self._say(submit)
            while left:
                event = await inbox.next()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, RequestOutput):
                    left.remove(event.id)
                    del self._open[event.id]
                yield event
        finally:
            self._leave(left)

    def _leave(self, ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        for id_ in ids:
            del self._open[id_]
            if not self.died:
                self._say(Cancel(id_))

    def ping(self) -> None:
        """Asks for a message: `heard_s` tells when one came."""
        if not self.died:
            self._say(Ping())

    async def dead(self) -> EngineDiedError:
        """Waits until the process has ended; returns how."""
        await self._buried.wait()
        assert self.died is not None
        return self.died

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Ends the process: it sees its socket closed between two steps. Does nothing in a forked child."""
        if not self._owner.here:
            return
        self._transport.abort()
        await self._reap(grace_s)

    async def _reap(self, grace_s: float) -> int:
        """Its status, once its last words are passed on; it is killed if it has not ended by then."""
        try:
            status = await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        await self._output.end()
        return status

    def _say(self, message: ToEngine) -> None:
        """Does not wait: the engine reads between two steps, and what the socket does not hold is kept until then."""
        self._transport.write(framed(message))

    # --- what comes -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._hear(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process ended, or we closed."""
        self._burial = asyncio.get_running_loop().create_task(self._bury())

    def _hear(self, message: FromEngine) -> None:
        self.heard_s = monotonic()
        match message:
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case Failed(error):
                self._failure = error
                if not self._ready.done():
                    self._ready.set_exception(error)
            case Turned(events, snapshot):
                self.snapshot = snapshot
                for event in events:
                    self._pass_on(event)

    def _pass_on(self, event: Event | Refused | Accepted) -> None:
        if queue := self._open.get(event.id):
            queue.put_nowait(event.error if isinstance(event, Refused) else event)
        elif self.unawaited and isinstance(event, RequestOutput):
            self.unawaited(event)

    async def _bury(self) -> None:
        """Whoever waits is told. A process that lives on without its socket is of no use to anybody."""
        status = await self._reap(GRACE_S)
        self.died = EngineDiedError(f"the engine's process {self._process.pid} {_how_it_ended(status, self._failure)}")
        if not self._ready.done():
            self._ready.set_exception(self.died)
        for queue in self._open.values():
            queue.put_nowait(self.died)
        self._buried.set()


class _PassOn(asyncio.Protocol):
    """Copies what the process prints to our standard error, by whole lines, so that none is mixed up with ours."""

    def __init__(self) -> None:
        self._begun = b""
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()

    async def end(self) -> None:
        """Waits until all is passed on. A child of the process may still hold the pipe open: it is not waited for."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), LAST_WORDS_S)
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        lines, newline, self._begun = (self._begun + data).rpartition(b"\n")
        if len(self._begun) > LONGEST_LINE:
            lines, self._begun = lines + newline + self._begun, b""
            newline = b"\n"
        self._write(lines + newline)

    def connection_lost(self, exc: Exception | None) -> None:
        self._write(self._begun)
        self._ended.set()

    def _write(self, lines: bytes) -> None:
        if lines and sys.stderr is not None:
            sys.stderr.write(lines.decode(errors="backslashreplace"))
            sys.stderr.flush()


def _how_it_ended(status: int, failure: Exception | None) -> str:
    if failure is not None:
        return f"ended: {failure}"
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the system does so when memory runs out)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
