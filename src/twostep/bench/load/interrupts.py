"""Signals that ask a program to end, as a wish to end a run with what there is."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(asyncio.Event):
    """Set by the first signal that came."""

    def __init__(self) -> None:
        super().__init__()
        self.by: signal.Signals | None = None

    def ask(self, which: signal.Signals) -> None:
        self.by = self.by or which
        self.set()


@contextmanager
def interrupts() -> Iterator[Stop]:
    """Set by SIGINT, SIGTERM and SIGHUP, but for those that are ignored, as SIGHUP is under nohup. Only in the main
    thread's event loop; whoever handled them before does so again afterwards."""
    loop, stop = asyncio.get_running_loop(), Stop()
    before = {which: signal.getsignal(which) for which in ASKING}
    heard = [which for which in ASKING if before[which] is not signal.SIG_IGN]
    for which in heard:
        loop.add_signal_handler(which, stop.ask, which)
    try:
        yield stop
    finally:
        for which in heard:
            loop.remove_signal_handler(which)
            signal.signal(which, before[which])
