"""Tells a person on standard error how far a fetch has come: a bar on a terminal, one line anywhere else."""

import shutil
import sys
from typing import TextIO

BAR_CELLS = 30


def megabytes(count: int) -> str:
    """Bytes in decimal megabytes, as package indexes and disks count them."""
    return f"{count / 1e6:.1f} MB"


class Progress:
    """Writes to `stream` only; standard output belongs to results."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()

    def say(self, line: str) -> None:
        print(f"{self._clear()}twostep: {line}", file=self._stream, flush=True)

    def advance(self, done: int, total: int) -> None:
        """Redraws the bar; `total` may be short of the truth, the bar then stays full."""
        if not self._live:
            return
        filled = BAR_CELLS * min(done, total) // total
        bar = "━" * filled + " " * (BAR_CELLS - filled)
        print(f"{self._clear()}  {bar} {megabytes(done)} of {megabytes(total)}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Takes the bar away, so that what is printed next has the line to itself."""
        print(self._clear(), end="", file=self._stream, flush=True)

    def _clear(self) -> str:
        return "\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r" if self._live else ""
