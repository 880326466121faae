"""The owner's side of an engine's process, for asyncio: starts it, exchanges messages with it and notices its end."""

import asyncio
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Self

from twostep.config.configs import EngineConfig
from twostep.engine.backend import Capabilities, Snapshot
from twostep.engine.process.engine_process import EngineProcess
from twostep.engine.process.messages import Cancel, Failed, FromEngine, Load, Ping, Ready, StepEnded, ToEngine
from twostep.engine.process.open_requests import OpenRequests
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


class EngineClient(asyncio.Protocol):
    """Owns the process. All methods are for the event loop that `start` ran in; asyncio calls those at the end."""

    def __init__(self, process: "subprocess.Popen[bytes]", requests: OpenRequests) -> None:
        """`requests` get the events; they outlive this engine."""
        self.capabilities: Capabilities
        """Set when `start` returns."""
        self.snapshot: Snapshot | None = None
        """As of the last message."""
        self.last_message_s = monotonic()
        """When the last message arrived."""
        self.died: EngineDiedError | None = None
        """How the process ended."""
        self._process = process
        self._owner = Owner("this engine's client")
        self._transport: asyncio.WriteTransport
        self._frames = Frames(FROM_ENGINE)
        self._requests = requests
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._failure: TwostepError | None = None
        """The reason that the engine itself gave for its end."""
        self._ending: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._output = _OutputCopy()
        self._stall = _Stall()

    @classmethod
    async def start(
        cls, path: Path, config: EngineConfig, requests: OpenRequests, started: EngineProcess | None = None
    ) -> Self:
        """Starts the process, unless it is `started` already, and waits until the model is loaded.

        Raises `TwostepError` if it cannot be loaded.
        """
        process, ours = (started or EngineProcess()).take()
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(process, requests), sock=ours)
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
    def stalled_s(self) -> float:
        """For how long there have been requests and no step has ended, as of the last message; without requests 0."""
        return self._stall.seconds(self.snapshot.steps if self.snapshot else 0, self._requests.followed)

    def submit(self, frame: bytearray) -> bool:
        """Sends a `Submit`, see `framed`; False if the process is known to have ended."""
        self._owner.check()
        if up := self._ending is None:
            self._transport.write(frame)
        return up

    def cancel(self, id_: str) -> None:
        """See `Backend.cancel`."""
        if self._ending is None:
            self._send(Cancel(id_))

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
            if self._requests.followed and self.last_message_s >= asked_s:
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
        now_ns = monotonic_ns()
        self.last_message_s = now_ns / 1e9
        match message:
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case Failed(error):
                self._fail(error.error())
            case StepEnded(events, snapshot):
                self.snapshot = snapshot
                for event in events:
                    self._requests.deliver(event, now_ns)

    def _fail(self, error: TwostepError) -> None:
        self._failure = error
        if not self._ready.done():
            self._ready.set_exception(error)

    async def _end(self) -> None:
        """A process that lives on without its socket is killed."""
        status = await self._reap(GRACE_S)
        self.died = EngineDiedError(f"the engine's process {self.pid} {_how_it_ended(status, self._failure)}")
        if not self._ready.done():
            self._ready.set_exception(self.died)
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
