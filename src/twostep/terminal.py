"""Messages on standard error: lines, and on a terminal a status line that is redrawn."""

import io
import shutil
import sys
from typing import TextIO


def printable(text: str) -> str:
    """Replaces unprintable characters, so that foreign text cannot control the terminal."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def bar(done: int, total: int, cells: int = 30) -> str:
    """A progress bar. It stays full if `done` exceeds `total`, and is full if `total` is 0."""
    filled = cells * min(done, total) // total if total else cells
    return "━" * filled + " " * (cells - filled)


class _Nowhere(io.StringIO):
    """A stream that discards its input."""

    def write(self, text: str) -> int:
        return len(text)


class StatusLine:
    """Writes messages to `stream`, by default standard error; standard output is for results."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # `sys.stderr` is None in a program without a console or with a closed standard error.
        self._stream = stream or sys.stderr or _Nowhere()
        self.live = self._stream.isatty()

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        print(f"{self._clear()}twostep: {printable(line)}", file=self._stream, flush=True)

    def show(self, line: str) -> None:
        """Replaces the status line, cut to the terminal width. Does nothing if the stream is not a terminal."""
        if self.live:
            fitting = line[: self._columns()]
            print(f"{self._clear()}{fitting}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Removes the status line."""
        print(self._clear(), end="", file=self._stream, flush=True)

    def _clear(self) -> str:
        return "\r" + " " * self._columns() + "\r" if self.live else ""

    def _columns(self) -> int:
        return shutil.get_terminal_size().columns - 1
