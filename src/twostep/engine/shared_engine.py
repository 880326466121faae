"""One engine for several threads: their calls are served together, and each gets the events of its own requests.

No separate thread runs the engine: each thread that waits for an answer takes turns to do a part of the work for all.
Turns are granted in the order of arrival, so that a thread that submits gets one between two steps.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, current_thread, main_thread
from threading import Event as Signal
from types import FrameType, TracebackType
from typing import Any

from twostep.engine.engine import Engine
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import TwostepError
from twostep.processes import Owner


@dataclass(eq=False)
class Call:
    """Requests that belong together, and their events that the caller has not taken yet."""

    open: set[str] = field(default_factory=set)
    """Ids of those that have not ended."""
    events: deque[Event] = field(default_factory=deque)
    error: str | None = None
    """Why there will be no more events."""


class SharedEngine:
    """Safe to use from several threads. Signals are delayed while the engine's state changes (see `SignalDelay`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owner = Owner("this LLM")
        self._signals = SignalDelay(hurry=engine.stop_step)
        self._lock = FairLock()
        self._calls: dict[str, Call] = {}
        """By the ids of open requests."""
        self._left: deque[Call] = deque()
        self._submitted = Signal()
        """Set by a submission: whoever waits for a static batch to fill looks again."""
        self._closed = False

    def check(self) -> None:
        """Raises `TwostepError` if it is closed, `ForkedError` in a forked child."""
        self._owner.check()
        if self._closed:
            raise TwostepError("this LLM is closed")

    def submit(
        self,
        call: Call,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
    ) -> str:
        """`Engine.submit` for a call. The caller holds `turn`, which may be for several requests."""
        self.check()
        id_ = self._engine.submit(prompt, params, id=id, priority=priority, cache_salt=cache_salt, stream=stream)
        self._calls[id_] = call
        call.open.add(id_)
        self._submitted.set()
        return id_

    def abort(self, id: str) -> None:
        """Ends a request early; its output comes with what it has. Nothing happens if it has ended."""
        with self.turn():
            self.check()
            self._engine.abort(id)

    def events(self, call: Call) -> Iterator[Event]:
        """Yields the events of a call's requests, including those submitted meanwhile, until none is open.

        Runs steps for all calls while it waits. Raises what the engine raises, `TwostepError` if it is closed.
        """
        while True:
            done = not call.open
            while call.events:
                yield call.events.popleft()
            if call.error is not None:
                raise TwostepError(call.error)
            if done and not call.open and not call.events:
                return
            self._advance(call)

    def leave(self, call: Call) -> None:
        """Aborts the open requests of a call and drops its events.

        Does not wait, since the garbage collector may call it at any point: if another thread has the turn, that one
        does it. Does nothing in a forked child.
        """
        if self._owner.here and (call.open or call.events):
            self._left.append(call)
            self._clear_up()

    def close(self) -> None:
        """Frees the engine. Running calls raise `TwostepError`. Does nothing when called again, and in a forked
        child."""
        if not self._owner.here or self._closed:
            return
        self._closed = True
        self._engine.stop_step()
        with self.turn():
            for call in self._calls.values():
                call.error = "this LLM was closed while the call was under way"
                call.open.clear()
            self._calls.clear()
            self._engine.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclusive use of the engine. Waits until the threads that asked earlier have had it."""
        self._owner.check()
        with self._signals, self._lock:
            try:
                yield
            finally:
                self._abort_left()
        self._clear_up()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _advance(self, call: Call) -> None:
        """Ends the running step or starts one, not both, so that other threads get turns between. Does nothing if
        another thread has brought an event meanwhile."""
        idle_s = 0.0
        with self.turn():
            if call.events or call.error or not call.open:
                return
            if self._engine.computing:
                self._engine.end()
            else:
                self._route(self._engine.begin())
                idle_s = self._engine.idle_s() or 0.0
                self._submitted.clear()
        if idle_s:  # a static batch that is not full waits for others
            self._submitted.wait(idle_s)

    def _route(self, events: Sequence[Event]) -> None:
        """Gives events to their calls. Events of requests whose call has left are dropped."""
        for event in events:
            if call := self._calls.get(event.id):
                call.events.append(event)
                if isinstance(event, RequestOutput):
                    del self._calls[event.id]
                    call.open.discard(event.id)  # last: a call without open requests has all its events

    def _clear_up(self) -> None:
        """Handles calls that left while another thread had the turn and may not have seen it."""
        while self._left:
            with self._signals:
                if not self._lock.acquire_if_free():
                    return
                try:
                    self._abort_left()
                finally:
                    self._lock.release()

    def _abort_left(self) -> None:
        """Within a turn. The last call to leave waits until the engine is idle."""
        while self._left:
            call = self._left.popleft()
            for id_ in call.open:
                self._calls.pop(id_, None)
                self._engine.abort(id_)
            call.open.clear()
            call.events.clear()
        if not self._calls and self._engine.outstanding:
            self._engine.abort_all()


class FairLock:
    """A lock that is granted in the order of requests: a thread that releases it and asks again is last."""

    def __init__(self) -> None:
        self._changed = Condition(Lock())
        self._queue: deque[object] = deque()
        """Tickets; the first one holds the lock."""

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket:
                    self._changed.wait()
            except BaseException:
                self._queue.remove(ticket)
                self._changed.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire_if_free(self) -> bool:
        """Acquires it if no thread holds it or waits for it; returns whether it did. Does not wait."""
        if not self._changed.acquire(blocking=False):
            return False
        try:
            free = not self._queue
            if free:
                self._queue.append(object())
            return free
        finally:
            self._changed.release()

    def release(self) -> None:
        """Grants it to the thread that has waited longest."""
        with self._changed:
            self._queue.popleft()
            self._changed.notify()


SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals whose handlers raise: Python's own for Ctrl-C, the command's for an orderly shutdown."""

Handler = Callable[[int, FrameType | None], Any]


class SignalDelay:
    """Delays signals within `with`: raised between two lines of the scheduler they would leave its state inconsistent.
    Afterwards the handler of the last one runs. `with` may be nested and used by several threads.

    Only the main thread delays anything, as handlers run there only. Handlers that are not Python's are left alone.
    """

    def __init__(self, hurry: Callable[[], None] = lambda: None) -> None:
        """`hurry` is called at once when a signal arrives: it may shorten the wait."""
        self._hurry = hurry
        self._depth = 0
        self._handlers: dict[int, Handler] = {}
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if current_thread() is not main_thread():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._came = None
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if current_thread() is not main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if self._came:
            handlers[self._came[0]](*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame
        self._hurry()
