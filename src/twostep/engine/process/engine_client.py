"""The owner's side of an engine's process, for asyncio: starts it, exchanges messages with it and notices its end."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Self

from twostep.config.configs import EngineConfig
from twostep.engine.backend import Accepted, Capabilities, Snapshot, Submit
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.process.engine_process import EngineProcess
from twostep.engine.process.messages import Cancel, Failed, FromEngine, Load, Ping, Ready, Refused, StepEnded, ToEngine
from twostep.engine.process.wire import FROM_ENGINE, Frames, WireError, framed
from twostep.errors import EngineDiedError, TwostepError
from twostep.processes import Owner

GRACE_S = 5.0
"""How long an engine whose socket is closed may take to end: it looks between two steps."""
LAST_OUTPUT_S = 1.0
"""How long the output of a process that has ended is waited for."""
LONGEST_LINE = 1 << 16
"""Bytes of a line of the engine's output; a longer one is split."""
STALL_CHECK_S = 1.0
"""How often an engine with requests is asked for a snapshot."""
TURN_S = 0.001
"""How long a caller may take events without a pause, while other requests' tokens wait."""

OnLateOutput = Callable[[RequestOutput], None]


class _Inbox:
    """The events of one caller's requests that it has not taken yet."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | Accepted | TwostepError] = asyncio.Queue()
        self._waited_s = monotonic()

    async def next(self) -> Event | Accepted:
        """The next event; raises an error that arrived instead. Lets other tasks of the event loop run after `TURN_S`
        without a wait: a step of a request with 128 choices gives 128 events."""
        if self.events.empty():
            event = await self.events.get()
            self._waited_s = monotonic()
        else:
            if monotonic() - self._waited_s > TURN_S:
                await asyncio.sleep(0)
                self._waited_s = monotonic()
            event = self.events.get_nowait()
        if isinstance(event, TwostepError):
            raise event
        return event


class EngineClient(asyncio.Protocol):
    """Owns the process. All methods are for the event loop that `start` ran in; asyncio calls those at the end."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.capabilities: Capabilities
        """Set when `start` returns."""
        self.snapshot: Snapshot | None = None
        """As of the last message."""
        self.last_message_s = monotonic()
        """When the last message arrived."""
        self.died: EngineDiedError | None = None
        """How the process ended; set once every caller was told."""
        self._process = process
        self._owner = Owner("this engine's client")
        self._transport: asyncio.WriteTransport
        self._frames = Frames(FROM_ENGINE)
        self._open: dict[str, _Inbox] = {}
        self._late: dict[str, OnLateOutput] = {}
        """Requests that nobody follows any more, until their outputs arrive."""
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._failure: TwostepError | None = None
        """The reason that the engine itself gave for its end."""
        self._ending: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._output = _OutputCopy()
        self._stall = _Stall()

    @classmethod
    async def start(cls, path: Path, config: EngineConfig, started: EngineProcess | None = None) -> Self:
        """Starts the process, unless it is `started` already, and waits until the model is loaded.

        Raises `TwostepError` if it cannot be loaded.
        """
        process, ours = (started or EngineProcess()).take()
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(process), sock=ours)
        try:
            await loop.connect_read_pipe(lambda: client._output, process.stdout)
            client._send(Load.of(path, config))
            client.capabilities = (await client._ready).capabilities
        except BaseException:
            await client.stop(grace_s=0)
            raise
        return client

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def outstanding(self) -> int:
        """Requests whose events somebody follows."""
        return len(self._open)

    @property
    def stalled_s(self) -> float:
        """For how long there have been requests and no step has ended, as of the last message; without requests 0."""
        return self._stall.seconds(self.snapshot.steps if self.snapshot else 0, self.outstanding)

    async def submit(
        self, requests: Sequence[Submit], on_late_output: OnLateOutput
    ) -> AsyncGenerator[Event | Accepted]:
        """See `Backend.submit`."""
        self._owner.check()
        if self.died:
            raise self.died
        frames = [framed(request) for request in requests]  # all or none: one may be impossible to send
        inbox = _Inbox()
        left = {request.id for request in requests}
        self._open.update(dict.fromkeys(left, inbox))
        try:
            for frame in frames:
                self._transport.write(frame)
            while left:
                event = await inbox.next()
                if isinstance(event, RequestOutput):
                    left.remove(event.id)
                    del self._open[event.id]
                yield event
        finally:
            self._leave(left, on_late_output)

    def _leave(self, ids: Iterable[str], on_late_output: OnLateOutput) -> None:
        """Nobody follows these any more."""
        for id_ in ids:
            del self._open[id_]
            if not self.died:
                self._late[id_] = on_late_output
                self._send(Cancel(id_))

    def cancel(self, id: str) -> None:
        """See `Backend.cancel`."""
        if id in self._open and not self.died:
            self._send(Cancel(id))

    def ping(self) -> None:
        """Asks for a snapshot: `last_message_s` tells when it arrived."""
        if not self.died:
            self._send(Ping())

    async def wait_until_dead(self) -> EngineDiedError:
        """Asks for snapshots, so that a stall is noticed, until the process has ended; returns how it ended.

        An engine that has not answered is not asked again.
        """
        asked_s = 0.0
        while not self._ended.is_set():
            _ = self.stalled_s
            if self.outstanding and self.last_message_s >= asked_s:
                asked_s = monotonic()
                self.ping()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), STALL_CHECK_S)
        assert self.died is not None
        return self.died

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Ends the process, which sees its socket closed between two steps. Does nothing in a forked child."""
        if not self._owner.here:
            return
        self._transport.abort()
        await self._reap(grace_s)

    async def _reap(self, grace_s: float) -> int:
        """The exit status, after the last output is copied; kills the process if it takes longer than `grace_s`."""
        try:
            status = await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        await self._output.end()
        return status

    def _send(self, message: ToEngine) -> None:
        """Does not wait: the engine reads between two steps, and the transport keeps what the socket does not take."""
        self._transport.write(framed(message))

    # --- called by asyncio ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._receive(message)
        except WireError as error:  # what follows cannot be read either
            self._fail(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The process ended, or this end was closed."""
        self._ending = asyncio.get_running_loop().create_task(self._end())

    def _receive(self, message: FromEngine) -> None:
        self.last_message_s = monotonic()
        match message:
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case Failed(error):
                self._fail(error.error())
            case StepEnded(events, snapshot):
                self.snapshot = snapshot
                for event in events:
                    self._route(event)

    def _fail(self, error: TwostepError) -> None:
        self._failure = error
        if not self._ready.done():
            self._ready.set_exception(error)

    def _route(self, event: Event | Refused | Accepted) -> None:
        if inbox := self._open.get(event.id):
            inbox.events.put_nowait(event.error.error() if isinstance(event, Refused) else event)
        elif isinstance(event, RequestOutput) and (on_late_output := self._late.pop(event.id, None)):
            on_late_output(event)
        elif isinstance(event, Refused):
            self._late.pop(event.id, None)

    async def _end(self) -> None:
        """Tells every caller. A process that lives on without its socket is killed."""
        status = await self._reap(GRACE_S)
        self.died = EngineDiedError(f"the engine's process {self.pid} {_how_it_ended(status, self._failure)}")
        if not self._ready.done():
            self._ready.set_exception(self.died)
        for inbox in self._open.values():
            inbox.events.put_nowait(self.died)
        self._late.clear()
        self._ended.set()


class _Stall:
    """Measures how long an engine with requests has ended no step."""

    def __init__(self) -> None:
        self._steps = -1
        self._since_s = monotonic()

    def seconds(self, steps: int, outstanding: int) -> float:
        """With the number of steps that have ended so far, and of requests."""
        if steps != self._steps or not outstanding:
            self._steps, self._since_s = steps, monotonic()
        return monotonic() - self._since_s


class _OutputCopy(asyncio.Protocol):
    """Copies the output of the process to this one's standard error by whole lines, so that none are mixed up."""

    def __init__(self) -> None:
        self._partial = b""
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()

    async def end(self) -> None:
        """Waits until all of it is copied, but not for a child of the process that still has the pipe open."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), LAST_OUTPUT_S)
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        lines, newline, self._partial = (self._partial + data).rpartition(b"\n")
        if len(self._partial) > LONGEST_LINE:
            lines, self._partial = lines + newline + self._partial, b""
            newline = b"\n"
        self._write(lines + newline)

    def connection_lost(self, exc: Exception | None) -> None:
        self._write(self._partial)
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
