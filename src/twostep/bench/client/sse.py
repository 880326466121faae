"""Server-sent events from bytes as they come, by the rules of the HTML standard (section 9.2.6)."""

from typing import NamedTuple

from twostep.bench.client.failed import garbage

MAX_EVENT_BYTES = 1 << 20
ERROR = b"error"
"""Kind of events that bring one."""


class Event(NamedTuple):
    data: bytes
    kind: bytes = b""
    """Its `event` field."""


class SseParser:
    """Gives each event when its last byte is there. Keeps at most `max_event_bytes` and one read."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        """Of a line whose end has not come."""
        self._data: list[bytes] = []
        """Of the event whose end has not come, by lines."""
        self._size = 0
        """Of `_data`, in bytes."""
        self._kind = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that end in these bytes. Raises `FailureError` for an event that is too long."""
        if self._after_cr and data:  # a CR has ended the line already; an LF after it ends no other
            data, self._after_cr = data.removeprefix(b"\n"), False
        events = [event for line in self._lines(data) if (event := self._line(line)) is not None]
        if len(self._rest) + self._size > self._max:
            raise garbage(f"an event of more than {self._max} bytes")
        return events

    def _lines(self, data: bytes) -> list[bytes]:
        """Whole lines, without their ends."""
        if b"\n" not in data and b"\r" not in data:
            self._rest += data
            return []
        self._after_cr = data.endswith(b"\r")
        lines = (bytes(self._rest) + data).splitlines(keepends=True)
        self._rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else bytearray(lines.pop())
        return [line.rstrip(b"\r\n") for line in lines]

    def _line(self, line: bytes) -> Event | None:
        """The event if this line, an empty one, ends one that has data."""
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name in (b"data", ERROR):  # older servers of llama.cpp put the data of an error into a field of that name
            self._data.append(value)
            self._size += len(value) + 1
        if name == ERROR:
            self._kind = ERROR
        elif name == b"event":
            self._kind = value
        return None

    def _ended(self) -> Event | None:
        event = Event(b"\n".join(self._data), self._kind) if self._data else None
        self._data, self._size, self._kind = [], 0, b""
        return event
