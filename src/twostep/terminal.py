"""Words for a person on standard error: lines, and on a terminal one line that is written anew."""

import io
import shutil
import sys
from typing import TextIO


def printable(text: str) -> str:
    """What others wrote may hold anything, but not move a terminal's cursor."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def bar(done: int, total: int, cells: int = 30) -> str:
    """`total` may be short of the truth, the bar then stays full; nothing to do is done."""
    filled = cells * min(done, total) // total if total else cells
    return "━" * filled + " " * (cells - filled)


class _Nowhere(io.StringIO):
    """A stream that forgets what is written to it."""

    def write(self, text: str) -> int:
        return len(text)


class StatusLine:
    """Writes to `stream` only; standard output belongs to results."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # `sys.stderr` is None in a program without a console or with standard error closed.
        self._stream = stream or sys.stderr or _Nowhere()
        self.live = self._stream.isatty()

    def say(self, line: str) -> None:
        """A line that stays."""
        print(f"{self._clear()}twostep: {printable(line)}", file=self._stream, flush=True)

    def show(self, line: str) -> None:
        """Takes the place of what was shown last; cut to the terminal's width. Only where that is possible."""
        if self.live:
            fitting = line[: self._columns()]
            print(f"{self._clear()}{fitting}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Takes away what was shown, so that what is printed next has the line to itself."""
        print(self._clear(), end="", file=self._stream, flush=True)

    def _clear(self) -> str:
        return "\r" + " " * self._columns() + "\r" if self.live else ""

    def _columns(self) -> int:
        return shutil.get_terminal_size().columns - 1
