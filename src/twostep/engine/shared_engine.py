"""One engine for several threads: their calls are served together, and each hears of its own requests only.

No thread of its own drives the engine: whoever waits for an answer takes a turn, and does a part of what is to be done
for all. Turns are given in the order in which they were asked for, so that whoever submits comes between two steps.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, current_thread, main_thread
from time import sleep
from types import FrameType, TracebackType
from typing import Any

from twostep.engine.engine import Engine
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import TwostepError
from twostep.processes import Owner

IDLE_LOOK_S = 0.005
"""How long a thread sleeps at a time while there is nothing to compute: another one may have submitted meanwhile."""


@dataclass(eq=False)
class Call:
    """Requests that belong together, and what has come of them that nobody has taken yet."""

    open: set[str] = field(default_factory=set)
    """Ids of those that have not ended."""
    events: deque[Event] = field(default_factory=deque)
    error: str | None = None
    """Why nothing more comes."""


class SharedEngine:
    """Safe to use from several threads. Signals wait while the engine's books are open (see `SignalDelay`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owner = Owner("this LLM")
        self._signals = SignalDelay(hurry=engine.stop_step)
        self._lock = Turns()
        self._calls: dict[str, Call] = {}
        """By the ids of open requests."""
        self._left: deque[Call] = deque()
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
        """`Engine.submit` for a call; within `turn`, which may be for several requests."""
        self.check()
        id_ = self._engine.submit(prompt, params, id=id, priority=priority, cache_salt=cache_salt, stream=stream)
        self._calls[id_] = call
        call.open.add(id_)
        return id_

    def abort(self, id: str) -> None:
        """Ends a request early; its output comes with what it has. Nothing happens if it has ended."""
        with self.turn():
            self.check()
            self._engine.abort(id)

    def events(self, call: Call) -> Iterator[Event]:
        """What comes of a call's requests, also of those submitted meanwhile, until none is open.

        Serves whatever is under way while it waits. Raises what the engine raises, `TwostepError` if it is closed.
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
        """Aborts what is open of a call and drops what came of it.

        Never waits, since the garbage collector may call it in the midst of anything: where another has the turn, that
        one does it. Does nothing in a forked child.
        """
        if self._owner.here and (call.open or call.events):
            self._left.append(call)
            self._clear_up()

    def close(self) -> None:
        """Frees what the engine has. Calls that are under way raise `TwostepError`. Does nothing the second time,
        and in a forked child."""
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
        """The right to use the engine. Waits until those who asked before have had it."""
        self._owner.check()
        with self._signals, self._lock:
            try:
                yield
            finally:
                self._abort_left()
        self._clear_up()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _advance(self, call: Call) -> None:
        """Ends the step under way, or begins one: apart, so that others come between. Nothing if another did it."""
        idle_s = 0.0
        with self.turn():
            if call.events or call.error or not call.open:
                return
            if self._engine.computing:
                self._engine.end()
            else:
                self._route(self._engine.begin())
                idle_s = self._engine.idle_s() or 0.0
        if idle_s:  # a static batch that is not full waits for others, who may submit meanwhile
            sleep(min(idle_s, IDLE_LOOK_S))

    def _route(self, events: Sequence[Event]) -> None:
        """To their calls. What an aborted request gave after its call had left is for nobody."""
        for event in events:
            if call := self._calls.get(event.id):
                call.events.append(event)
                if isinstance(event, RequestOutput):
                    del self._calls[event.id]
                    call.open.discard(event.id)  # last: who finds nothing open finds all events

    def _clear_up(self) -> None:
        """Those who left while another had the turn, which may not have seen it any more."""
        while self._left:
            with self._signals:
                if not self._lock.acquire_if_free():
                    return
                try:
                    self._abort_left()
                finally:
                    self._lock.release()

    def _abort_left(self) -> None:
        """Within a turn. The last to leave waits until the engine has nothing to do."""
        while self._left:
            call = self._left.popleft()
            for id_ in call.open:
                self._calls.pop(id_, None)
                self._engine.abort(id_)
            call.open.clear()
            call.events.clear()
        if not self._calls and self._engine.outstanding:
            self._engine.abort_all()


class Turns:
    """A lock that is given in the order in which it was asked for: who gives it back and asks again comes last."""

    def __init__(self) -> None:
        self._changed = Condition(Lock())
        self._queue: deque[object] = deque()
        """Tickets; whose is the first has the turn."""

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
        """Takes it unless somebody has it or waits for it. Does not wait."""
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
        """To who has waited longest."""
        with self._changed:
            self._queue.popleft()
            self._changed.notify()


SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Those whose handlers raise: Python's own for Ctrl-C, the command's for an orderly end."""

Handler = Callable[[int, FrameType | None], Any]


class SignalDelay:
    """Within `with`, signals wait; then the last that came gets its handler. `with` may be nested, and used by several
    threads.

    Only the main thread has anything to hold back: handlers run nowhere else. Those that are not Python's stay.
    """

    def __init__(self, hurry: Callable[[], None] = lambda: None) -> None:
        """`hurry` is called when a signal comes, in the midst of things: it may make the end come soon."""
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
