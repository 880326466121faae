"""Keeps Ctrl-C out of the middle of things: raised between two lines of the scheduler it would leave its books torn."""

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Those whose handlers raise: Python's own for Ctrl-C, the command's for an orderly end."""

Handler = Callable[[int, FrameType | None], Any]


class Undisturbed:
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
