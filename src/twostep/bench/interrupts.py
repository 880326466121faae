"""Ctrl-C as a wish to end a run with what there is."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[asyncio.Event]:
    """Set by SIGINT, for `run`. Only in the main thread's event loop, where nothing else may handle it meanwhile."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
