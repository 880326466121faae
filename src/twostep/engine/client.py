"""The owner's side of the engine's process, for asyncio: submit, follow, cancel, and know how it is."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from time import monotonic
from typing import Self

from twostep.engine.collector import Event
from twostep.engine.config import EngineConfig
from twostep.engine.messages import (
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
from twostep.engine.outputs import RequestOutput
from twostep.engine.wire import Frames, framed
from twostep.errors import EngineDiedError

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
        self.unawaited: Callable[[RequestOutput], None] | None = None
        """Hears the outputs of requests that somebody left early."""
        self._process = process
        self._transport: asyncio.WriteTransport
        self._frames = Frames()
        self._open: dict[str, asyncio.Queue[Event | Accepted | Exception]] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, path: Path, config: EngineConfig) -> tuple[Self, Ready]:
        """Starts the process and waits until the model is loaded. Raises what stopped it."""
        ours, theirs = socketpair()
        command = [sys.executable, "-m", "twostep.engine.process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(process), sock=ours)
        client._say(Load(path, config))
        try:
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

    async def stop(self, grace_s: float = 5) -> None:
        """Ends the process: it sees its socket closed between two steps."""
        self._transport.abort()
        try:
            await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

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
            case Failed(error) if not self._ready.done():
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
        """Whoever waits is told."""
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 1)  # for its status
        self.died = EngineDiedError(f"the engine's process ended with status {self._process.poll()}")
        if not self._ready.done():
            self._ready.set_exception(self.died)
        for queue in self._open.values():
            queue.put_nowait(self.died)
