"""Non-blocking output: a bounded buffer and a thread that writes it to a file descriptor.

An unread pipe, a terminal paused with Ctrl-S or a stuck disk can block a write for any time. An event loop or an engine
loop must not wait for them, so it passes its output to a `BackgroundWriter`.
"""

import io
import os
import select
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, RLock, Thread, current_thread
from time import monotonic
from typing import TextIO

LOG_BYTES = 1 << 20
"""Buffer size of a log: about 5000 lines."""
PATIENCE_S = 1.0
"""Seconds that an exiting process waits for a reader that makes no progress."""
_WRITE_BYTES = 1 << 16

Notice = Callable[[int], bytes]
"""Formats the line that reports the number of dropped lines."""


class BackgroundWriter:
    """A buffer of at most `limit_bytes` and the thread that writes it to `fd`. Thread-safe.

    With `notice`, for logs: lines that do not fit or cannot be written are dropped, and a line reports their number as
    soon as the reader reads again. Without it, for files that are useless with gaps: writing ends at the first error.
    Writes to a duplicate of `fd`, so the caller may close `fd`. A forked child has no thread and writes nothing.
    """

    def __init__(self, fd: int, limit_bytes: int = LOG_BYTES, *, notice: Notice | None = None) -> None:
        self._buffer = _Buffer(limit_bytes, notice)
        self._thread = Thread(target=_write_out, args=(os.dup(fd), self._buffer), name="twostep-writer", daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, _finish, self._buffer, self._thread, PATIENCE_S)

    @property
    def dropped(self) -> int:
        """Number of lines dropped so far."""
        return self._buffer.dropped

    @property
    def error(self) -> OSError | None:
        """The error of the last failed write."""
        return self._buffer.error

    def write(self, lines: bytes) -> bool:
        """Returns at once, with whether `lines` were accepted; these must be complete lines."""
        return self._buffer.put(lines)

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Writes the rest and ends the thread; gives up after `patience_s` without progress.

        Returns whether the thread ended; otherwise it is stuck in a write.
        """
        self._finish.detach()
        return _finish(self._buffer, self._thread, patience_s)


class _Buffer:
    """State shared by a writer and its thread; does not keep the writer alive."""

    def __init__(self, limit_bytes: int, notice: Notice | None) -> None:
        self.dropped = self.written = 0
        """Dropped lines and written bytes."""
        self.error: OSError | None = None
        self.ended = False
        """The thread should end at once."""
        self._closing = False
        """The thread should end after everything is written."""
        self._changed = Condition()  # reentrant, as a signal handler may log
        self._parts: deque[bytes | int] = deque()
        """Lines; a number stands for that many dropped lines."""
        self._size, self._limit_bytes, self._notice = 0, limit_bytes, notice
        self._unreported = 0
        """Lines dropped after the last part."""
        self._failing = False
        """The last write failed; it is retried when there is new output."""
        self._pid = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, in which no thread writes and the lock may be held forever."""
        return os.getpid() != self._pid

    def put(self, lines: bytes) -> bool:
        """Returns whether the lines were accepted. After a drop, half of the buffer must become free first, so that a
        slow reader gets contiguous lines."""
        if self.foreign:
            return False
        with self._changed:
            room = (self._limit_bytes // 2 if self._unreported else self._limit_bytes) - self._size
            if self._closing or len(lines) > room or (self.error and not self._notice):
                self._drop(lines)
                return False
            self._mark_gap()
            self._parts.append(lines)
            self._size += len(lines)
            self._failing = False
            self._changed.notify_all()
            return True

    def take(self) -> bytes | int | None:
        """Waits for output and returns it, up to a gap; a number of dropped lines at a gap; None at the end."""
        with self._changed:
            while not self._parts and not self._closing and (self._failing or not self._unreported):
                self._changed.wait()
            if not self._parts and not self._failing:
                self._mark_gap()
            if not self._parts or self.ended:
                return None
            first = self._parts.popleft()
            if isinstance(first, int):
                return first
            joined, size = [first], len(first)
            while self._parts and isinstance(part := self._parts[0], bytes) and size < _WRITE_BYTES:
                joined.append(part)
                size += len(part)
                self._parts.popleft()
            return b"".join(joined)

    def notice(self, dropped: int) -> bytes:
        assert self._notice is not None
        return self._notice(dropped)

    def wrote(self, count: int, *, notice: bool) -> None:
        with self._changed:
            self.written += count
            self._size -= 0 if notice else count

    def failed(self, error: OSError, part: bytes | int, rest: bytes) -> None:
        """Records a failed write: of `part`, only the bytes before `rest` were written."""
        with self._changed:
            self.error, self._failing = error, True
            if isinstance(part, int):
                self._unreported += part
            else:
                self._size -= len(rest)
                self._drop(rest)
            self.ended = self.ended or self._notice is None

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _drop(self, lines: bytes) -> None:
        self.dropped += lines.count(b"\n") or 1
        self._unreported += lines.count(b"\n") or 1

    def _mark_gap(self) -> None:
        if self._unreported and self._notice:
            self._parts.append(self._unreported)
        self._unreported = 0


def _write_out(fd: int, buffer: _Buffer) -> None:
    """Runs in the thread; closes `fd` at the end. Uses no file object, whose lock would be held during a blocked
    write."""
    while (part := buffer.take()) is not None:
        is_notice = isinstance(part, int)
        rest = memoryview(buffer.notice(part) if isinstance(part, int) else part)
        try:
            while rest and not buffer.ended:
                count = _write_some(fd, rest)
                buffer.wrote(count, notice=is_notice)
                rest = rest[count:]
        except OSError as error:
            buffer.failed(error, part, bytes(rest))
    os.close(fd)


def _write_some(fd: int, data: memoryview) -> int:
    """Writes as much as the descriptor accepts; waits if it accepts nothing, even if it is non-blocking: another
    process that shares the open file may have made it so."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def _finish(buffer: _Buffer, thread: Thread, patience_s: float) -> bool:
    """Returns whether the thread ended. A thread stuck in a write is left running; it is a daemon."""
    if buffer.foreign:  # the parent process writes the output
        return True
    buffer.close()
    if thread is current_thread():  # called by a finalizer in the writer thread
        return False
    written, since_s = buffer.written, monotonic()
    while thread.is_alive() and monotonic() - since_s <= patience_s:
        thread.join(0.05)
        if buffer.written != written:
            written, since_s = buffer.written, monotonic()
    buffer.ended = True
    return not thread.is_alive()


# --- standard output and error ------------------------------------------------------------------------------------


class BackgroundStream(io.TextIOBase):
    """Replaces a text stream; writes lines through a `BackgroundWriter`."""

    def __init__(self, stream: TextIO, limit_bytes: int) -> None:
        """Raises `OSError` if `stream` has no descriptor. `stream` must stay open as long as this object is used."""
        stream.flush()
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._pending = ""
        self._lock = RLock()  # reentrant, as a signal handler may log
        self._writer = BackgroundWriter(self._fd, limit_bytes, notice=_dropped_lines)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def dropped(self) -> int:
        """Number of lines dropped so far."""
        return self._writer.dropped

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        """Passes on complete lines; an incomplete line waits for its end."""
        with self._lock:
            lines, newline, self._pending = (self._pending + text).rpartition("\n")
            self._pass_on(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Passes on an incomplete line. Does not wait."""
        with self._lock:
            text, self._pending = self._pending, ""
            self._pass_on(text)

    def finish(self, patience_s: float = PATIENCE_S) -> bool:
        """Writes the rest; waits at most `patience_s` for a reader that makes no progress.

        Returns whether no write is stuck, so that the original stream can be used again.
        """
        self.flush()
        return self._writer.close(patience_s)

    def _pass_on(self, text: str) -> None:
        if text:
            self._writer.write(text.encode(self._encoding, "backslashreplace"))


def _dropped_lines(count: int) -> bytes:
    lines = "1 log line was" if count == 1 else f"{count} log lines were"
    return f"twostep: {lines} dropped, because the log could not be written fast enough\n".encode()


@contextmanager
def background_output(
    limit_bytes: int = LOG_BYTES, names: Sequence[str] = ("stdout", "stderr")
) -> Iterator[Callable[[], int]]:
    """Makes these streams of `sys` non-blocking. Yields a function that returns the number of dropped lines.

    A stream with a stuck write stays replaced, so that later output does not block either.
    """
    replaced = {name: _in_background(getattr(sys, name), limit_bytes) for name in names}
    streams = {name: made for name, made in replaced.items() if made is not None}
    originals = {name: getattr(sys, name) for name in streams}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield lambda: sum(stream.dropped for stream in streams.values())
    finally:
        for name, stream in streams.items():
            if stream.finish() and getattr(sys, name) is stream:
                setattr(sys, name, originals[name])


def _in_background(stream: TextIO | None, limit_bytes: int) -> BackgroundStream | None:
    """None for a stream that is closed or has no descriptor, as in tests; it cannot block."""
    try:
        return None if stream is None else BackgroundStream(stream, limit_bytes)
    except (OSError, ValueError):  # `io.UnsupportedOperation` is both
        return None
