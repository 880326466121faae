"""Engines that die when they are told to, behind the real backend: the host in this process, messages as bytes."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from traceback import print_exc
from typing import Any, cast

from support.engines import Wrap, engine

from twostep.config.values import MemoryBlocks
from twostep.engine.process.engine_client import EngineClient
from twostep.engine.process.engine_host import EngineHost, capabilities
from twostep.engine.process.local_backend import LocalBackend
from twostep.engine.process.messages import Cancel, Ping, StepEnded, ToEngine
from twostep.engine.process.open_requests import OpenRequests
from twostep.engine.process.wire import FROM_ENGINE, TO_ENGINE, Frames, framed
from twostep.errors import EngineDiedError
from twostep.model.loaded import LoadedModel


class _DiedError(Exception):
    """It is over for this engine."""


class MortalEngine:
    """Stands in for an `EngineClient`; dies after so many events, each of which is a message of its own."""

    def __init__(self, model: LoadedModel, requests: OpenRequests, lives: int | None, wrap: Wrap | None) -> None:
        """`lives`: events until it dies; None: it does not."""
        self._stack = ExitStack()
        settings: dict[str, Any] = {"kv_memory": MemoryBlocks(128), "max_num_seqs": 4}
        self._engine = self._stack.enter_context(engine(wrap, model=model, **settings))
        self._host = EngineHost(self._engine, cast(Any, self))
        self._requests, self._left = requests, lives
        self._received: deque[ToEngine] = deque()
        self._incoming, self._outgoing = Frames(TO_ENGINE), Frames(FROM_ENGINE)
        self._work = asyncio.Event()
        self.capabilities, self.snapshot, self.stalled_s = capabilities(self._engine), None, 0.0
        self.died: EngineDiedError | None = None
        self.dead = asyncio.Event()
        self.now_ns = 0
        self._serving = asyncio.create_task(self._serve())

    # --- as `EngineClient` ----------------------------------------------------------------------------------------

    def submit(self, frame: bytearray) -> bool:
        if self.died is None:
            self._give(self._incoming.feed(bytes(frame)))
        return self.died is None

    def cancel(self, id_: str) -> None:
        self._give([Cancel(id_)])

    def ping(self) -> None:
        self._give([Ping()])

    async def wait_until_dead(self) -> EngineDiedError:
        await self.dead.wait()
        assert self.died is not None
        return self.died

    async def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self.died is None:
            self.died = EngineDiedError("the engine's process 7 was killed by SIGKILL")
            self._serving.cancel()
            self._stack.close()
            self.dead.set()

    # --- as the wire of the host ----------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> bool:
        return bool(self._received)

    def recv(self) -> ToEngine:
        return self._received.popleft()

    def send(self, message: StepEnded) -> None:
        for event in message.events:
            for got in self._outgoing.feed(bytes(framed(StepEnded((event,), message.snapshot)))):
                assert isinstance(got, StepEnded)
                self._deliver(got)

    def _deliver(self, message: StepEnded) -> None:
        if self._left == 0:
            raise _DiedError
        self._left = None if self._left is None else self._left - 1
        self._requests.deliver(message.events[0], self._engine._io.now())

    def _give(self, messages: Iterable[ToEngine]) -> None:
        self._received.extend(messages)
        self._work.set()

    async def _serve(self) -> None:
        """Dies as soon as there is an event too many: after the last one was delivered, in the midst of a message."""
        try:
            while True:
                if self._engine.idle_s() is None and not self._received:
                    self._work.clear()
                    await self._work.wait()
                self._host._turn()
                await asyncio.sleep(0)
        except _DiedError:
            self.kill()
        except Exception:  # a defect, or a check of the test
            print_exc()
            self.kill()


class Mortals:
    """Makes the engines of one backend, of which each lives as long as its number among `lives` says, the rest for
    ever."""

    def __init__(self, model: LoadedModel, lives: Iterable[int], wrap: Wrap | None = None) -> None:
        self._model, self._wrap = model, wrap
        self._lives: Iterator[int] = iter(lives)
        self._requests = OpenRequests()
        self.said: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._now_s = 0.0

    async def start(self, restart: int) -> EngineClient:
        await self.may_start.wait()
        return cast(EngineClient, MortalEngine(self._model, self._requests, next(self._lives, None), self._wrap))

    def now_s(self) -> float:
        """So late each time that no backend is given up."""
        self._now_s += 1000
        return self._now_s

    @asynccontextmanager
    async def backend(self) -> AsyncIterator[LocalBackend]:
        made = LocalBackend(self.start, lambda event, line: self.said.append(event), self.now_s, self._requests)
        ready = asyncio.Event()
        running = asyncio.create_task(made.run(ready.set))
        await ready.wait()
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await made.stop()
