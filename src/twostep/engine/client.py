"""The owner's side of the engine's process, for asyncio: submit, follow, cancel, and know how it is."""

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from socket import SHUT_RDWR, socket, socketpair
from threading import Thread
from time import monotonic

from twostep.engine.collector import Event
from twostep.engine.config import EngineConfig
from twostep.engine.messages import Cancel, Failed, FromEngine, Ping, Ready, Refused, Snapshot, Submit, ToEngine, Turned
from twostep.engine.outputs import RequestOutput
from twostep.errors import EngineDiedError


class EngineClient:
    """Owns the process. All methods are for the event loop that `start` ran in."""

    def __init__(self, process: "subprocess.Popen[bytes]", end: socket) -> None:
        """`end` is ours of the socket to the process."""
        self.snapshot: Snapshot | None = None
        """As of the last message."""
        self.heard_s = monotonic()
        """When that came."""
        self.died: EngineDiedError | None = None
        self.unawaited: Callable[[RequestOutput], None] | None = None
        """Hears the outputs of requests that somebody left early."""
        self._process, self._socket = process, end
        self._connection: Connection[ToEngine, FromEngine] = Connection(os.dup(end.fileno()))
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._open: dict[str, asyncio.Queue[Event | Exception]] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        Thread(target=self._read, args=(loop,), name="engine-reader", daemon=True).start()
        Thread(target=self._write, name="engine-writer", daemon=True).start()

    @classmethod
    async def start(cls, path: Path, config: EngineConfig) -> tuple["EngineClient", Ready]:
        """Starts the process and waits until the model is loaded. Raises what stopped it."""
        ours, theirs = socketpair()
        command = [sys.executable, "-m", "twostep.engine.process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        client = cls(process, ours)
        client._connection.send_bytes(pickle.dumps((path, config)))
        try:
            return client, await client._ready
        except BaseException:
            await client.stop(grace_s=0)
            raise

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    async def follow_all(self, submits: Sequence[Submit]) -> AsyncGenerator[Event]:
        """Submits requests and yields what comes of them, until each has its output. Whoever leaves early cancels them.

        Raises `TwostepError` if one is refused, `EngineDiedError` if the engine dies meanwhile.
        """
        if self.died:
            raise self.died
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        left = {submit.id for submit in submits}
        self._open.update(dict.fromkeys(left, queue))
        try:
            for submit in submits:
                self._outbox.put(submit)
            while left:
                event = await queue.get()
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
                self._outbox.put(Cancel(id_))

    def ping(self) -> None:
        """Asks for a message: `heard_s` tells when one came."""
        if not self.died:
            self._outbox.put(Ping())

    async def stop(self, grace_s: float = 5) -> None:
        """Ends the process: it sees its socket closed between two steps."""
        self._outbox.put(None)
        with suppress(OSError):  # the process ended before
            self._socket.shutdown(SHUT_RDWR)  # closing alone would wait for the thread that reads
        try:
            await asyncio.to_thread(self._process.wait, grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._socket.close()
        self._connection.close()

    def _write(self) -> None:
        """In its own thread: the engine reads between two steps, and the socket may hold less than a long prompt."""
        with suppress(OSError):  # the process ended: the reader sees it too
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)

    # --- what comes -----------------------------------------------------------------------------------------------

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """In its own thread: one wake-up of the event loop for each message."""
        try:
            while True:
                loop.call_soon_threadsafe(self._hear, self._connection.recv())
        except (EOFError, OSError, RuntimeError):  # the process ended, we closed, or the event loop did
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)  # for its status
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._bury)

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

    def _pass_on(self, event: Event | Refused) -> None:
        if queue := self._open.get(event.id):
            queue.put_nowait(event.error if isinstance(event, Refused) else event)
        elif self.unawaited and isinstance(event, RequestOutput):
            self.unawaited(event)

    def _bury(self) -> None:
        """Whoever waits is told."""
        self.died = EngineDiedError(f"the engine's process ended with status {self._process.poll()}")
        if not self._ready.done():
            self._ready.set_exception(self.died)
        for queue in self._open.values():
            queue.put_nowait(self.died)
